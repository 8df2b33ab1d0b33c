"""What precedes and follows latent attention in Triton, against the references of its parts."""

from __future__ import annotations

import pytest
import torch
from closeness import DTYPES, TOLERANCE, assert_close
from torch import Tensor
from weights import Fixed, make

from weft.kernels import reference
from weft.kernels.kv_storage import KV_DTYPES, read_rows, row_size
from weft.kernels.parts import LatentParts
from weft.kernels.triton.gemm import SplitProduct
from weft.kernels.triton.latent import LatentHeads, heads
from weft.kernels.triton.matrix import pack, product
from weft.kernels.triton.rope import Places

EPS, HIDDEN, BLOCK = 1e-6, 72, 8
# Heads, latent of queries, plain and rotated numbers, latent, outputs of a head.
SIZES = [(3, 40, 24, 8, 32, 20), (5, 0, 16, 16, 48, 32), (2, 33, 40, 6, 30, 17)]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request) -> torch.dtype:
    torch.manual_seed(2)
    return request.param


@pytest.mark.parametrize(
    "shape", [(1, 1, 5, 7), (5, 3, 24, 40), (17, 2, 64, 65), (70, 4, 130, 20)], ids=str
)
def test_products_by_head(dtype, shape) -> None:
    """Also of heads that lie between other numbers."""
    tokens, count, inputs, outputs = shape
    wide = torch.randn(tokens, count, inputs + 3).to(dtype)
    weights = (torch.randn(count, outputs, inputs) / inputs**0.5).to(dtype)
    for x in (wide[..., 3:], wide[..., :inputs].contiguous()):
        assert_close(heads(x, weights), reference.heads(x, weights))
    assert heads(wide[:0, :, :inputs], weights).shape == (0, count, outputs)


class Layer:
    """A layer's weights, and what plain torch makes of them."""

    def __init__(self, sizes: tuple[int, ...], dtype: torch.dtype, tuning, kind: str = "") -> None:
        count, queries, plain, rotated, rank, value = sizes
        self.sizes, width = sizes, queries or count * (plain + rotated)
        self.qkv = self._matrix(width + rank + rotated, HIDDEN, dtype)
        self.bias = torch.randn(width + rank + rotated).to(dtype)
        up = self._matrix(count * (plain + rotated), queries, dtype) if queries else None
        self.up = up
        self.norms = [(1 + 0.1 * torch.randn(size)).to(dtype) for size in (queries, rank)]
        self.key_up = self._matrix(count * rank, plain, dtype).view(count, rank, plain)
        self.value_up = self._matrix(count * value, rank, dtype).view(count, value, rank)
        self.parts = LatentParts(
            rotated,
            EPS,
            up if up is None else make(kind, up, tuning) if kind else pack("query_up", up, tuning),
            self.norms[0] if queries else None,
            self.norms[1],
            self.key_up,
            self.value_up,
        )

    def _matrix(self, outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
        return (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)

    def reference(self, joint: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [T, H, R] and rows [T, R] of what the first product gives."""
        count, _, plain, rotated, rank, _ = self.sizes
        q, row, turned = joint.split([joint.shape[1] - rank - rotated, rank, rotated], dim=1)
        if self.up is not None:
            q = reference.linear(reference.rms_norm(q, self.norms[0], EPS, False), self.up, None)
        q = q.reshape(len(q), count, -1)
        row = reference.rms_norm(row, self.norms[1], EPS, False)
        turned = reference.rope(turned.unsqueeze(1), cos, sin).squeeze(1)
        late = reference.rope(q[..., plain:], cos, sin)
        absorbed = reference.heads(q[..., :plain], self.key_up)
        return torch.cat((late, absorbed), 2), torch.cat((turned, row), 1)


def gap(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).abs().max() / expected.float().abs().max())


@pytest.mark.parametrize("kv", [None, *KV_DTYPES])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("splits", [1, 3])
def test_queries_and_rows(dtype, sizes, kv, splits) -> None:
    """Whether the inputs of products are split or not; rows are those that ``pre`` returns."""
    if kv is not None and sum(sizes[3:5]) % 4:
        return  # which no cache of 8 bits has
    tuning = Fixed(16, 32, 32, splits)
    layer = Layer(sizes, dtype, tuning)
    bound, tokens = LatentHeads(layer.parts, sizes[0]), 5
    x, angle = torch.randn(tokens, HIDDEN).to(dtype), torch.randn(tokens, sizes[3] // 2)
    cos, sin = angle.cos(), angle.sin()
    joint = product(x, pack("qkv", layer.qkv, tuning), layer.bias)
    assert isinstance(joint, SplitProduct) == (splits > 1)
    expected = layer.reference(reference.linear(x, layer.qkv, layer.bias), cos, sin)
    both = bound.queries(joint, cos, sin, None)
    q, rows = both[:, : sizes[0]], both[:, sizes[0] :]
    tolerance = 10 * TOLERANCE[dtype]  # of several products, each rounded
    assert gap(q, expected[0]) < tolerance
    assert gap(rows[:, 0], expected[1]) < tolerance
    assert torch.equal(rows[:, 0], rows[:, 1])
    stored = dtype if kv is None else KV_DTYPES[kv]
    size = row_size(stored, rows.shape[2])
    found, wanted = (torch.zeros(2, 1, BLOCK, size, dtype=stored) for _ in range(2))
    slots = torch.tensor([3, 8, -1, 0, 15])
    again = bound.queries(joint, cos, sin, Places(found, found, slots, BLOCK))
    assert torch.equal(again, q)
    real = slots >= 0
    reference.write_rows(wanted, slots[real] // BLOCK, slots[real] % BLOCK, rows[real, :1])
    every = torch.arange(2)
    assert torch.equal(read_rows(found, every), read_rows(wanted, every))


@pytest.mark.parametrize("kind", ["fp8", "fp8 weights", "int8"])
def test_queries_of_rounded_weights(kind) -> None:
    """The norm rounds its rows where the product takes FP8, and not where it does not."""
    torch.manual_seed(4)
    layer = Layer(SIZES[0], torch.bfloat16, Fixed(16, 32, 32, 1), kind)
    bound, tokens = LatentHeads(layer.parts, 3), 6
    joint, angle = torch.randn(tokens, 40 + 40).bfloat16(), torch.randn(tokens, 4)
    found = bound.queries(joint, angle.cos(), angle.sin(), None)[:, :3]
    expected, _ = layer.reference(joint, angle.cos(), angle.sin())
    assert 0 < gap(found, expected) < 0.08


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_outputs_are_of_latents_alone(dtype, sizes) -> None:
    """The rotated numbers of what was attended may be anything."""
    layer = Layer(sizes, dtype, Fixed(16, 32, 32, 1))
    bound, rotated = LatentHeads(layer.parts, sizes[0]), sizes[3]
    attended = torch.randn(4, sizes[0], rotated + sizes[4]).to(dtype)
    attended[..., :rotated] = float("nan")
    expected = reference.heads(attended[..., rotated:], layer.value_up)
    assert_close(bound.outputs(attended), expected)


def test_what_does_not_fit_is_an_error() -> None:
    layer = Layer(SIZES[0], torch.float32, Fixed(16, 32, 32, 1))
    with pytest.raises(ValueError, match=r"key_up \[3, 32, 24\]: expected \[4, 32, 24\]"):
        LatentHeads(layer.parts, 4)
    bound = LatentHeads(layer.parts, 3)
    with pytest.raises(ValueError, match="angles"):
        bound.queries(torch.zeros(2, 80), torch.zeros(2, 3), torch.zeros(2, 3), None)
    with pytest.raises(ValueError, match="does not fit weights"):
        heads(torch.zeros(2, 3, 5), layer.key_up)
