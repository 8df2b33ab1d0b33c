"""Many threads: how evenly products are cut for them, and that results stay the same."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from checkpoints import prompt, randomise, save
from paged import PagedRunner

from weft.kernels.arrays import numpy_dtype
from weft.kernels.cpu import _native, attention
from weft.kernels.cpu.matrix import CpuMatrix, linear
from weft.kernels.ops import select_ops
from weft.kernels.storage import Storage
from weft.models.layout import storage_of
from weft.models.loader import load_model

THREADS = 64
MOST = 1.15  # times the mean that a thread may have to do

# Outputs of each product of a layer and of the head, and whether they are gated.
Products = dict[str, tuple[int, bool]]
SHAPES: dict[str, Products] = {
    "A": {
        "qkv": (1280, False),
        "output": (768, False),
        "gate_up": (4096, True),
        "down": (768, False),
        "head": (32000, False),
    },
    "B": {
        "qkv": (4096, False),
        "output": (1024, False),
        "gate_up": (6144, True),
        "down": (1024, False),
        "head": (32000, False),
    },
    "7B": {
        "qkv": (4608, False),
        "output": (3584, False),
        "gate_up": (37888, True),
        "down": (3584, False),
        "head": (152064, False),
    },
}
# Slices of 16 outputs, a cache line of the packed weights, are too few of these for 64 threads:
# 80 of Q, K and V, 48 of the products with 768 outputs.
UNEVEN = {("A", "qkv"): 1.6, ("A", "output"): 4 / 3, ("A", "down"): 4 / 3}


@pytest.fixture(autouse=True)
def _threads():
    threads = attention.threads()
    yield
    attention.set_threads(threads)


def imbalance(outputs: int, gated: bool, rows: int, threads: int) -> float:
    """The largest share of a product over the mean, by the functions that cut it."""
    items = _native.product_items(outputs, gated, rows, threads)
    bounds = [_native.share_begin(items, share, threads) for share in range(threads + 1)]
    assert (bounds[0], bounds[-1]) == (0, items)
    return max(np.diff(bounds)) * threads / items


@pytest.mark.parametrize("name", SHAPES)
def test_one_row_gives_64_threads_equal_shares(name: str) -> None:
    for product, (outputs, gated) in SHAPES[name].items():
        found = imbalance(outputs, gated, 1, THREADS)
        expected = UNEVEN.get((name, product))
        if expected is None:
            assert found <= MOST, product
        else:
            assert found == pytest.approx(expected), product


def test_a_large_model_is_cut_evenly_for_any_number_of_threads() -> None:
    for threads in (1, 2, 3, 4, 6, 8, 12, 15, 16, 24, 31, 32, 47, 48, 63, 64):
        for product, (outputs, gated) in SHAPES["7B"].items():
            assert imbalance(outputs, gated, 1, threads) <= 1.25, (threads, product)


def test_panels_stay_whole_where_they_are_enough() -> None:
    """A slice reads a line of every four, which is slower than whole panels."""
    for shape in SHAPES.values():
        for outputs, gated in shape.values():
            assert _native.product_items(outputs, gated, 1, 2) == -(-outputs // 64)


OUTPUTS, INPUTS = 173, 710  # of no panel, slice or group a multiple, and worth sharing


def products(matrix: CpuMatrix, dtype: str) -> list[bytes]:
    found = []
    for rows in (1, 2, 5, 7, 96, 100):
        random = np.random.default_rng(rows)
        x = random.standard_normal((rows, INPUTS), np.float32).astype(numpy_dtype(dtype))
        bias = random.standard_normal(matrix.shape[0], np.float32).astype(numpy_dtype(dtype))
        found += [linear(x, matrix, given).tobytes() for given in (None, bias)]
    return found


@pytest.mark.parametrize("isa", attention.isas())
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("dtype", "storage"),
    [
        ("float32", None),
        ("bfloat16", None),
        ("bfloat16", Storage(8, None)),
        ("float32", Storage(4, 32, "bfloat16")),
    ],
    ids=lambda value: str(value),
)
def test_slices_have_the_bits_of_panels(isa, gated, dtype, storage) -> None:
    outputs = OUTPUTS + 1 if gated else OUTPUTS
    weight = np.random.default_rng(1).standard_normal((outputs, INPUTS), np.float32)
    weight = weight.astype(numpy_dtype(dtype))
    before = attention.isa()
    attention.use_isa(isa)
    try:
        if storage is None:
            matrix = CpuMatrix(weight, gated=gated)
        else:
            matrix = CpuMatrix.quantised(weight.shape, dtype, storage, gated=gated)
            matrix.write(0, weight)
        attention.set_threads(1)
        whole = products(matrix, dtype)
        attention.set_threads(16)
        panels = -(-outputs // 64)
        assert _native.product_items(outputs, gated, 1, 16) == (2 if gated else 4) * panels
        assert products(matrix, dtype) == whole
    finally:
        attention.use_isa(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model whose products are large enough to be shared, of few panels each."""
    sizes = {"hidden_size": 320, "intermediate_size": 712, "head_dim": 64, "vocab_size": 2001}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 5, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(**sizes, **heads)
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    randomise(model, 0)
    return save(model, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("dtype", "quantize"),
    [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8"), ("bfloat16", "int4")],
)
def test_64_threads_give_the_bits_of_one(folder, dtype, quantize) -> None:
    rounding = partial(storage_of, quantize=quantize, group=32)
    found = []
    for threads in (1, THREADS):
        attention.set_threads(threads, nodes=[0] * threads)
        decoder = load_model(folder, dtype, 256, select_ops("cpu", dtype, "cpu"), rounding)
        runner = PagedRunner(decoder, bound=True)
        tokens = prompt(80, 3)
        logits = [*runner.step([("a", tokens[:70]), ("b", prompt(9, 1))])]
        for token in tokens[70:]:
            logits += runner.step([("a", [token])])
        found.append(torch.cat(logits))
    assert torch.isfinite(found[0]).all()
    assert torch.equal(*found)
