"""Fused layers equal the single ops, on every instruction set and number of threads."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from torch import Tensor

from weft.kernels import reference
from weft.kernels.cpu import attention
from weft.kernels.cpu.layer import CpuLayer
from weft.kernels.cpu.matrix import CpuMatrix, linear
from weft.kernels.cpu.rows import angles, norm_by_sums, rms_norm, square_sums
from weft.kernels.parts import Biases, LayerParts, LayerShape, Norms

DTYPES = [torch.bfloat16, torch.float32]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}  # of the largest number of the truth


class Weights:
    """Random weights of one layer, with or without each of its optional parts."""

    def __init__(self, sample: random.Random, dtype: torch.dtype, **fixed: int) -> None:
        self._draw = torch.Generator().manual_seed(sample.randrange(1000))
        self.dtype = dtype
        kv_heads, dim = sample.choice([1, 2]), sample.choice([8, 24, 64])
        self.hidden = fixed.get("hidden", sample.choice([31, 64, 130]))
        self.size = fixed.get("size", sample.choice([33, 70, 128]))
        self.shape = LayerShape(
            heads=kv_heads * sample.choice([1, 3]),
            kv_heads=kv_heads,
            head_dim=dim,
            norm_eps=1e-5,
            norm_plus_one=sample.random() < 0.5,
            activation=sample.choice(["silu", "gelu_tanh", "swiglu_oai"]),
            qk_norm_whole=sample.random() < 0.3,
            qk_norm_rotated=sample.random() < 0.3,
            residual_scale=sample.choice([1.0, 1.0, 0.22]),
        )
        if self.shape.qk_norm_whole:
            self.shape = dataclasses.replace(self.shape, qk_norm_rotated=False)
        self.half = sample.choice([dim // 2, dim // 4])
        q, kv = self.shape.heads * dim, kv_heads * dim
        self.matrices = {
            "qkv": self.matrix(q + 2 * kv, self.hidden),
            "output": self.matrix(self.hidden, q),
            "gate_up": self.matrix(2 * self.size, self.hidden),
            "down": self.matrix(self.hidden, self.size),
        }
        before, post = sample.random() < 0.8, sample.random() < 0.5
        heads, whole = self.shape.heads + kv_heads, self.shape.qk_norm_whole
        qk_norm = self.random(heads * dim) if whole else self.random(heads, dim)
        self.norms = Norms(
            input_norm=self.random(self.hidden) if before else None,
            mlp_norm=self.random(self.hidden) if before else None,
            qk_norm=qk_norm if whole or sample.random() < 0.5 else None,
            post_attention_norm=self.random(self.hidden) if post else None,
            post_mlp_norm=self.random(self.hidden) if post else None,
        )
        widths = (q + 2 * kv, self.hidden, 2 * self.size, self.hidden)
        bias = sample.random() < 0.5
        self.biases = Biases(*(self.random(width) if bias else None for width in widths))
        gating = sample.choice([None, None, "sigmoid", "softplus"])
        if gating is not None:
            self.shape = dataclasses.replace(self.shape, gating=gating)
            rows = sample.choice([self.shape.heads, q])
            self.matrices["output_gate"] = self.matrix(rows, self.hidden)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._draw).to(self.dtype)

    def matrix(self, outputs: int, inputs: int) -> Tensor:
        return (self.random(outputs, inputs).float() / inputs**0.5).to(self.dtype)

    def layer(self) -> CpuLayer:
        packed = {n: CpuMatrix(w, gated=n == "gate_up") for n, w in self.matrices.items()}
        return CpuLayer(LayerParts(self.shape, packed, self.norms, self.biases))

    def norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return x
        return reference.rms_norm(x, weight, self.shape.norm_eps, self.shape.norm_plus_one)

    def linear(self, x: Tensor, name: str) -> Tensor:
        bias = getattr(self.biases, f"{name}_bias", None)
        return linear(x, CpuMatrix(self.matrices[name]), bias)

    def pre(self, residual: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        qkv = self.linear(self.norm(residual, self.norms.input_norm), "qkv")
        qkv = qkv.view(len(residual), -1, self.shape.head_dim)
        rotated = self.shape.heads + self.shape.kv_heads
        qk = qkv[:, :rotated]
        if not self.shape.qk_norm_rotated:
            qk = self.qk_norm(qk)
        qk = reference.rope(qk, cos, sin)
        if self.shape.qk_norm_rotated:
            qk = self.qk_norm(qk)
        return torch.cat((qk, qkv[:, rotated:]), dim=1)

    def qk_norm(self, qk: Tensor) -> Tensor:
        if not self.shape.qk_norm_whole:
            return self.norm(qk, self.norms.qk_norm)
        middle, dim = self.shape.heads * self.shape.head_dim, self.shape.head_dim
        rows, weight = qk.flatten(1), self.norms.qk_norm
        q, k = (
            self.norm(rows[:, :middle], weight[:middle]),
            self.norm(rows[:, middle:], weight[middle:]),
        )
        return torch.cat((q, k), 1).unflatten(1, (-1, dim))

    def post(self, attended: Tensor, residual: Tensor) -> Tensor:
        if self.shape.gating is not None:
            x = self.norm(residual, self.norms.input_norm)
            attended = reference.gate(attended, self.linear(x, "output_gate"), self.shape.gating)
        y = self.linear(attended.flatten(1), "output")
        if self.norms.post_attention_norm is not None:
            y = self.norm(y, self.norms.post_attention_norm)
        residual = residual + y * self.shape.residual_scale
        y = self.linear(self.norm(residual, self.norms.mlp_norm), "gate_up")
        y = self.linear(reference.act_mul(y, self.shape.activation), "down")
        if self.norms.post_mlp_norm is not None:
            y = self.norm(y, self.norms.post_mlp_norm)
        return residual + y * self.shape.residual_scale

    def inputs(self, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        angles = self.random(tokens, self.half).float()
        attended = self.random(tokens, self.shape.heads, self.shape.head_dim)
        return self.random(tokens, self.hidden), angles.cos(), angles.sin(), attended


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    gap = (found.float() - expected.float()).abs().max()
    assert gap <= TOLERANCE[found.dtype] * expected.float().abs().max()


@pytest.mark.parametrize("isa", attention.isas())
@pytest.mark.parametrize("dtype", DTYPES)
def test_fuzzed_layers(isa, dtype) -> None:
    attention.use_isa(isa)
    sample = random.Random(f"{isa}{dtype}")
    for _ in range(15):
        weights = Weights(sample, dtype)
        residual, cos, sin, attended = weights.inputs(sample.randint(1, 40))
        layer = weights.layer()
        assert_close(layer.pre(residual, cos, sin), weights.pre(residual, cos, sin))
        assert_close(layer.post(attended, residual), weights.post(attended, residual))


@pytest.mark.parametrize("isa", attention.isas())
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_depends_on_no_other_nor_on_threads(isa, dtype) -> None:
    attention.use_isa(isa)
    weights = Weights(random.Random(3), dtype, hidden=512, size=700)
    layer = weights.layer()
    residual, cos, sin, attended = weights.inputs(130)
    attention.set_threads(1)
    qkv, out = layer.pre(residual, cos, sin), layer.post(attended, residual)
    attention.set_threads(3)
    for first, last in ((0, 1), (5, 12), (60, 130), (129, 130), (0, 130)):
        part = slice(first, last)
        assert torch.equal(layer.pre(residual[part], cos[part], sin[part]), qkv[part])
        assert torch.equal(layer.post(attended[part], residual[part]), out[part])
    assert layer.post(attended[:0], residual[:0]).shape == (0, 512)


def test_what_does_not_fit_is_an_error() -> None:
    weights = Weights(random.Random(1), torch.float32)
    layer = weights.layer()
    residual, cos, sin, attended = weights.inputs(3)
    with pytest.raises(ValueError, match="residual"):
        layer.pre(residual[:, 1:], cos, sin)
    with pytest.raises(ValueError, match="residual"):
        layer.post(attended.bfloat16(), residual.bfloat16())
    with pytest.raises(ValueError, match="attended"):
        layer.post(attended[:2], residual)
    with pytest.raises(ValueError, match="angles"):
        layer.pre(residual, cos[:2], sin[:2])
    weights.norms = dataclasses.replace(weights.norms, mlp_norm=torch.ones(7))
    with pytest.raises(ValueError, match="mlp_norm"):
        weights.layer()
    weights = Weights(random.Random(1), torch.float32)
    weights.matrices["down"] = weights.matrices["down"][1:]
    with pytest.raises(ValueError, match="down"):
        weights.layer()


@pytest.mark.parametrize("isa", attention.isas())
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_and_angles_are_those_of_the_reference(isa, dtype) -> None:
    attention.use_isa(isa)
    draw = torch.Generator().manual_seed(1)
    heads = torch.randn(5, 7, 37, generator=draw).to(dtype)
    weights = [torch.randn(shape, generator=draw).to(dtype) for shape in ((37,), (3, 37))]
    for x, weight in (
        (heads[:, 0], weights[0]),
        (heads[:, 2:5], weights[0]),
        (heads[:, 2:5], weights[1]),
        (heads[:, 4:], None),
        (heads[:0, 0], weights[0]),
    ):
        for plus_one in (False, True):
            found = rms_norm(x, weight, 1e-6, plus_one)
            expected = reference.rms_norm(x, weight, 1e-6, plus_one)
            assert found.shape == x.shape
            torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match="weight"):
        rms_norm(heads, weights[1], 1e-6, False)
    whole = torch.randn(5 * 37, generator=draw).to(dtype)
    for x, first in ((heads[:, :5], 3), (heads[:, 1:6], 5), (heads[:0, :5], 3)):
        sums = square_sums(x, first)
        torch.testing.assert_close(sums, reference.square_sums(x, first))
        sums = sums + 70 * torch.rand(sums.shape, generator=draw)
        for plus_one in (False, True):
            given = x, first, sums, whole, 1e-5, plus_one, 2
            torch.testing.assert_close(norm_by_sums(*given), reference.norm_by_sums(*given))
    with pytest.raises(ValueError, match="heads of"):
        square_sums(heads, 8)
    with pytest.raises(ValueError, match="do not fit"):
        norm_by_sums(heads, 3, square_sums(heads, 3), whole, 1e-5, False, 2)
    positions = torch.tensor([0, 1, 17, 4095, 131071] * 20)
    frequencies = 10000.0 ** -(torch.arange(24) / 24)
    for found, expected in zip(
        angles(positions, frequencies, 1.25),
        reference.angles(positions, frequencies, 1.25),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, atol=2e-7, rtol=0)
