"""Recurrent layers in Triton against the reference: padded, marked, cut and read by slot."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weft.kernels.conv import ConvParts, ConvShape
from weft.kernels.delta import DeltaParts, DeltaShape, LayerStates, StateBatch
from weft.kernels.mamba2 import Mamba2Parts, Mamba2Shape
from weft.kernels.reference_conv import ReferenceConv
from weft.kernels.reference_delta import ReferenceDelta
from weft.kernels.reference_mamba2 import ReferenceMamba2
from weft.kernels.triton.conv import TritonConv
from weft.kernels.triton.delta import TritonDelta
from weft.kernels.triton.mamba2 import TritonMamba2

SHAPES = {
    "even": DeltaShape(2, 2, 16, 16, 4),
    "grouped": DeltaShape(1, 3, 24, 40, 4),  # neither size a power of 2, values in two slabs
    "two-taps": DeltaShape(1, 2, 8, 8, 2),
    "tiled": DeltaShape(2, 4, 8, 24, 4, tiled=True),
    "by-channel": DeltaShape(1, 2, 16, 8, 4, by_channel=True),
    "by-channel-floor": DeltaShape(1, 1, 24, 16, 2, by_channel=True),
    "conv": ConvShape(520, 3),  # in two blocks
    "conv-biased": ConvShape(24, 2, bias=True),
    "mamba2": Mamba2Shape(1, 40, 1, 24, 3),  # in two slabs
    "mamba2-groups": Mamba2Shape(4, 8, 2, 8, 2, conv_bias=False),
}
LAYERS: dict[type, tuple[Any, Any]] = {
    DeltaParts: (ReferenceDelta, TritonDelta),
    ConvParts: (ReferenceConv, TritonConv),
    Mamba2Parts: (ReferenceMamba2, TritonMamba2),
}
FLOOR, LIMITS = -5.0, (0.5, 2.0)
COUNTS, READS, WRITES = [6, 1, 2, 4], [-1, 2, 0, -1], [1, 3, 4, 5]
MARKS = [(1, 6), (4, 7), (8, 8)]  # in the first row twice, and where the third one ends
SLOTS, GARBAGE, PADDING = 10, 7e3, 3
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def parts_of(name: str) -> tuple[Any, int, int | None]:
    """Random parameters of a layer, and the numbers of its inputs and of its gates."""
    shape = SHAPES[name]
    conv = torch.randn(shape.channels, shape.taps)
    if isinstance(shape, ConvShape):
        bias = torch.randn(shape.channels) if shape.bias else None
        return ConvParts(shape, conv, bias), 3 * shape.channels, None
    wide = shape.channels + shape.values
    if isinstance(shape, DeltaShape):
        heads, norm = shape.value_heads, 1 + 0.3 * torch.randn(shape.value_dim)
        steps = torch.randn(heads), torch.randn(shape.decays)
        floor = FLOOR if name.endswith("floor") else None
        gating = "sigmoid" if shape.by_channel else "silu"
        parts = DeltaParts(shape, conv, *steps, norm, 1e-6, gating, floor)
        return parts, wide, heads + shape.decays
    bias = torch.randn(shape.channels) if shape.conv_bias else None
    steps = (torch.randn(shape.heads) for _ in range(3))
    limits = LIMITS if name.endswith("groups") else (0.0, float("inf"))
    norm = 1 + 0.3 * torch.randn(shape.values)
    return Mamba2Parts(shape, conv, bias, *steps, norm, 1e-6, limits), wide, shape.heads


def make(name: str, dtype: torch.dtype):
    torch.manual_seed(len(name))
    tokens = sum(COUNTS) + PADDING
    parts, wide, opening = parts_of(name)
    x = torch.randn(tokens, wide).to(dtype)
    gates = None if opening is None else 3 * torch.randn(tokens, opening).to(dtype)
    sizes = parts.shape.matrix, parts.shape.kept_inputs
    states = LayerStates(*(torch.full((SLOTS, *size), GARBAGE) for size in sizes))
    for slot in (0, 2):
        for part in states:
            part[slot] = torch.randn_like(part[slot])
    return parts, x, gates, states


def bound(parts: Any) -> tuple[Any, Any]:
    """The layer of the reference, and that of the kernels."""
    reference, kernels = LAYERS[type(parts)]
    return reference(parts), kernels(parts)


def some(gates, rows: slice):
    return None if gates is None else gates[rows]


def batch_of(counts, reads, writes, marks, padding=0, tokens=0) -> StateBatch:
    """A batch, padded by some rows and to some tokens where these are given."""
    bounds = torch.tensor([0, *counts, *[0] * padding]).cumsum(0).int()
    more = [-1] * padding, [0] * padding
    slots = torch.tensor(marks, dtype=torch.int32).reshape(-1, 2)
    if padding:
        by_token = torch.full((tokens,), -1, dtype=torch.int32)
        by_token[slots[:, 0].long()] = slots[:, 1]
        slots = by_token
    numbers = [
        torch.tensor([*a, *b], dtype=torch.int32)
        for a, b in zip((reads, writes), more, strict=True)
    ]
    return StateBatch(bounds, *numbers, slots)


def run(layer, x, gates, states, batch):
    """What a layer gives, and the states that it leaves."""
    kept = LayerStates(*(part.clone() for part in states))
    return layer(x, gates, kept, batch), kept


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_padded_rows_are_those_of_the_reference(name, dtype) -> None:
    parts, x, gates, states = make(name, dtype)
    (reference, layer), tokens = bound(parts), sum(COUNTS)
    expected_states = LayerStates(*(part.clone() for part in states))
    plain, rows = batch_of(COUNTS, READS, WRITES, MARKS), slice(0, tokens)
    expected = reference(x[rows], some(gates, rows), expected_states, plain)
    padded = batch_of(COUNTS, READS, WRITES, MARKS, padding=2, tokens=len(x))
    found, kept = run(layer, x, gates, states, padded)
    assert found.dtype == dtype
    most = TOLERANCE[dtype]
    assert float((found[rows] - expected).abs().max()) < most * float(expected.abs().max())
    assert not found[tokens:].any()  # tokens that belong to no row
    for part, other in zip(kept, expected_states, strict=True):
        torch.testing.assert_close(part, other, rtol=2e-5, atol=2e-5)
    assert all((part[9] == GARBAGE).all() for part in kept)  # a slot that nobody writes


@pytest.mark.parametrize("name", ["grouped", "by-channel-floor", "conv-biased", "mamba2-groups"])
def test_a_prompt_may_be_cut_anywhere_and_marks_are_states(name) -> None:
    """Cut at each token, a row gives the same bits; what a mark kept goes on as if never cut."""
    parts, x, gates, states = make(name, torch.float32)
    (_, layer), tokens = bound(parts), 6
    x, gates = x[:tokens], some(gates, slice(0, tokens))
    whole, kept = run(layer, x, gates, states, batch_of([tokens], [-1], [1], [(2, 3)]))
    for cut in range(1, tokens):
        early, late = slice(0, cut), slice(cut, tokens)
        begun = batch_of([cut], [-1], [5], [])
        first, between = run(layer, x[early], some(gates, early), states, begun)
        rest = batch_of([tokens - cut], [5], [6], [])
        second, after = run(layer, x[late], some(gates, late), between, rest)
        assert torch.equal(torch.cat((first, second)), whole)
        assert all(torch.equal(part[6], other[1]) for part, other in zip(after, kept, strict=True))
        if cut == 3:
            assert all(
                torch.equal(part[5], other[3]) for part, other in zip(between, kept, strict=True)
            )
    late = slice(3, tokens)
    again, _ = run(layer, x[late], some(gates, late), kept, batch_of([3], [3], [6], []))
    assert torch.equal(again, whole[3:])


def test_a_row_is_found_among_many() -> None:
    """Of every number of rows, some of several tokens, and with rows of padding behind them."""
    parts, _, _, states = make("conv-biased", torch.float32)
    reference, layer = bound(parts)
    for rows in (1, 2, 3, 5, 7):
        counts = [1 + (row * rows) % 3 for row in range(rows)]
        x = torch.randn(sum(counts), 3 * parts.shape.channels)
        reads, writes = [-1, 0, 2, 0, 2, -1, 0][:rows], [1, 3, 4, 5, 6, 7, 8][:rows]
        expected = reference(x, None, states, batch_of(counts, reads, writes, []))
        for padding in (0, rows):
            batch = batch_of(counts, reads, writes, [], padding, len(x))
            torch.testing.assert_close(run(layer, x, None, states, batch)[0], expected)


@pytest.mark.parametrize("name", ["even", "by-channel", "conv", "mamba2"])
def test_what_does_not_fit_is_refused(name) -> None:
    parts, x, gates, states = make(name, torch.float32)
    batch, (_, layer) = batch_of([len(x)], [-1], [1], []), bound(parts)
    with pytest.raises(ValueError, match="takes no"):
        layer(x[:, 1:], gates, states, batch)
    if gates is not None:
        with pytest.raises(ValueError, match="takes no"):
            layer(x, gates[:, 1:], states, batch)
    with pytest.raises(ValueError, match="takes no"):
        layer(x, gates, LayerStates(*(part[:, 1:] for part in states)), batch)


@pytest.mark.parametrize(
    "parts",
    [
        DeltaParts(DeltaShape(2, 3, 8, 8, 4), None, None, None, None, 1e-6),
        DeltaParts(DeltaShape(2, 2, 8, 8, 4), None, None, None, None, 1e-6, "tanh"),
        ConvParts(ConvShape(8, 1), None, None),
        Mamba2Parts(Mamba2Shape(3, 8, 2, 8, 4), None, None, None, None, None, None, 1e-6),
        Mamba2Parts(Mamba2Shape(2, 8, 2, 8, 1), None, None, None, None, None, None, 1e-6),
    ],
    ids=lambda parts: str(parts.shape),
)
def test_layers_without_a_kernel_are_refused(parts) -> None:
    with pytest.raises(ValueError, match="no kernel for recurrent layers"):
        LAYERS[type(parts)][1](parts)
