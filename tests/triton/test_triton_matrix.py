"""Products with weights in floats, FP8 and int8: against float64, over shapes of all remainders."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from weights import KINDS, Fixed, make

import where
from weft.kernels import float8
from weft.kernels.arrays import to_numpy, to_torch
from weft.kernels.quantized import Quantized
from weft.kernels.triton import fp8, matrix
from weft.kernels.triton.matrix import TritonMatrix
from weft.kernels.tuning import Heuristic

BY_RULE = Heuristic(1, 99 * 1024)
# Of the sum of absolute products. The tensor cores of Hopper add FP8 with 14 bits of mantissa.
ROUNDING = {"fp8": 1e-4 if where.ON_GPU else 1e-5}
FP8_COSINE = 0.999  # to the product of the weights before they were rounded


def expected(x: Tensor, made: TritonMatrix, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """The product in float64, of activations as the matrix sees them."""
    rows = float8.rounded_inputs(x, made.inputs).double()
    y = rows @ made.dequantize().double().T
    y = y if bias is None else y + bias.double()
    return y if residual is None else y + residual.double()


def drawn(seed: int) -> tuple[int, int, int, Fixed]:
    """Sizes of rows, outputs and inputs with every kind of remainder, and a launch."""
    rng = random.Random(seed)
    blocks = (rng.choice((16, 32)), rng.choice((32, 64)), rng.choice((32, 64)))
    launch = Fixed(*blocks, rng.choice((1, 1, 2, 3)))
    return rng.choice((1, 3, 16, 17)), rng.randint(6, 90), rng.randint(3, 200), launch


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_products_are_those_of_float64(kind, seed) -> None:
    torch.manual_seed(seed)
    count, outputs, inputs, launch = drawn(seed)
    weight = torch.randn(outputs, inputs) * torch.rand(outputs, 1)
    made = make(kind, weight, launch)
    x = (torch.randn(count, inputs + 3) * 10 ** torch.randn(count, 1)).to(made.dtype)[:, :inputs]
    bias = torch.randn(outputs).to(made.dtype) if seed % 2 else None
    residual = torch.randn(count, outputs + 2).to(made.dtype)[:, :outputs] if seed % 3 else None
    wide = matrix.linear(x, made, bias, residual, torch.float32)
    truth = expected(x, made, bias, residual)
    size = x.double().abs() @ made.dequantize().double().abs().T  # what rounding errors go with
    room = ROUNDING.get(kind, 1e-5) * size + 1e-6
    assert ((wide - truth).abs() <= room).all()
    rounded = fp8.round_rows(x) if made.rounds else x  # what a fused norm hands over
    narrow = matrix.linear(rounded, made, bias, residual)
    assert narrow.dtype == made.dtype
    assert ((narrow - truth).abs() <= 2**-7 * truth.abs() + room).all()


@pytest.mark.parametrize("kind", ["fp8", "fp8 weights", "int8"])
def test_rounding_keeps_the_direction_of_results(kind) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(64, 512), torch.randn(9, 512).bfloat16()
    made = make(kind, weight, BY_RULE)
    assert made.nbytes == 64 * (512 + 4)
    truth = x.float() @ weight.T
    cosines = cosine_similarity(matrix.logits(x, made), truth)
    assert cosines.min() > FP8_COSINE


def test_parts_are_added_in_one_order() -> None:
    """Equal calls give equal bits, and a row's do not depend on the rows beside it."""
    torch.manual_seed(1)
    made = make("bfloat16", torch.randn(40, 300), Fixed(16, 32, 32, 4))
    x = torch.randn(12, 300).bfloat16()
    whole = matrix.logits(x, made)
    assert torch.equal(whole, matrix.logits(x, made))
    assert torch.equal(whole[3:4], matrix.logits(x[3:4], made))


def test_activations_are_rounded_as_the_reference_does() -> None:
    torch.manual_seed(2)
    x = torch.randn(12, 333) * 10 ** torch.linspace(-8, 8, 12).unsqueeze(1)
    x[3], x[4, 5], x[5, 6], x[6, :3] = 0.0, float("inf"), float("nan"), 1e-40
    found, truth = fp8.round_rows(x), float8.round_rows(x)
    assert torch.equal(found.codes.float(), truth.codes.float())
    assert torch.equal(found.scales.isnan(), truth.scales.isnan())
    assert found.scales.isnan().nonzero().flatten().tolist() == [4, 5]
    torch.testing.assert_close(found.scales, truth.scales, rtol=1e-6, atol=0, equal_nan=True)
    scale = torch.tensor(0.01)
    found, truth = fp8.round_rows(x, scale), float8.round_rows(x, scale)
    assert torch.equal(found.codes.float(), truth.codes.float())
    assert truth.codes.float().abs().max() == 448


def test_a_stored_scale_of_activations_is_used() -> None:
    torch.manual_seed(3)
    made = make("fp8", torch.randn(24, 64), Fixed(16, 16, 32, 1))
    made.inputs = torch.tensor(0.02)
    x = torch.randn(4, 64).bfloat16()
    found = matrix.logits(x, made)
    torch.testing.assert_close(found.double(), expected(x, made, None, None), rtol=1e-5, atol=1e-4)
    assert not torch.equal(found, matrix.logits(x, make("fp8", torch.randn(24, 64), BY_RULE)))


def test_integers_of_a_checkpoint_are_taken_as_they_are() -> None:
    values, scales = torch.randint(0, 256, (6, 40), dtype=torch.uint8), torch.rand(6, 1).bfloat16()
    stored = Quantized(to_numpy(values), to_numpy(scales), None, 8, 40)
    sizes = torch.Size((6, 40))
    made = matrix.quantised(
        "down", sizes, "bfloat16", stored.storage, device=values.device, tuning=BY_RULE
    )
    made.write(0, stored)
    assert isinstance(made, TritonMatrix)
    assert torch.equal(made.dequantize(), to_torch(stored.dequantize()).to(values.device))


def test_embeddings_are_the_weights_of_the_head() -> None:
    for kind in KINDS:
        made = make(kind, torch.randn(20, 32), BY_RULE, "lm_head")
        ids = torch.tensor([3, 19, 3])
        assert torch.equal(matrix.embedding(ids, made), made.dequantize()[ids].to(made.dtype))


def test_what_does_not_fit_is_refused() -> None:
    made = make("fp8", torch.randn(20, 32), BY_RULE)
    with pytest.raises(ValueError, match=r"\[2, 31\].*does not fit"):
        matrix.linear(torch.randn(2, 31).bfloat16(), made, None)
    with pytest.raises(ValueError, match="float32"):
        matrix.linear(torch.randn(2, 32), made, None)
    with pytest.raises(ValueError, match="do not fit"):
        made.write(15, torch.randn(6, 32))
    for kind in ("fp8", "int8"):
        with pytest.raises(ValueError, match="finite"):
            make(kind, torch.full((6, 4), float("inf")), BY_RULE)
