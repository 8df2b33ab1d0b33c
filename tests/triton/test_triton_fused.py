"""Fused kernels against the references of their parts, and layers against ops one by one."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from closeness import DTYPES, assert_close
from coded_weights import KINDS, drawn_weight
from torch import Tensor
from weights import Fixed, make

from weft.kernels import float8, kv_storage, reference
from weft.kernels.arrays import dtype_name
from weft.kernels.float8 import E4M3, Rounded
from weft.kernels.parts import Biases, LayerParts, LayerShape, Norms
from weft.kernels.reference import known_ids
from weft.kernels.routing import Routing
from weft.kernels.storage import Storage
from weft.kernels.triton.activation import ACTIVATIONS, act_mul_for
from weft.kernels.triton.fp8 import round_rows
from weft.kernels.triton.gemm import SplitProduct
from weft.kernels.triton.layer import Sum, TritonLayer, add_up
from weft.kernels.triton.matrix import embedding, linear, pack, product, quantised
from weft.kernels.triton.norm import NormKind, add, add_norm, norm
from weft.kernels.triton.prologue import enter
from weft.kernels.triton.rope import HeadNorm, Places, rotate
from weft.kernels.triton.route import route
from weft.kernels.triton.tuned import rule

FUZZED = 8
KIND = NormKind(1e-6, True)


def assert_rounded(found: Tensor | Rounded, expected: Rounded) -> None:
    """Codes may differ by one step where a number lies between two."""
    assert isinstance(found, Rounded)
    assert found.codes.dtype == E4M3
    torch.testing.assert_close(found.scales, expected.scales, rtol=1e-2, atol=0)
    one, other = found.codes.float(), expected.codes.float()
    assert ((one - other).abs() <= 0.13 * other.abs() + 2.0**-9).all()
    assert (one == other).float().mean() > 0.9


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request) -> torch.dtype:
    torch.manual_seed(2)
    return request.param


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return reference.rms_norm(x, weight, KIND.eps, KIND.plus_one)


@pytest.mark.parametrize("post", [False, True])
def test_sum_and_norm(dtype, post) -> None:
    for tokens, size in ((1, 31), (5, 64), (3, 1104)):
        x, residual = torch.randn(2, tokens, size).to(dtype)
        weight, other = torch.randn(2, size).to(dtype)
        total = residual.float() + (normed(x.float(), other.float()) if post else x.float())
        found, summed = add_norm(x, residual, other if post else None, weight, KIND)
        assert_close(summed, total.to(dtype))
        assert_close(found, normed(summed, weight))
        assert torch.equal(add(x, residual, other if post else None, KIND), summed)
        assert torch.equal(norm(summed, weight, KIND), found)


@pytest.mark.parametrize("stored", [None, 0.011], ids=["token", "static"])
def test_rounding_in_the_same_pass(dtype, stored) -> None:
    scale = None if stored is None else torch.tensor(stored)
    inputs = "token" if scale is None else scale
    x, residual = torch.randn(2, 6, 130).to(dtype)
    weight = torch.randn(130).to(dtype)
    residual[2, 7] = float("inf")
    residual[3], x[3] = 0.0, 0.0
    found, summed = add_norm(x, residual, None, weight, KIND, inputs)
    expected = float8.round_rows(normed(summed, weight), scale)
    rows = [0, 1, 3, 4, 5]
    assert found.scales[2].isnan()
    assert_rounded(
        Rounded(found.codes[rows], found.scales[rows]),
        Rounded(expected.codes[rows], expected.scales[rows]),
    )
    for activation in ACTIVATIONS:
        gate_up = 3 * torch.randn(3, 2 * 4100).to(dtype)
        expected = float8.round_rows(reference.act_mul(gate_up, activation), scale)
        assert_rounded(act_mul_for(inputs, gate_up, activation), expected)


def test_norm_and_rotation_of_heads(dtype) -> None:
    sample = random.Random(f"rotate{dtype}")
    for _ in range(FUZZED):
        tokens, kv_heads, size = (
            sample.randint(1, 4),
            sample.randint(1, 3),
            sample.choice([8, 80, 256]),
        )
        heads, half = kv_heads * sample.choice([1, 3]), sample.choice([size // 2, size // 4, 3])
        x = torch.randn(tokens, heads + 2 * kv_heads, size).to(dtype)
        weight = torch.randn(heads + kv_heads, size).to(dtype)
        cos, sin = torch.randn(2, tokens, half)
        normalised = sample.random() < 0.6
        qk = x[:, : heads + kv_heads]
        qk = reference.rms_norm(qk.float(), weight, 1e-6, False) if normalised else qk.float()
        expected = torch.cat(
            (reference.rope(qk, cos, sin), x[:, heads + kv_heads :].float()), dim=1
        )
        found = rotate(
            x, heads, kv_heads, cos, sin, HeadNorm(weight, 1e-6, False) if normalised else None
        )
        assert_close(found, expected.to(dtype))
        assert torch.equal(found[:, heads + kv_heads :], x[:, heads + kv_heads :])


@pytest.mark.parametrize("stored", [None, *kv_storage.KV_DTYPES.values()], ids=str)
def test_keys_and_values_go_where_they_belong(dtype, stored) -> None:
    heads, kv_heads, size, block_size, tokens = 4, 2, 24, 8, 5
    kind = stored or dtype
    shape = (2, 6, kv_heads, block_size, kv_storage.row_size(kind, size))
    caches = torch.zeros(shape, dtype=torch.uint8).view(torch.int8).to(torch.int8)
    caches = torch.zeros(shape).to(kind) if stored is None else caches.view(kind)
    x = torch.randn(tokens, heads + 2 * kv_heads, size).to(dtype)
    cos, sin = torch.randn(2, tokens, size // 2)
    slots = torch.tensor([3, 40, -1, 17, 47])
    found = rotate(x, heads, kv_heads, cos, sin, None, Places(*caches, slots, block_size))
    whole = rotate(x, heads, kv_heads, cos, sin, None)
    assert torch.equal(found, whole[:, :heads])
    expected = torch.zeros(shape, dtype=torch.uint8).view(torch.int8)
    expected = torch.zeros(shape).to(kind) if stored is None else expected.view(kind)
    real = slots >= 0
    at = slots[real] // block_size, slots[real] % block_size
    kv_storage.write_rows(expected[0], *at, whole[real, heads : heads + kv_heads])
    kv_storage.write_rows(expected[1], *at, whole[real, heads + kv_heads :])
    for one, other in zip(caches, expected, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "fp8", "int4 by 32", "e4m3 by 64"])
@pytest.mark.parametrize("splits", [2, 3])
def test_parts_of_a_product_are_read_as_their_sum(kind, splits) -> None:
    """Bit for bit what the kernels make of the product that another kernel has added up.

    Of rows that are aligned, as those of models are: how others are loaded decides in which order a
    kernel on a GPU adds up squares.
    """
    torch.manual_seed(splits)
    heads, kv_heads, size, tokens = 4, 2, 24, 5  # 192 outputs
    outputs = (heads + 2 * kv_heads) * size
    launch = Fixed(16, 64, 32, splits)
    if kind in KINDS:
        made, _ = drawn_weight(kind, (outputs, 130), launch)
    else:
        made = make(kind, torch.randn(outputs, 130), launch)
    x, bias = torch.randn(tokens, 130).to(made.dtype), torch.randn(outputs).to(made.dtype)
    rows = round_rows(x) if kind == "fp8" else x
    parts, whole = product(rows, made, bias), linear(rows, made, bias)
    assert isinstance(parts, SplitProduct)
    assert (parts.shape, parts.dtype) == (whole.shape, whole.dtype)
    residual, weight, other = torch.randn(3, tokens, outputs).to(made.dtype)
    for post in (None, other[0]):
        for one, same in zip(
            add_norm(parts, residual, post, weight[0], KIND),
            add_norm(whole, residual, post, weight[0], KIND),
            strict=True,
        ):
            assert torch.equal(one, same)
        assert torch.equal(add(parts, residual, post, KIND), add(whole, residual, post, KIND))
    found, truth = (
        add_norm(y, residual, None, weight[0], KIND, "token")[0] for y in (parts, whole)
    )
    assert torch.equal(found.codes.float(), truth.codes.float())
    assert torch.equal(found.scales, truth.scales)
    cos, sin = torch.randn(2, tokens, size // 2)
    norms = HeadNorm(torch.randn(heads + kv_heads, size).to(made.dtype), 1e-6, False)
    rows = whole.view(tokens, -1, size)
    for of_heads in (None, norms):
        found = rotate(parts, heads, kv_heads, cos, sin, of_heads)
        assert torch.equal(found, rotate(rows, heads, kv_heads, cos, sin, of_heads))
    for one, same in zip(*(route(one, Routing(3, True)) for one in (parts, whole)), strict=True):
        assert torch.equal(one, same)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "fp8", "int8"])
@pytest.mark.parametrize("inputs", ["float", "token"])
def test_what_precedes_the_layers(kind, inputs) -> None:
    """Tokens in flight, ids that the table lacks, and each way in which a table is stored."""
    torch.manual_seed(5)
    table = make(kind, torch.randn(9, 70), Fixed(16, 16, 32, 1), "lm_head")
    rows = table if table.scales is not None else table.values
    weight = torch.randn(70).to(table.dtype)
    in_flight = torch.tensor([7, 3, 5])
    ids, known = torch.tensor([4, -1, -3, 12, 0]), torch.tensor([4, 7, 5, 12, 0])
    assert torch.equal(known_ids(ids, in_flight), known)
    for factor in (1.0, 8.375):
        truth = embedding(known, rows) * factor
        for given, flying in ((ids, in_flight), (known, None)):
            found, total = enter(given, flying, rows, factor, weight, KIND, inputs)
            assert total.dtype == truth.dtype
            room = 1e-6 if kind == "float32" else 2.0**-6  # both factors are rounded, or cut off
            assert ((total - truth).abs() <= room * truth.abs()).all()
            assert (total[3] == 0).all()
            expected = norm(total, weight, KIND, inputs)
            if isinstance(found, Rounded):
                assert isinstance(expected, Rounded)
                assert torch.equal(found.codes.float(), expected.codes.float())
                found, expected = found.scales, expected.scales
            assert torch.equal(found, expected)
    place = torch.empty(7, 70, dtype=table.dtype)[1:6]
    assert norm(total, weight, KIND, out=place) is place
    assert torch.equal(place, norm(total, weight, KIND))
    with pytest.raises(ValueError, match="does not fit a table"):
        enter(ids, in_flight, rows, 1.0, weight[:69], KIND)


class Weights:
    """Random weights of one layer, with or without each of its optional parts."""

    def __init__(self, sample: random.Random, dtype: torch.dtype, storage: Storage | None) -> None:
        kv_heads, dim = sample.choice([1, 2]), sample.choice([8, 24, 64])
        hidden, size = sample.choice([31, 64]), sample.choice([33, 70])
        self.dtype, self.storage, self.hidden = dtype, storage, hidden
        self.shape = LayerShape(
            heads=kv_heads * sample.choice([1, 3]), kv_heads=kv_heads, head_dim=dim,
            norm_eps=KIND.eps, norm_plus_one=KIND.plus_one, activation=sample.choice(ACTIVATIONS),
        )  # fmt: skip
        self.half = sample.choice([dim // 2, dim // 4])
        heads = self.shape.heads + kv_heads
        qkv = (heads + kv_heads) * dim
        self.matrices = {
            "qkv": self.matrix("qkv", qkv, hidden),
            "output": self.matrix("output", hidden, self.shape.heads * dim),
            "gate_up": self.matrix("gate_up", 2 * size, hidden),
            "down": self.matrix("down", hidden, size),
        }
        post, bias = sample.random() < 0.5, sample.random() < 0.5
        self.norms = Norms(
            self.random(hidden),
            self.random(hidden),
            self.random(heads, dim) if sample.random() < 0.5 else None,
            self.random(hidden) if post else None,
            self.random(hidden) if post else None,
        )
        widths = (qkv, hidden, 2 * size, hidden)
        self.biases = Biases(*(self.random(width) if bias else None for width in widths))
        gating = sample.choice([None, None, "sigmoid", "softplus"])
        if gating is not None:
            self.shape = replace(self.shape, gating=gating)
            rows = sample.choice([self.shape.heads, self.shape.heads * dim])
            self.matrices["output_gate"] = self.matrix("output_gate", rows, hidden)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape).to(self.dtype)

    def matrix(self, name: str, outputs: int, inputs: int):
        weight = (torch.randn(outputs, inputs) / inputs**0.5).to(self.dtype)
        tuning = rule(weight.device, "a test")
        if self.storage is None:
            return pack(name, weight, tuning)
        matrix = quantised(
            name,
            weight.shape,
            dtype_name(self.dtype),
            self.storage,
            device=weight.device,
            tuning=tuning,
        )
        matrix.write(0, weight)
        return matrix

    def linear(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self.matrices[name], getattr(self.biases, f"{name}_bias", None))

    def pre(self, residual: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        qkv = self.linear(normed(residual, self.norms.input_norm), "qkv")
        qkv = qkv.view(len(residual), -1, self.shape.head_dim)
        rotated = self.shape.heads + self.shape.kv_heads
        qk = qkv[:, :rotated]
        if self.norms.qk_norm is not None:
            qk = normed(qk, self.norms.qk_norm)
        return torch.cat((reference.rope(qk, cos, sin), qkv[:, rotated:]), dim=1)

    def post(self, attended: Tensor, residual: Tensor) -> Tensor:
        if self.shape.gating is not None:
            x = normed(residual, self.norms.input_norm)
            attended = reference.gate(attended, self.linear(x, "output_gate"), self.shape.gating)
        y = self.linear(attended.flatten(1), "output")
        if self.norms.post_attention_norm is not None:
            y = normed(y, self.norms.post_attention_norm)
        residual = residual + y
        y = self.linear(normed(residual, self.norms.mlp_norm), "gate_up")
        y = self.linear(reference.act_mul(y, self.shape.activation), "down")
        if self.norms.post_mlp_norm is not None:
            y = normed(y, self.norms.post_mlp_norm)
        return residual + y


@pytest.mark.parametrize("storage", [None, Storage(8, None, format="e4m3")], ids=["floats", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fuzzed_layers(dtype, storage) -> None:
    torch.manual_seed(3)
    sample = random.Random(f"{dtype}{storage}")
    # Numbers between two codes may go to either.
    tolerance = (1e-5 if dtype == torch.float32 else 4e-2) if storage is None else 0.1
    for _ in range(FUZZED // 2):
        weights = Weights(sample, dtype, storage)
        layer = TritonLayer(
            LayerParts(weights.shape, weights.matrices, weights.norms, weights.biases)
        )
        tokens, shape = sample.randint(1, 6), weights.shape
        residual, angle = weights.random(tokens, weights.hidden), torch.randn(tokens, weights.half)
        cos, sin = angle.cos(), angle.sin()
        attended = weights.random(tokens, shape.heads, shape.head_dim)
        qkv, after = layer.pre(residual, cos, sin), layer.post(attended, residual)
        for found, expected in (
            (qkv, weights.pre(residual, cos, sin)),
            (after, weights.post(attended, residual)),
        ):
            assert found.dtype == dtype
            gap = (found.float() - expected.float()).abs().max()
            assert gap <= tolerance * max(1.0, expected.float().abs().max())
        caches = torch.zeros(2, tokens, shape.kv_heads, 8, shape.head_dim, dtype=dtype)
        places = Places(*caches, 8 * torch.arange(tokens), 8)
        x, same = layer.normed(Sum(residual))
        assert same is residual
        q = layer.begin(x, cos, sin, places)
        keys, values = qkv[:, shape.heads :].split(shape.kv_heads, dim=1)
        assert torch.equal(q, qkv[:, : shape.heads])
        assert torch.equal(caches[0, :, :, 0], keys)
        assert torch.equal(caches[1, :, :, 0], values)
        total = layer.end(attended, residual)
        _, summed = add_up(total, weights.norms.input_norm, KIND, None)
        assert torch.equal(summed, after)


def test_what_does_not_fit_is_an_error() -> None:
    x = torch.randn(2, 8)
    with pytest.raises(ValueError, match="residual"):
        add(x, torch.randn(2, 7), None, KIND)
    with pytest.raises(ValueError, match="norm"):
        norm(x, torch.randn(7), KIND)
    with pytest.raises(ValueError, match="heads"):
        rotate(torch.randn(2, 5, 8), 2, 1, torch.randn(2, 4), torch.randn(2, 4), None)
