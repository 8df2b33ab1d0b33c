"""Files that ask for more than any model has are refused before anything is allocated."""

from __future__ import annotations

import json
import resource
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from test_models_config import HUB

from weft.core.errors import CheckpointError, UnsupportedModelError
from weft.core.json_files import MOST_BYTES, MOST_DEPTH
from weft.kernels.ops import select_ops
from weft.models.bounds import MOST, MOST_HEADER_BYTES, MOST_INTEGER
from weft.models.generation import read_generation_defaults
from weft.models.gguf import GgufFile
from weft.models.gguf_header import MOST_STRINGS, read_header
from weft.models.loader import load_model
from weft.models.spec_reader import read_spec, spec_from_config

LLAMA = HUB["llama-3.1-8b"]
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "vocab_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
SIZES = [key for key in MOST if key in LLAMA]


@pytest.fixture(autouse=True)
def _within_bounds():
    """No test here may take long or much."""
    began, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.process_time() - began < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 2**20  # KiB


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("key", SIZES)
def test_sizes_of_a_config(key):
    for value in (MOST[key] + 1, 10**9, 10**30, 10**4000):
        with pytest.raises(UnsupportedModelError, match=f"'{key}': 1?.* at most {MOST[key]} is"):
            spec_from_config(LLAMA | {key: value})


def test_real_models_are_far_below_the_bounds():
    for name, config in HUB.items():
        for key, most in MOST.items():
            if key in config and config[key] is not None:
                assert 4 * config[key] <= most, (name, key)


@pytest.mark.parametrize(
    "change",
    [
        {"num_experts": 4096, "num_hidden_layers": 512},
        {"num_experts": 2**20},
        {"num_experts_per_tok": 9},
    ],
)
def test_experts_of_all_layers(change):
    spec_from_config(EXPERTS)
    with pytest.raises(UnsupportedModelError, match="num_experts"):
        spec_from_config(EXPERTS | change)


@pytest.mark.parametrize(
    "change",
    [
        {"eos_token_id": 10**12},
        {"eos_token_id": [1, MOST_INTEGER + 1]},
        {"eos_token_id": list(range(10**5))},
        {"rope_theta": 10**400},
        {"rms_norm_eps": float("nan")},
        {"rope_scaling": LLAMA["rope_scaling"] | {"factor": float("inf")}},
        {"architectures": 7},
        {"architectures": {"x": 1}},
        {"architectures": [["LlamaForCausalLM"]]},
        {"unknown" * 10**5: "x" * 10**6},
    ],
)
def test_values_of_a_config(change):
    with pytest.raises(UnsupportedModelError) as caught:
        spec_from_config(LLAMA | change)
    assert len(caught.value.message) < 1000


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("text", "why"),
    [
        (json.dumps({"x": nested(MOST_DEPTH + 1)}), "levels deep"),
        ('{"x": ' + "[" * 10**6, "nested too deeply"),
        ('{"x": ' + "9" * 10**5 + "}", "JSON"),
        ("{}" + " " * MOST_BYTES, "longer than"),
        ("[]", "not a JSON object"),
        ("\ud800", "UTF-8"),
    ],
    ids=["deep", "deeper", "digits", "long", "array", "surrogate"],
)
def test_json_files(tmp_path, name, text, why):
    (tmp_path / name).write_bytes(text.encode("utf-8", "surrogatepass"))
    read = read_spec if name == "config.json" else read_generation_defaults
    with pytest.raises(UnsupportedModelError, match=f"{name} .*{why}"):
        read(tmp_path)


def load(folder: Path) -> None:
    load_model(folder, "float32", None, select_ops("cpu", "float32", "reference"))


def test_a_padded_safetensors_header(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    path = tmp_path / "model.safetensors"
    save_file({"model.norm.weight": np.zeros(8, np.float32)}, path)
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    longer = MOST_HEADER_BYTES + 8
    header = data[8 : 8 + size].ljust(longer)
    path.write_bytes(longer.to_bytes(8, "little") + header + data[8 + size :])
    with pytest.raises(CheckpointError, match=f"its header has {longer} bytes"):
        load(tmp_path)


@pytest.mark.parametrize(
    "names",
    [[1], ["../model.safetensors"], ["x" * 10**5], ["a\0b"], [None], [], [["x"]], "x", None],
)
def test_an_index_that_names_no_files(tmp_path, names):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    weight_map = {str(n): name for n, name in enumerate(names)} if type(names) is list else names
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"index\.json (has no weight_map|names files)") as e:
        load(tmp_path)
    assert len(e.value.message) < 1000


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def gguf(*fields: bytes, tensors: bytes = b"", num_tensors: int = 0, num_fields: int = -1) -> bytes:
    count = len(fields) if num_fields < 0 else num_fields
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, count) + b"".join(fields) + tensors


def array(kind: int, count: int, data: bytes = b"") -> bytes:
    return string(b"a") + struct.pack("<IIQ", 9, kind, count) + data


def tensor(*dims: int, kind: int = 0, offset: int = 0) -> bytes:
    shape = struct.pack(f"<{len(dims)}Q", *dims)
    return string(b"t") + struct.pack("<I", len(dims)) + shape + struct.pack("<IQ", kind, offset)


HOSTILE_GGUF = {
    "nothing": b"",
    "no magic": b"GGML" + b"\0" * 100,
    "the other byte order": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "an array of 2^60 numbers": gguf(array(4, 2**60)),
    "an array of 2^60 strings": gguf(array(8, 2**60)),
    "too many strings": gguf(array(8, MOST_STRINGS + 1, b"\0" * 8 * (MOST_STRINGS + 1))),
    "nested arrays": gguf(array(9, 1, struct.pack("<IQ", 9, 1) * 10**5)),
    "a string of 2^63 bytes": gguf(string(b"a") + struct.pack("<IQ", 8, 2**63)),
    "a long name": gguf(string(b"a" * 2**17) + struct.pack("<II", 4, 1)),
    "an unknown type": gguf(string(b"a") + struct.pack("<I", 99)),
    "a name twice": gguf(*[string(b"a") + struct.pack("<II", 4, 1)] * 2),
    "2^60 fields": gguf(num_fields=2**60),
    "2^60 tensors": gguf(num_tensors=2**60),
    "a tensor beyond the file": gguf(tensors=tensor(64, 2**40), num_tensors=1),
    "a tensor far away": gguf(tensors=tensor(8, offset=2**62), num_tensors=1),
    "sizes that overflow": gguf(tensors=tensor(2**32, 2**32, 2**32), num_tensors=1),
    "no sizes": gguf(tensors=tensor(), num_tensors=1),
    "a thousand sizes": gguf(tensors=tensor(*[1] * 1000), num_tensors=1),
    "an empty tensor": gguf(tensors=tensor(0, 2**60), num_tensors=1),
    "an unknown type of tensor": gguf(tensors=tensor(8, kind=999) + b"\0" * 99, num_tensors=1),
    "half a block": gguf(tensors=tensor(8, kind=8) + b"\0" * 99, num_tensors=1),
    "an alignment of 3": gguf(string(b"general.alignment") + struct.pack("<II", 4, 3)),
    "text that is none": gguf(string(b"\xff") + struct.pack("<II", 4, 1)),
}


@pytest.mark.parametrize("name", HOSTILE_GGUF)
def test_gguf_headers(tmp_path, name):
    path = tmp_path / "model.gguf"
    path.write_bytes(HOSTILE_GGUF[name])
    with pytest.raises(CheckpointError, match=r"model\.gguf: .* fetch it again") as caught:
        GgufFile(path)
    assert len(caught.value.message) < 1000


def test_what_a_gguf_header_says(tmp_path):
    path = tmp_path / "model.gguf"
    words = b"".join(string(b"w" * n) for n in range(1000))
    fields = (
        string(b"flag") + struct.pack("<IB", 7, 1),
        string(b"real") + struct.pack("<If", 6, 0.5),
        string(b"text") + struct.pack("<I", 8) + string("é".encode()),
        array(5, 2, struct.pack("<ii", -1, 7)),
        string(b"words") + struct.pack("<IIQ", 9, 8, 1000) + words,
    )
    head = gguf(*fields, tensors=tensor(4, 2), num_tensors=1)
    numbers = np.arange(8, dtype=np.float32)
    path.write_bytes(head.ljust(-(-len(head) // 32) * 32, b"\0") + numbers.tobytes())
    found = read_header(path)
    assert found.fields == {
        "flag": True,
        "real": 0.5,
        "text": "é",
        "a": [-1, 7],
        "words": "a list of 1000 strings",
    }
    assert found.tensors["t"].shape == (4, 2)
    assert found.tensors["t"].data.tolist() == numbers.reshape(2, 4).tolist()
