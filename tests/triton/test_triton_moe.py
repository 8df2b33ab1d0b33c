"""Mixtures of experts against the reference, with unused experts and padding rows."""

from __future__ import annotations

import random

import pytest
import torch
from coded_weights import drawn_weight
from weights import KINDS, Fixed, make

from weft.kernels import float8, reference
from weft.kernels.triton.moe import moe

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "fp8": 4e-2, "fp8 weights": 2e-2, "int8": 2e-2}


def drawn(seed: int, kind: str, halves: int = 2):
    """Random rows, and experts whose first matrices have ``halves`` of outputs."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    count, top_k = rng.choice([(3, 2), (5, 1), (8, 3)])
    tokens, hidden, inner = rng.choice([1, 4, 11]), rng.choice([40, 65]), rng.choice([24, 33])
    heights = rng.choice([(16, 16), (16, 32)])
    gate_up, down = (
        make(kind, torch.randn(count, *shape) / shape[1] ** 0.5, Fixed(height, 32, 32, 1), name)
        for name, shape, height in [
            ("expert_gate_up", (halves * inner, hidden), heights[0]),
            ("expert_down", (hidden, inner), heights[1]),
        ]
    )
    x = torch.randn(tokens, hidden).to(down.dtype)
    scores = torch.randn(tokens, count).softmax(-1)
    scores[:, 0] = 0 if top_k < count else scores[:, 0]  # the first expert is chosen by nobody
    shares, experts = scores.topk(top_k)
    return x, shares, experts, gate_up, down


def truth(x, shares, experts, gate_up, down, activation):
    """The reference in float32, with activations rounded where the matrices round them."""

    def linear(x, weight, bias):
        rows = float8.rounded_inputs(x, gate_up.inputs)
        return float8.linear(rows, weight, bias, torch.float32)

    weights = gate_up.dequantize(), down.dequantize()
    return reference.moe(x.float(), shares, experts, *weights, activation, linear=linear)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_sums_of_experts(kind, seed) -> None:
    """Gated ones, and those whose activation has no gate."""
    activation = ("silu", "gelu_tanh", "relu2")[seed]
    x, shares, experts, gate_up, down = drawn(seed, kind, 1 if activation == "relu2" else 2)
    found = moe(x, shares, experts, gate_up, down, activation)
    expected = truth(x, shares, experts, gate_up, down, activation)
    assert found.dtype == x.dtype
    error = (found.float() - expected).abs().max()
    assert error <= TOLERANCE[kind] * expected.abs().max()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gated", [False, True])
def test_biases_and_shared_experts(kind, gated) -> None:
    """In the activation of the models that have biases; what shared experts give may be gated."""
    x, shares, experts, gate_up, down = drawn(1, kind)
    biases = [torch.randn(shape).to(x.dtype) for shape in (gate_up.shape[:2], down.shape[:2])]
    shared = torch.randn(x.shape).to(x.dtype)
    gates = torch.rand(len(x)) if gated else None
    found = moe(x, shares, experts, gate_up, down, "swiglu_oai", *biases, shared, gates)

    def linear(x, weight, bias):
        rows = float8.rounded_inputs(x, gate_up.inputs)
        return float8.linear(rows, weight, bias, torch.float32)

    weights = gate_up.dequantize(), down.dequantize()
    expected = reference.moe(
        x.float(), shares, experts, *weights, "swiglu_oai", *biases, linear=linear
    )
    expected += shared.float() * (1 if gates is None else gates.unsqueeze(1))
    assert (found.float() - expected).abs().max() <= TOLERANCE[kind] * expected.abs().max()


CODED = ["int4 by 32, zeros", "int4 by row, zeros", "mxfp4", "e4m3 by 64"]


@pytest.mark.parametrize(
    ("kind", "activation"), [*((kind, "silu") for kind in CODED), (CODED[0], "relu2")]
)
def test_sums_of_experts_in_codes(kind, activation) -> None:
    """Outputs and inputs that end within tiles and groups; values begin in a tile of gates."""
    torch.manual_seed(4)
    count, top_k, tokens, hidden, inner = 3, 2, 9, 150, 40
    outputs = inner if activation == "relu2" else 2 * inner
    gate_up, down = (
        drawn_weight(kind, (count, *sizes), Fixed(16, 32, 64, 1), torch.float32, name)
        for name, sizes in (
            ("expert_gate_up", (outputs, hidden)),
            ("expert_down", (hidden, inner)),
        )
    )
    x = torch.randn(tokens, hidden)
    scores = torch.randn(tokens, count).softmax(-1)
    scores[:, 0] = 0  # chosen by nobody
    shares, experts = scores.topk(top_k)
    rounds, group = gate_up[0].form.rounds, gate_up[0].form.group

    def linear(x, weight, bias):
        rows = float8.rounded_inputs(x, "group" if rounds else "float", group)
        return float8.linear(rows, weight, bias, torch.float32)

    biases = torch.randn(count, outputs), torch.randn(count, hidden)
    found = moe(x, shares, experts, gate_up[0], down[0], activation, *biases)
    of = x, shares, experts, gate_up[1], down[1], activation, *biases
    expected = reference.moe(*of, linear=linear)
    # A number between two codes of FP8 may go to either, by the last bit of the first product.
    room = 0.02 if rounds else 1e-5
    assert (found - expected).abs().max() <= room * expected.abs().max()


def test_padding_reads_no_expert() -> None:
    """Rows whose experts are none give zeros, and change no bit of the others."""
    x, shares, experts, gate_up, down = drawn(2, "bfloat16")
    alone = moe(x, shares, experts, gate_up, down, "silu")
    for none in (-1, len(down)):
        padded = torch.cat((experts, torch.full_like(experts[:1].expand(3, -1), none)))
        rows, weights = (torch.cat((part, part[:1].expand(3, -1))) for part in (x, shares))
        found = moe(rows, weights, padded, gate_up, down, "silu")
        assert torch.equal(found[:-3], alone)
        assert not found[-3:].any()


def test_what_does_not_fit_is_refused() -> None:
    x, shares, experts, gate_up, down = drawn(0, "bfloat16")
    with pytest.raises(ValueError, match="does not fit experts"):
        moe(x[:, 1:], shares, experts, gate_up, down, "silu")
    with pytest.raises(ValueError, match="no kernel for relu"):
        moe(x, shares, experts, gate_up, down, "relu")
    empty = moe(x[:0], shares[:0], experts[:0], gate_up, down, "silu")
    assert empty.shape == (0, x.shape[1])
