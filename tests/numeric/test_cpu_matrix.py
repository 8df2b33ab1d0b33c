"""Packed matrices: exact to rounding, and the same bits for any rows, place and thread count."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from weft.kernels.cpu import attention
from weft.kernels.cpu.matrix import CpuMatrix, embedding, gather, linear, logits, pack

DTYPES = [torch.bfloat16, torch.float32]
SHAPES = [(1, 1), (64, 64), (97, 33), (130, 257), (256, 704), (2, 1), (66, 1000)]


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_exact(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """The sums of float32 differ from the truth by some roundings of their largest part."""
    x, weight = x.double(), weight.double()
    truth = x @ weight.T + (0 if bias is None else bias.double())
    size = x.abs() @ weight.abs().T + (0 if bias is None else bias.double().abs())
    assert bool(((found.double() - truth).abs() <= 1e-6 * size + 1e-30).all())


@pytest.mark.parametrize("isa", attention.isas())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
def test_fuzzed_products(isa, dtype, gated) -> None:
    attention.use_isa(isa)
    sample = random.Random(f"{isa}{dtype}{gated}")
    fuzzed = [(sample.randint(1, 300), sample.randint(1, 300)) for _ in range(12)]
    for outputs, inputs in [*SHAPES, *fuzzed]:
        if gated:
            outputs += outputs % 2
        weight, bias = draw(1, outputs, inputs, dtype=dtype), draw(2, outputs, dtype=dtype)
        matrix = CpuMatrix(weight, gated=gated)
        assert torch.equal(gather(matrix, torch.arange(outputs)), weight)
        rows = sample.randint(1, 130)
        x = draw(3, rows, inputs, dtype=dtype)
        for given in (bias, None):
            whole = linear(x, matrix, given, "float32")
            assert_exact(whole, x, weight, given)
            assert torch.equal(linear(x, matrix, given), whole.to(dtype))


@pytest.mark.parametrize("isa", attention.isas())
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_depends_on_no_other_nor_on_threads(isa, dtype) -> None:
    attention.use_isa(isa)
    matrix, bias = CpuMatrix(draw(1, 1000, 450, dtype=dtype)), draw(2, 1000, dtype=dtype)
    x = draw(3, 200, 450, dtype=dtype)
    attention.set_threads(1)
    whole = linear(x, matrix, bias)
    attention.set_threads(2)
    for rows in (*range(1, 20), 63, 64, 65, 95, 96, 97, 128, 199, 200):
        for start in {0, 1, 200 - rows} - {201 - rows}:
            part = linear(x[start : start + rows], matrix, bias)
            assert torch.equal(part, whole[start : start + rows])
    assert linear(x[:0], matrix, bias).shape == (0, 1000)


@pytest.mark.parametrize("isa", attention.isas())
@pytest.mark.parametrize("gated", [False, True])
def test_more_rows_than_stay_in_a_cache_are_multiplied_group_by_group(isa, gated) -> None:
    attention.use_isa(isa)
    draws = (draw(1, 130, 3333, dtype=torch.bfloat16), draw(2, 210, 3333, dtype=torch.bfloat16))
    matrix, x = CpuMatrix(draws[0], gated=gated), draws[1]
    whole = linear(x, matrix, None, "float32")
    assert_exact(whole, x, draws[0], None)
    for threads in (1, 3, 16):
        attention.set_threads(threads)
        assert torch.equal(linear(x, matrix, None, "float32"), whole)
    attention.set_threads(2)


@pytest.mark.parametrize("isa", attention.isas())
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_sums_are_exact_in_any_number_of_rows(isa, dtype) -> None:
    """Sums that are put down between the chunks of a panel, and taken up again."""
    attention.use_isa(isa)
    weight, bias = draw(1, 70, 3333, dtype=dtype), draw(2, 70, dtype=dtype)
    matrix, x = CpuMatrix(weight), draw(3, 31, 3333, dtype=dtype)
    whole = linear(x, matrix, bias, "float32")
    assert_exact(whole, x, weight, bias)
    for rows in range(1, 20):
        assert torch.equal(linear(x[11 : 11 + rows], matrix, bias, "float32"), whole[11:][:rows])


WIDENING = [isa for isa in attention.isas() if "bf16" not in isa and isa != "amx"]


@pytest.mark.parametrize("isa", WIDENING)
def test_without_products_of_pairs_bfloat16_is_widened(isa) -> None:
    """Bit for bit the sums of the same numbers in float32."""
    attention.use_isa(isa)
    for outputs, inputs, rows in ((130, 257, 1), (64, 1030, 5), (97, 33, 40), (66, 2051, 13)):
        weight, x = draw(1, outputs, inputs, dtype=torch.bfloat16), draw(2, rows, inputs).bfloat16()
        found = linear(x, CpuMatrix(weight), None, "float32")
        assert torch.equal(found, linear(x.float(), CpuMatrix(weight.float()), None))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_in_its_row_and_column(dtype) -> None:
    weight, x = draw(1, 70, 40, dtype=dtype), draw(2, 9, 40, dtype=dtype)
    whole = linear(x, CpuMatrix(weight), None)
    x[4, 7], weight[66, 3] = float("nan"), float("inf")
    found = linear(x, CpuMatrix(weight), None)
    assert bool(found[4].isnan().all())
    assert not bool(found[:, 66].isfinite().any())
    found[4], found[:, 66] = whole[4], whole[:, 66]
    assert torch.equal(found, whole)


def test_strided_rows_and_weights() -> None:
    x, weight = draw(1, 10, 90), draw(2, 50, 80)
    expected = linear(x[:, 8:40].contiguous(), CpuMatrix(weight[:, 4:36].contiguous()), None)
    assert torch.equal(linear(x[:, 8:40], CpuMatrix(weight[:, 4:36]), None), expected)
    assert torch.equal(linear(x[:, 8:40], CpuMatrix(weight.T[4:36].T), None), expected)


def test_logits_are_not_rounded() -> None:
    hidden, head = draw(1, 3, 64, dtype=torch.bfloat16), draw(2, 199, 64, dtype=torch.bfloat16)
    found = logits(hidden, CpuMatrix(head))
    assert found.dtype == torch.float32
    assert_exact(found, hidden, head, None)
    assert not torch.equal(found, found.bfloat16().float())


def test_embeddings_come_from_the_packed_head() -> None:
    table = draw(1, 199, 33, dtype=torch.bfloat16)
    ids = torch.tensor([198, 0, 7, 7])
    assert torch.equal(embedding(ids, CpuMatrix(table)), table[ids])
    assert torch.equal(embedding(ids, table), table[ids])
    with pytest.raises(IndexError, match="199"):
        embedding(torch.tensor([199]), CpuMatrix(table))


def test_only_what_is_multiplied_is_packed() -> None:
    weight = draw(1, 6, 8)
    for name in ("embed", "layers.0.qk_norm"):
        kept = pack(name, weight.numpy())
        assert np.array_equal(kept, weight.numpy())
        assert kept.base is None  # what it came from may be a file
    assert isinstance(pack("lm_head", weight.numpy()), CpuMatrix)
    first, second = pack("layers.3.expert_gate_up", draw(2, 2, 6, 8).numpy())
    assert first.shape == second.shape == (6, 8)


def test_what_does_not_fit_is_an_error() -> None:
    matrix = CpuMatrix(draw(1, 6, 8))
    with pytest.raises(ValueError, match=r"\[2, 7\].*\[6, 8\]"):
        linear(draw(1, 2, 7), matrix, None)
    with pytest.raises(ValueError, match="bfloat16"):
        linear(draw(1, 2, 8, dtype=torch.bfloat16), matrix, None)
    with pytest.raises(ValueError, match="bias"):
        linear(draw(1, 2, 8), matrix, draw(1, 5))
    with pytest.raises(ValueError, match="float16"):
        CpuMatrix(draw(1, 6, 8, dtype=torch.float16))
    with pytest.raises(ValueError, match="even"):
        CpuMatrix(draw(1, 5, 8), gated=True)
