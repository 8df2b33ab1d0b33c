"""Gate and up in one product, and rows rounded in groups: by an epilogue, and within a product."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from weights import Fixed, make, without_ties

import where
from weft.kernels import float8, reference
from weft.kernels.float8 import Rounded
from weft.kernels.triton import fp8, matrix
from weft.kernels.triton.activation import ACTIVATIONS, act_mul_for
from weft.kernels.triton.gated import GROUP, gated_product
from weft.kernels.triton.gemm import SplitProduct
from weft.kernels.triton.matrix import TritonMatrix, linear, product
from weft.kernels.tuning import Heuristic

KINDS = ("float32", "bfloat16", "fp8", "int8")
BY_RULE = Heuristic(1, 99 * 1024)
ROUNDING = 1e-3 if where.ON_GPU else 1e-4  # as in test_triton_matrix, through an activation


def gated_truth(x: Tensor, made: TritonMatrix, bias: Tensor | None, activation: str) -> Tensor:
    """In float64, of activations as the matrix sees them."""
    y = float8.rounded_inputs(x, made.inputs).double() @ made.dequantize().double().T
    y = y if bias is None else y + bias.double()
    gate, up = y.chunk(2, -1)
    return reference.act_mul(torch.cat((gate, up), -1), activation)


def whole(y: Tensor | SplitProduct) -> Tensor:
    """A product, its parts added."""
    if isinstance(y, Tensor):
        return y.float()
    found = y.sums.sum(0)
    for factor in (None if y.row_scale is None else y.row_scale.unsqueeze(1), y.scale):
        found = found if factor is None else found * factor
    return found if y.bias is None else found + y.bias.float()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_gated_products_are_those_of_float64(kind, seed) -> None:
    torch.manual_seed(seed)
    sample = random.Random(seed)
    count, size, inputs = sample.choice((1, 16, 19)), sample.randint(6, 90), sample.randint(3, 150)
    launch = Fixed(sample.choice((16, 32)), sample.choice((32, 64)), sample.choice((32, 64)), 1)
    made = make(kind, torch.randn(2 * size, inputs) * torch.rand(2 * size, 1), launch, "gate_up")
    x = torch.randn(count, inputs + 3).to(made.dtype)[:, :inputs]
    bias = torch.randn(2 * size).to(made.dtype) if seed else None
    for activation in ACTIVATIONS:
        truth = gated_truth(x, made, bias, activation)
        found = gated_product(x, made, bias, activation)
        assert isinstance(found, Tensor)
        assert found.dtype == made.dtype
        room = 1e-5 if kind == "float32" else 2**-7
        assert (found - truth).abs().max() <= room * truth.abs().max()
        given = fp8.round_rows(x) if made.rounds else x
        assert torch.equal(gated_product(given, made, bias, activation), found)


@pytest.mark.parametrize("stored", [None, 0.02], ids=["token", "static"])
@pytest.mark.parametrize("block_n", [32, 64, 128])
def test_what_is_activated_is_rounded_in_groups(stored, block_n) -> None:
    """Codes may differ by one step where a number lies between two."""
    torch.manual_seed(block_n)
    size, group = 150, min(GROUP, block_n)
    static = None if stored is None else torch.tensor(stored)
    made = make("fp8", torch.randn(2 * size, 70), Fixed(16, block_n, 32, 1), "gate_up")
    x = torch.randn(5, 70).bfloat16()
    x[3] = 0.0
    found = gated_product(x, made, None, "silu", "token" if static is None else static)
    assert isinstance(found, Rounded)
    assert found.group == group
    assert found.scales.shape == (5, -(-size // group))
    truth = gated_truth(x, made, None, "silu").float()
    if static is None:
        expected = float8.round_groups(truth, group)
    else:
        one = float8.round_rows(truth, static)
        expected = Rounded(one.codes, static.expand(found.scales.shape))
    torch.testing.assert_close(found.scales, expected.scales, rtol=ROUNDING, atol=0)
    one, other = found.codes.float(), expected.codes.float()
    assert ((one - other).abs() <= 0.13 * other.abs() + 2.0**-9).all()
    assert (one == other).float().mean() > 0.98


def test_numbers_that_are_not_finite_show_in_their_group() -> None:
    made = make("bfloat16", torch.randn(2 * 100, 40), Fixed(16, 64, 32, 1), "gate_up")
    made.values[70] = float("inf")
    found = gated_product(torch.ones(2, 40).bfloat16(), made, None, "silu", "token")
    assert found.scales.isnan().tolist() == [[False, True]] * 2
    down = make("fp8", torch.randn(8, 100), Fixed(16, 16, 32, 1))
    assert whole(product(found, down, None)).isnan().all()


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("inputs", [100, 256])
def test_products_of_groups_are_those_of_float64(splits, inputs) -> None:
    torch.manual_seed(splits)
    made = make("fp8", torch.randn(24, inputs), Fixed(16, 32, 128, splits))
    x = (torch.randn(5, inputs) * 10 ** torch.randn(5, inputs)).bfloat16()
    bias = torch.randn(24).bfloat16()
    for group in (32, 64):
        rows = float8.round_groups(x, group)
        truth = rows.widen().double() @ made.dequantize().double().T + bias.double()
        room = 1e-5 if splits > 1 else 2**-7
        assert (whole(product(rows, made, bias)) - truth).abs().max() <= room * truth.abs().max()
        assert linear(rows, made, bias).dtype == torch.bfloat16


@pytest.mark.parametrize("stored", [None, 0.0312], ids=["token", "static"])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("block_k", [64, 256])
def test_products_round_a_few_rows_themselves(stored, splits, block_k) -> None:
    """In groups of a step, but of no more inputs than the tensor cores add by themselves."""
    torch.manual_seed(splits)
    made = make("fp8", torch.randn(24, 150), Fixed(32, 32, block_k, splits))
    made.inputs = "token" if stored is None else torch.tensor(stored)
    x = torch.randn(matrix.ROUNDED_WITHIN, 153).bfloat16()
    x = without_ties(x, min(block_k, matrix.EXACT))[:, :150]
    if stored is None:
        rows = float8.round_groups(x, min(block_k, matrix.EXACT)).widen()
    else:
        rows = float8.round_rows(x, made.inputs).widen()
    truth = rows.double() @ made.dequantize().double().T
    found = whole(product(x, made, None))
    room = 1e-5 if splits > 1 else 2**-7
    assert (found - truth).abs().max() <= room * truth.abs().max()
    more = torch.cat((x, x[:1]))  # too many: each row has one scale
    one = float8.rounded_inputs(more, made.inputs).double() @ made.dequantize().double().T
    assert (whole(product(more, made, None)) - one).abs().max() <= room * one.abs().max()
    with pytest.raises(ValueError, match="does not fit"):
        product(x[:, :149], made, None)


def test_groups_lose_less_than_rows() -> None:
    """Against the float32 product of what was not rounded; large numbers stand in few places."""
    torch.manual_seed(0)
    gate_up, down = torch.randn(2 * 512, 256) / 16, torch.randn(64, 512) / 23
    gate_up[:512:97] *= 30
    x = torch.randn(16, 256)
    made = make("fp8", gate_up, BY_RULE, "gate_up"), make("fp8", down, BY_RULE)
    rounded = [part.dequantize() for part in made]
    y = reference.act_mul(x.bfloat16().float() @ rounded[0].T, "silu")
    truth = y @ rounded[1].T
    in_groups = gated_product(x.bfloat16(), made[0], None, "silu", "token")
    by_row = act_mul_for("token", linear(x.bfloat16(), made[0], None), "silu")
    assert isinstance(by_row, Rounded)
    assert by_row.group is None
    errors = [
        (whole(product(rows, made[1], None)) - truth).pow(2).mean().sqrt().item()
        for rows in (in_groups, by_row)
    ]
    assert errors[0] < errors[1] < 0.05 * truth.pow(2).mean().sqrt()
    heads = torch.randn(16, 512).bfloat16() * torch.ones(512).bfloat16().index_fill(
        0, torch.arange(0, 512, 128), 30.0
    )
    truth = heads.float() @ rounded[1].T
    errors = [
        (whole(y) - truth).pow(2).mean().sqrt().item()
        for y in (product(heads, made[1], None), linear(heads, made[1], None))
    ]
    assert errors[0] < 1.02 * errors[1]


def test_what_does_not_fit_is_refused() -> None:
    made = make("bfloat16", torch.randn(20, 32), BY_RULE, "gate_up")
    with pytest.raises(ValueError, match="no kernel for relu"):
        gated_product(torch.randn(2, 32).bfloat16(), made, None, "relu")
    with pytest.raises(ValueError, match="does not fit"):
        gated_product(torch.randn(2, 31).bfloat16(), made, None, "silu")
    odd = make("bfloat16", torch.randn(21, 32), BY_RULE, "gate_up")
    with pytest.raises(ValueError, match="21 outputs"):
        gated_product(torch.randn(2, 32).bfloat16(), odd, None, "silu")
