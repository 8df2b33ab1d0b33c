"""Golden logits: hashes of what each family computes on each instruction set, recorded once.

    python tests/numeric/golden.py    # records those of this machine's instruction sets again

Weights are drawn by numpy, whose streams do not change; so a hash depends on weft alone. A change
that means to give other bits records them again and says so in its commit.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
import transformers
from checkpoints import CASES, FAMILY_CASES, save
from paged import PagedRunner

from weft.kernels.cpu import attention
from weft.kernels.ops import select_ops
from weft.models.decoder import Decoder
from weft.models.layout import storage_of
from weft.models.loader import load_model

RECORDED = Path(__file__).with_name("golden.json")
VARIANTS = [
    (dtype, quantize) for dtype in ("float32", "bfloat16") for quantize in ("none", "int8", "int4")
]
# Sets that only add exact products of integers to another one.
SAME_BITS = {"amx": "avx512bf16", "avxvnni": "avx2"}
STEPS = ([("a", 40), ("b", 3)], [("b", 1), ("a", 1)], [("c", 17), ("a", 1), ("b", 5)])


def checkpoint(case: str, folder: Path) -> Path:
    """Write a checkpoint of a case whose weights depend on their names and shapes alone."""
    config = CASES[case].config()
    model = CASES[case].model(config)
    for name, tensor in model.state_dict().items():
        draw = np.random.default_rng(crc32(name.encode()))
        noise = torch.from_numpy(draw.standard_normal(tuple(tensor.shape), np.float32))
        if tensor.ndim >= 2:
            tensor.copy_(noise * (0.4 if "embed_tokens" in name else 1.3 / tensor.shape[-1] ** 0.5))
        else:
            tensor.copy_(1.0 + noise * 0.25)
        if "gemma4" in config.model_type and name.endswith("q_norm.weight"):
            tensor.mul_(0.3)  # its scores are not scaled by the head size
    return save(model, folder)


def hash_of(case: str, folder: Path, dtype: str, quantize: str) -> str:
    """Hash the logits of a few ragged steps, each of them one native call if the model has one."""
    decoder = decoder_of(case, folder, dtype, quantize)
    runner = PagedRunner(decoder, bound=decoder.spec.states is None)
    draw, found = np.random.default_rng(3), hashlib.sha256()
    for step in STEPS:
        rows = [(name, draw.integers(0, 199, count).tolist()) for name, count in step]
        for logits in runner.step(rows):
            assert logits.isfinite().all()
            found.update(logits.numpy().tobytes())
    return found.hexdigest()[:16]


def decoder_of(case: str, folder: Path, dtype: str, quantize: str) -> Decoder:
    """Load a checkpoint with the native kernels."""
    most = CASES[case].max_model_len
    rounding = lambda name: storage_of(name, quantize, 32)  # noqa: E731
    ops = select_ops("cpu", dtype, "cpu")
    return load_model(folder, dtype, most, ops, rounding)


def variants(case: str) -> list[tuple[str, str]]:
    """Return dtypes and rounding of a case: all of them for the first case of a family."""
    return VARIANTS if case in FAMILY_CASES.values() else VARIANTS[:1]


def each_hash(isa: str, cases: Iterable[str] = CASES) -> Iterator[tuple[str, str]]:
    """Yield a key for a case and variant, and the hash of its logits on an instruction set."""
    before = attention.isa()
    attention.use_isa(isa)
    try:
        for case in cases:
            with tempfile.TemporaryDirectory() as name:
                folder = checkpoint(case, Path(name))
                for variant in variants(case):
                    yield f"{case} {' '.join(variant)}", hash_of(case, folder, *variant)
    finally:
        attention.use_isa(before)


def record() -> None:
    """Write the hashes of all instruction sets of this machine beside those of others."""
    attention.set_threads(1)
    known: dict[str, Any] = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    known |= {isa: dict(each_hash(isa)) for isa in attention.isas() if isa not in SAME_BITS}
    RECORDED.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    transformers.logging.disable_progress_bar()
    sys.path.insert(0, str(Path(__file__).parents[1]))
    record()
