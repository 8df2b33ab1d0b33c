"""Vectors of texts by weft and by sentence-transformers, turn by turn on the same threads.

    python benchmarks/embeddings.py PYTHON --out FILE.json

PYTHON is the interpreter of an environment with sentence-transformers. The model has the shape of
BGE-small (384 wide, 12 layers) and random weights, which cost what trained ones do; the texts are
of a search engine's mix: queries, passages, and some long documents. Each round takes all texts,
first by one and then by the other, tokenised and with their vectors back in Python. weft gets them
as a user gives them; sentence-transformers sorts them by length and pads batches of 32.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from weft import LLM
from weft.core.results import write_json
from weft.core.topology import this_machine
from weft.engine.machine import cpu_name
from weft.kernels.cpu import attention

DRIVER = Path(__file__).parent / "peers" / "drive_sentence_transformers.py"
MARKS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SHAPES = {
    "bge-small": {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 12},
    "bge-base": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12},
}
VOCABULARY, LONGEST = 30522, 512
# Share of the texts, and the least and most words of each.
MIX = ((0.5, 6, 24), (0.4, 60, 200), (0.1, 300, 500))


def make_model(folder: Path, shape: str) -> None:
    """Write a random checkpoint with a tokeniser and the modules of BGE."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, BertTokenizerFast

    torch.manual_seed(0)
    config = BertConfig(vocab_size=VOCABULARY, num_attention_heads=12, **SHAPES[shape])
    BertModel(config).save_pretrained(folder)
    words = [*MARKS, *(f"w{number}" for number in range(VOCABULARY - len(MARKS)))]
    made = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    BertTokenizerFast(tokenizer_object=made).save_pretrained(folder)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for path in ("1_Pooling", "2_Normalize"):
        (folder / path).mkdir()
    size = SHAPES[shape]["hidden_size"]
    pooling = {"word_embedding_dimension": size, "pooling_mode_cls_token": True}
    pooling |= {"pooling_mode_mean_tokens": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": LONGEST}))


def make_texts(count: int) -> list[str]:
    """Texts of the mix, in no order."""
    draw = np.random.default_rng(0)
    lengths = [
        int(length)
        for share, least, most in MIX
        for length in draw.integers(least, most, round(share * count))
    ]
    draw.shuffle(lengths)
    return [" ".join(f"w{n}" for n in draw.integers(0, 30000, length)) for length in lengths]


class Peer:
    """sentence-transformers in a process of its own."""

    def __init__(self, python: Path, folder: Path, texts: Path, threads: int) -> None:
        command = [str(python), str(DRIVER), str(folder), str(texts), str(threads)]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.versions = self._line()

    def run(self) -> dict[str, Any]:
        """Seconds for all texts, and the first vectors."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._line()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit("sentence-transformers has ended; see above")
        found: dict[str, Any] = json.loads(line)
        return found


@contextmanager
def peer(python: Path, folder: Path, texts: Path, threads: int) -> Iterator[Peer]:
    started = Peer(python, folder, texts, threads)
    try:
        yield started
    finally:
        started.close()


def by_weft(llm: LLM, texts: list[str]) -> tuple[float, np.ndarray]:
    """Seconds for all texts, and their vectors."""
    start = time.perf_counter()
    vectors = llm.embed(texts)
    return time.perf_counter() - start, np.array(vectors)


def compare(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Both in turns, after a round of each that does not count."""
    texts = make_texts(given.texts)
    listed = folder / "texts.json"
    listed.write_text(json.dumps(texts))
    settings: dict[str, Any] = {"threads": given.threads, "dtype": "float32"}
    settings |= {"kv_memory": "512MiB", "quantize": given.quantize}
    with (
        peer(given.python, folder, listed, given.threads) as other,
        LLM.in_process(folder, **settings) as llm,
    ):
        tokens = sum(len(llm.tokenizer.encode(text)) for text in texts)
        rounds = []
        for number in range(given.rounds + 1):
            theirs = other.run()
            seconds, vectors = by_weft(llm, texts)
            likeness = (vectors[: len(theirs["first"])] * np.array(theirs["first"])).sum(1)
            if number:
                rounds.append((seconds, theirs["seconds"]))
            print(
                f"weft {seconds:.2f} s, sentence-transformers {theirs['seconds']:.2f} s", flush=True
            )
        own, their = (statistics.median(one[who] for one in rounds) for who in (0, 1))
        return {
            "texts": len(texts),
            "tokens": tokens,
            "weft": {"texts_per_s": len(texts) / own, "tokens_per_s": tokens / own},
            "sentence-transformers": {
                "texts_per_s": len(texts) / their,
                "tokens_per_s": tokens / their,
            },
            "ratio": their / own,
            "rounds": [theirs / ours for ours, theirs in rounds],
            "least_cosine": float(likeness.min()),
            "versions": other.versions,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("python", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shape", choices=SHAPES, default="bge-small")
    parser.add_argument("--quantize", choices=("none", "int8"), default="none", help="of weft")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / given.shape
        make_model(folder, given.shape)
        found = compare(given, folder)
    named = ("rounds", "texts", "threads", "shape", "quantize")
    flags = " ".join(f"--{name} {getattr(given, name)}" for name in named)
    result = {
        "command": f"python benchmarks/embeddings.py PYTHON --out FILE {flags}",
        "machine": f"{cpu_name()}, {this_machine().describe()}",
        "load": os.getloadavg(),
        "isa": attention.isa(),
        "threads": given.threads,
    }
    write_json(given.out, result | found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
