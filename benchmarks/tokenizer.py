"""Speed of weft's tokeniser against Hugging Face's libraries, on texts of 10 to 2048 tokens.

    python benchmarks/tokenizer.py [--rounds 15] [--lengths 10,32,128,512,2048]
        [--vocabularies 8000,32000] [--out benchmarks/results/tokenizer.json]

Tokenisers: the built-in model's, and two that are trained here on sources of Python's standard
library and saved as model folders: byte-level BPE in the manner of Llama 3, and BPE with byte
fallback in that of Llama 2, with 8000 and 32000 entries. Texts begin anywhere in sources that they
were not trained on, and are new in each round: libraries remember words, and may do so here.

weft is what a server calls (``weft.text``, once its encoder has found that fastokens agrees);
``tokenizers`` the library that weft takes as its reference; ``transformers`` the call of a user,
``AutoTokenizer.from_pretrained(folder)(text)``. Whole texts are encoded and decoded; a stream gives
the text of one token after the other, by weft's ``Detokenizer``, by the library's ``DecodeStream``,
and by the ``TextIteratorStreamer`` of transformers. All give the same ids and texts, or it fails.

In each round all take their turn with the same texts; a ratio is the median over the rounds of the
other's time to weft's.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer, PreTrainedTokenizerFast, TextIteratorStreamer

import report
from weft.engine.machine import cpu_name
from weft.models.hub import resolve_model
from weft.text import Tokenizer as WeftTokenizer
from weft.text.detokenize import Detokenizer

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TRAINED_BYTES, HELD_OUT = 8 << 20, 0.1
TOKENS_A_ROUND = 8192
WAYS = ("weft", "tokenizers", "transformers")


def sources() -> tuple[list[str], str]:
    """Texts to train on, and one of others."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    files += sorted(Path(sysconfig.get_path("stdlib")).glob("*/*.py"))
    random.Random(0).shuffle(files)
    texts = [file.read_text(encoding="utf-8", errors="ignore") for file in files]
    held = int(HELD_OUT * len(texts))
    trained: list[str] = []
    size = 0
    for text in texts[held:]:
        if (size := size + len(text)) > TRAINED_BYTES:
            break
        trained.append(text)
    return trained, "\n".join(texts[:held])


def byte_level(texts: list[str], size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def byte_fallback(texts: list[str], size: int) -> Tokenizer:
    special = ["<unk>", "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[*special, *(f"<0x{i:02X}>" for i in range(256))],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    document = json.loads(tokenizer.to_str())  # as models have it: bytes are no added tokens
    added = [token for token in document["added_tokens"] if token["content"] in special]
    document |= {"pre_tokenizer": None, "added_tokens": added}
    tokenizer = Tokenizer.from_str(json.dumps(document))
    prepend, spaces = normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([prepend, spaces])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return tokenizer


class Contest:
    """One tokeniser in three ways, with texts of so many tokens each."""

    def __init__(self, weft: WeftTokenizer, user: Any, held_out: str, length: int) -> None:
        self._weft, self._user, self._reference = weft, user, weft.reference
        self._held_out, self._length = held_out, length
        self._draw = random.Random(length)
        self.texts: list[str] = []
        self.ids: list[list[int]] = []

    def renew(self) -> None:
        """Take other texts."""
        count, reach = max(4, TOKENS_A_ROUND // self._length), 64 * self._length
        self.texts, self.ids = [], []
        while len(self.texts) < count:
            at = self._draw.randrange(len(self._held_out) - reach)
            window = self._held_out[at : at + reach]
            encoding = self._reference.encode(window, add_special_tokens=False)
            text = window[: encoding.offsets[self._length][0]]
            self.texts.append(text)
            self.ids.append(self._reference.encode(text, add_special_tokens=False).ids)

    def ways(self, kind: str) -> dict[str, Callable[[], list[Any]]]:
        """What each way does with all texts; all give the same."""
        weft, reference, user = self._weft, self._reference, self._user
        calls: dict[str, dict[str, Callable[[Any], Any]]] = {
            "encode": {
                "weft": lambda text: weft.encode(text, add_special_tokens=False),
                "tokenizers": lambda text: reference.encode(text, add_special_tokens=False).ids,
                "transformers": lambda text: user(text, add_special_tokens=False)["input_ids"],
            },
            "decode": {"weft": weft.decode, "tokenizers": reference.decode},
            "stream": {"weft": self._stream, "tokenizers": self._decode_stream},
        }
        calls["decode"]["transformers"] = user.decode
        calls["stream"]["transformers"] = self._streamer

        def each(call: Callable[[Any], Any]) -> list[Any]:
            return [call(one) for one in (self.texts if kind == "encode" else self.ids)]

        return {way: partial(each, call) for way, call in calls[kind].items()}

    def _stream(self, ids: list[int]) -> str:
        one = Detokenizer(self._weft)
        return "".join([*(one.push((token,)) for token in ids), one.flush()])

    def _decode_stream(self, ids: list[int]) -> str:
        stream = DecodeStream(skip_special_tokens=True)
        return "".join([stream.step(self._reference, token) or "" for token in ids])

    def _streamer(self, ids: list[int]) -> str:
        streamer = TextIteratorStreamer(self._user)
        for token in ids:
            streamer.put(np.array([token]))
        streamer.end()
        return "".join(streamer)

    def measure(self, kind: str, rounds: int) -> dict[str, Any]:
        """Seconds a text, by way, and the ratios."""
        ways = self.ways(kind)
        samples: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(rounds + 1):
            self.renew()
            results = {}
            for way in sorted(ways, reverse=bool(number % 2)):
                began = time.perf_counter()
                results[way] = ways[way]()
                taken = time.perf_counter() - began
                if number:  # the first round warms up
                    samples[way].append(taken / len(self.texts))
            for way in WAYS[1:]:
                assert results[way] == results["weft"], f"{way} gives something else: {kind}"
        ratios = {
            way: statistics.median(
                other / ours for other, ours in zip(samples[way], samples["weft"], strict=True)
            )
            for way in WAYS[1:]
        }
        medians = {f"{way}_us": 1e6 * statistics.median(taken) for way, taken in samples.items()}
        return {**medians, "ratios": ratios, "samples_s": samples}


def folders(root: Path, sizes: list[int], texts: list[str]) -> Iterator[tuple[str, Path]]:
    """Names and model folders of all tokenisers."""
    yield "built-in", resolve_model("builtin", offline=True)
    for make in (byte_level, byte_fallback):
        for size in sizes:
            folder = root / f"{make.__name__}-{size}"
            PreTrainedTokenizerFast(tokenizer_object=make(texts, size)).save_pretrained(folder)
            yield f"{make.__name__} {size}", folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="10,32,128,512,2048")
    parser.add_argument("--vocabularies", default="8000,32000")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    logging.getLogger("transformers").setLevel(logging.ERROR)
    lengths = [int(word) for word in options.lengths.split(",")]
    sizes = [int(word) for word in options.vocabularies.split(",")]
    texts, held_out = sources()
    rows = []
    print(f"{'':>28}{'tokens':>7}" + "".join(f"{way + ' us':>17}" for way in WAYS) + "  ratios")
    with tempfile.TemporaryDirectory() as root:
        for name, folder in folders(Path(root), sizes, texts):
            weft, user = WeftTokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
            weft.encoder.decide()
            print(f"{name}: {weft.encoder.name}, {weft.encoder.reason}")
            for length in lengths:
                contest = Contest(weft, user, held_out, length)
                for kind in ("encode", "decode", "stream"):
                    found = contest.measure(kind, options.rounds)
                    shown = "".join(f"{found[f'{way}_us']:>17.1f}" for way in WAYS)
                    ratios = "".join(f"{ratio:>8.2f}" for ratio in found["ratios"].values())
                    print(f"{name + ' ' + kind:>28}{length:>7}{shown}{ratios}")
                    row = {"tokenizer": name, "kind": kind, "tokens": length}
                    rows.append({**row, "encoder": weft.encoder.name, **found})
    if options.out:
        libraries = {name: version(name) for name in ("tokenizers", "transformers", "fastokens")}
        report.save(options.out, cpu=cpu_name(), versions=libraries, rows=rows)


if __name__ == "__main__":
    main()
