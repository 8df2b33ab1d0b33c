"""Small checkpoints whose files are damaged at random, each loaded in a process with limits.

    python tests/fuzz/checkpoints.py FIRST COUNT

runs the cases of these numbers and prints a line of JSON for each that does not end well: it has
to load, or to be refused with one typed sentence, within 10 s of CPU time and 1 GiB of memory.
"""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

CPU_S, WALL_S, MEMORY_BYTES = 10, 120, 2**30
MODEL = "model.safetensors"
DEEP = "@deep@"  # stands for brackets that json.dumps would not write
NUMBERS = (0, 1, 2, 3, 5, 7, -1, 10**4, 10**6, 10**9, 10**12, 2**31, 2**32, 2**63, 2**64, 10**30)
FLOATS = (0.5, -1.5, 1e-320, 1e-9, 1e9, 1e300, float("inf"), float("nan"), 10**400)
TEXTS = ("", "x", "\x00", "\ud800", "x" * 10**6, "builtin", "../../etc/passwd", "é" * 999, DEEP)
OTHERS = (
    None,
    True,
    False,
    [],
    {},
    [[]],
    [1] * 10**5,
    {"a": {}},
    [{}],
    ["x"] * 999,
    [1, "x", None],
)
VALUES = (*NUMBERS, *FLOATS, *TEXTS, *OTHERS)
PIECES = (b"\xff", b"\x00" * 8, b'"', b"[" * 9999, b'{"a":' * 9999, b"9" * 9999, b" " * 10**6, b"}")
STEPS = (
    {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000},
    {"type": "Replace", "pattern": {"String": "e"}, "content": "a" * 30},
    {"type": "Replace", "pattern": {"Regex": "(a|e)*"}, "content": "ea"},
    {"type": "Replace", "pattern": {"Regex": "("}, "content": ""},
    {"type": "Replace", "pattern": {"String": ""}, "content": "aa"},
    {"type": "Prepend", "prepend": "e" * 99},
    {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    *({"type": kind} for kind in ("NFKD", "Lowercase", "StripAccents", "Nmt", "ByteLevel", "Fuse")),
)
FRAGMENTS = (
    "{{ 'x' * 10 ** 10 }}", "{{ '%1000000000d' % 1 }}", "{{ messages|tojson(indent=10**9) }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}", "{% endfor %}", "{% if x %}",
    "{{ messages[0].content.ljust(10 ** 10) }}", "{% set a = a ~ a %}", "{{ (" * 300, ")) }}" * 300,
    "{{ messages[9].x.y }}", "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "{{", "%}", "{#",
    "{{ messages|batch(10 ** 10) }}", "{{ raise_exception('no') }}", "{{ ''.join(messages) }}",
    "{{ [[[messages]]]|string * 99 }}", "{{ 10 ** 10 ** 10 }}", "\x00", "x" * 99999,
)  # fmt: skip


class Case:
    """The folder of one case, and chance."""

    def __init__(self, base: Path, folder: Path, number: int) -> None:
        self.folder = folder
        self.draw = random.Random(number)
        for path in base.iterdir():
            os.link(path, folder / path.name)

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        (self.folder / name).unlink(missing_ok=True)
        (self.folder / name).write_bytes(data)

    def damage_json(self, name: str) -> None:
        """Change a few values of a file, or a few of its bytes."""
        self.write(name, self.damaged(json.loads(self.read(name))))

    def damaged(self, value: Any) -> bytes:
        if self.draw.random() < 0.1:
            return self.broken(json.dumps(value).encode())
        holder = [copy.deepcopy(value)]
        for _ in range(self.draw.randint(1, 3)):
            self._change(holder)
        text = json.dumps(holder[0])
        return text.replace(f'"{DEEP}"', "[" * 5000 + "]" * 5000).encode()

    def _change(self, holder: list[Any]) -> None:
        parent, key = self._place(holder)
        kind = self.draw.choice(("replace", "replace", "replace", "scale", "drop", "repeat"))
        if kind == "scale" and type(parent[key]) in (int, float):
            parent[key] *= self.draw.choice((-1, 0, 2, 3, 10, 1000, 10**6, 10**12))
        elif kind == "repeat" and isinstance(parent[key], list):
            parent[key] = parent[key] * self.draw.choice((2, 100, 1000))
        elif kind == "drop" and parent is not holder:
            del parent[key]
        else:
            parent[key] = copy.deepcopy(self.draw.choice(VALUES))

    def _place(self, holder: list[Any]) -> tuple[Any, Any]:
        """A container and a key, from any depth alike."""
        parent, key, sure = holder, 0, 0.98
        while isinstance(parent[key], dict | list) and parent[key] and self.draw.random() < sure:
            sure = 0.8
            parent = parent[key]
            keys = range(len(parent)) if isinstance(parent, list) else list(parent)
            key = self.draw.choice(keys)
        return parent, key

    def broken(
        self,
        data: bytes,
        first: int = 0,
        last: int | None = None,
        kinds: tuple[str, ...] = ("cut", "repeat", "insert", "bit", "number", "end"),
    ) -> bytes:
        """Change a few bytes in a range."""
        for _ in range(self.draw.randint(1, 3)):
            at = self.draw.randrange(first, min(len(data), last or len(data)) or 1)
            upto = at + self.draw.randint(1, 40)
            kind = self.draw.choice(kinds)
            if kind == "cut":
                data = data[:at] + data[upto:]
            elif kind == "repeat":
                data = data[:upto] + data[at:]
            elif kind == "insert":
                data = data[:at] + self.draw.choice(PIECES) + data[at:]
            elif kind == "bit":
                data = data[:at] + bytes([data[at] ^ 1 << self.draw.randrange(8)]) + data[at + 1 :]
            elif kind == "number":
                value = self.draw.choice((0, 1, 2**16, 2**31, 2**32 - 1, 2**60, 2**64 - 1))
                data = data[:at] + value.to_bytes(8, "little") + data[at + 8 :]
            else:
                data = data[:at]
        return data


def config(case: Case) -> None:
    case.damage_json("config.json")


def other_config(case: Case) -> None:
    """Of a family without weights here: as far as the weights it needs."""
    from test_models_config import HUB

    name = case.draw.choice(sorted(HUB))
    case.write("config.json", case.damaged(HUB[name]))


def generation(case: Case) -> None:
    case.damage_json("generation_config.json")


def safetensors(case: Case) -> None:
    data = case.read(MODEL)
    size = int.from_bytes(data[:8], "little")
    if case.draw.random() < 0.3:
        case.write(MODEL, case.broken(data, 0, 8 + size))
        return
    header = case.damaged(json.loads(data[8 : 8 + size]))
    header += b" " * case.draw.choice((0, 0, 0, 0, 3, 90 * 10**6))
    case.write(MODEL, len(header).to_bytes(8, "little") + header + data[8 + size :])


def index(case: Case) -> None:
    names = {"weight_map": dict.fromkeys(("model.norm.weight", "lm_head.weight"), MODEL)}
    case.write(MODEL + ".index.json", case.damaged(names))


def gguf(case: Case) -> None:
    (case.folder / "config.json").unlink()
    data = case.read("model.gguf")
    end = data.index(b"token_embd.weight") + 4000
    kinds = ("bit", "bit", "number", "number", "cut", "insert")
    case.write("model.gguf", case.broken(data, 0, end, kinds))


def tokenizer(case: Case) -> None:
    document = json.loads(case.read("tokenizer.json"))
    if case.draw.random() < 0.4:
        section = case.draw.choice(("normalizer", "decoder", "pre_tokenizer"))
        steps = case.draw.choices(STEPS, k=case.draw.randint(1, 6))
        document[section] = {"type": "Sequence", f"{section}s": steps}
        document[section] |= {"normalizers": steps, "decoders": steps, "pretokenizers": steps}
        case.write("tokenizer.json", json.dumps(document).encode())
        return
    case.write("tokenizer.json", case.damaged(document))


def tokenizer_config(case: Case) -> None:
    case.damage_json("tokenizer_config.json")


def template(case: Case) -> None:
    source = json.loads(case.read("tokenizer_config.json"))["chat_template"]
    for _ in range(case.draw.randint(1, 4)):
        at = case.draw.randrange(len(source))
        upto = at + case.draw.choice((0, 0, 1, 9, 99))
        source = source[:at] + case.draw.choice(FRAGMENTS) + source[upto:]
    case.write("chat_template.jinja", source.encode())


KINDS: tuple[tuple[Callable[[Case], None], int], ...] = (
    (config, 28),
    (other_config, 12),
    (generation, 5),
    (safetensors, 12),
    (index, 2),
    (gguf, 15),
    (tokenizer, 14),
    (tokenizer_config, 4),
    (template, 8),
)


def load(kind: str, folder: Path) -> None:
    """Use a model folder as far as the file that is damaged matters."""
    from weft.engine.llm import LLM
    from weft.models.layout import num_parameters, weight_bytes
    from weft.models.spec_reader import read_spec
    from weft.text import ChatTemplate, Tokenizer, encode_chat

    chat = [{"role": "user", "content": "What is a tree?"}]
    if kind == "other_config":
        spec = read_spec(folder)
        num_parameters(spec)
        weight_bytes(spec, "bfloat16")
    elif kind in ("tokenizer", "tokenizer_config"):
        tokens = Tokenizer.load(folder)
        tokens.decode(tokens.encode("a tree <|bos|> " * 100))
        if kind == "tokenizer_config":
            encode_chat(tokens, ChatTemplate.load(folder), chat)
    elif kind == "template":
        encode_chat(Tokenizer.load(folder), ChatTemplate.load(folder), chat)
    else:
        source = folder / "model.gguf" if kind == "gguf" else folder
        sizes = {"threads": 1, "kv_memory": "16MiB", "max_num_seqs": 2, "speculation": 0}
        with LLM.in_process(str(source), device="cpu", **sizes) as llm:
            (result,) = llm.generate(["a tree"], progress=False)
            if result.error is not None:
                raise result.error


def one(kind: str, folder: Path) -> None:
    """In a process of its own: load a folder, and exit with what came of it in a file."""
    from weft.core.errors import InvariantError, WeftError

    statm = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (statm + MEMORY_BYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with (folder / "stderr").open("w") as stderr:
        os.dup2(stderr.fileno(), 2)
    outcome = "loads"
    try:
        load(kind, folder)
    except WeftError as error:
        sentence = error.message
        good = sentence and len(sentence) < 2000 and "\n" not in sentence.strip()
        bad = isinstance(error, InvariantError) or not good
        outcome = (
            f"{'NO SENTENCE' if bad else 'refused'}: {type(error).__name__}: {sentence[:3000]}"
        )
    (folder / "outcome").write_text(outcome, errors="replace")


def run_one(base: Path, number: int) -> dict[str, Any]:
    """Damage a copy of the checkpoint and load it in a child."""
    draw = random.Random(number)
    kind = draw.choices([kind for kind, _ in KINDS], [weight for _, weight in KINDS])[0]
    folder = Path(tempfile.mkdtemp(dir=base.parent))
    kind(Case(base, folder, number))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setsid()
            one(kind.__name__, folder)
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    ended = os.pidfd_open(child)
    in_time = bool(select.select([ended], [], [], WALL_S)[0])
    os.close(ended)
    if not in_time:
        os.kill(child, signal.SIGKILL)
    _, status, used = os.wait4(child, 0)
    said = folder / "outcome"
    outcome = said.read_text() if said.exists() else ""
    errors = (folder / "stderr").read_text(errors="replace") if (folder / "stderr").exists() else ""
    shutil.rmtree(folder)
    return {
        "case": number,
        "kind": kind.__name__,
        "outcome": outcome or "NO OUTCOME",
        "exit": os.waitstatus_to_exitcode(status) if in_time else "hangs",
        "stderr": errors[-2000:],
        "cpu_s": round(used.ru_utime + used.ru_stime, 2),
    }


def failed(result: dict[str, Any]) -> bool:
    bad = not result["outcome"].startswith(("loads", "refused"))
    return bad or result["exit"] != 0 or "Traceback" in result["stderr"]


def make_base(folder: Path) -> Path:
    """A Llama of two thin layers with the built-in model's tokeniser and chat template."""
    import gguf
    import numpy as np
    from safetensors.numpy import save_file

    import weft

    builtin = Path(weft.__file__).parent / "builtin"
    base = folder / "base"
    base.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(builtin / name, base / name)
    values = json.loads((builtin / "config.json").read_text())
    values |= {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    values |= {"head_dim": 16, "intermediate_size": 96, "num_hidden_layers": 2}
    values |= {"tie_word_embeddings": True, "max_position_embeddings": 256}
    (base / "config.json").write_text(json.dumps(values))
    shapes = {"model.embed_tokens.weight": (values["vocab_size"], 64), "model.norm.weight": (64,)}
    for layer in ("model.layers.0.", "model.layers.1."):
        for name, shape in (
            ("input_layernorm", (64,)),
            ("post_attention_layernorm", (64,)),
            ("self_attn.q_proj", (64, 64)),
            ("self_attn.k_proj", (32, 64)),
            ("self_attn.v_proj", (32, 64)),
            ("self_attn.o_proj", (64, 64)),
            ("mlp.gate_proj", (96, 64)),
            ("mlp.up_proj", (96, 64)),
            ("mlp.down_proj", (64, 96)),
        ):
            shapes[f"{layer}{name}.weight"] = shape
    numbers = np.random.default_rng(1)
    weights = {
        name: (numbers.normal(size=shape) * 0.1).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(weights, base / MODEL)
    writer = gguf.GGUFWriter(base / "model.gguf", "llama")
    writer.add_block_count(2)
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_token_list([f"token{n}" for n in range(100)])
    writer.add_eos_token_id(1)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, weight in weights.items():
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return base


def main() -> None:
    first, count = map(int, sys.argv[1:3])
    sys.path.append(str(Path(__file__).parents[1] / "numeric"))
    import test_models_config  # noqa: F401

    import weft.engine.build
    import weft.engine.llm
    import weft.engine.local
    import weft.text.template
    import weft.text.tokenizer  # noqa: F401

    with tempfile.TemporaryDirectory(prefix="weft-fuzz-") as folder:
        base = make_base(Path(folder))
        for number in range(first, first + count):
            result = run_one(base, number)
            if failed(result) or len(sys.argv) > 3:
                print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
