"""The gated delta rule in Triton against the reference: padded, marked, cut and read by slot."""

from __future__ import annotations

import pytest
import torch

from weft.kernels.delta import DeltaParts, DeltaShape, LayerStates, StateBatch
from weft.kernels.reference_delta import ReferenceDelta
from weft.kernels.triton.delta import TritonDelta

SHAPES = {
    "even": DeltaShape(2, 2, 16, 16, 4),
    "grouped": DeltaShape(1, 3, 24, 40, 4),  # neither size a power of 2, values in two slabs
    "two-taps": DeltaShape(1, 2, 8, 8, 2),
    "tiled": DeltaShape(2, 4, 8, 24, 4, tiled=True),
}
COUNTS, READS, WRITES = [6, 1, 2, 4], [-1, 2, 0, -1], [1, 3, 4, 5]
MARKS = [(1, 6), (4, 7), (8, 8)]  # in the first row twice, and where the third one ends
SLOTS, GARBAGE, PADDING = 10, 7e3, 3
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def make(name: str, dtype: torch.dtype):
    shape = SHAPES[name]
    torch.manual_seed(len(name))
    heads, tokens = shape.value_heads, sum(COUNTS) + PADDING
    parts = DeltaParts(
        shape, torch.randn(shape.channels, shape.taps), torch.randn(heads), torch.randn(heads),
        1 + 0.3 * torch.randn(shape.value_dim), 1e-6,
    )  # fmt: skip
    x = torch.randn(tokens, shape.channels + shape.values).to(dtype)
    gates = 3 * torch.randn(tokens, 2 * heads).to(dtype)
    sizes = shape.matrix, shape.kept_inputs
    states = LayerStates(*(torch.full((SLOTS, *size), GARBAGE) for size in sizes))
    for slot in (0, 2):
        for part in states:
            part[slot] = torch.randn_like(part[slot])
    return parts, x, gates, states


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
    tokens = sum(COUNTS)
    expected_states = LayerStates(*(part.clone() for part in states))
    plain = batch_of(COUNTS, READS, WRITES, MARKS)
    expected = ReferenceDelta(parts)(x[:tokens], gates[:tokens], expected_states, plain)
    padded = batch_of(COUNTS, READS, WRITES, MARKS, padding=2, tokens=len(x))
    found, kept = run(TritonDelta(parts), x, gates, states, padded)
    assert found.dtype == dtype
    most = TOLERANCE[dtype]
    assert float((found[:tokens] - expected).abs().max()) < most * float(expected.abs().max())
    assert not found[tokens:].any()  # tokens that belong to no row
    for part, other in zip(kept, expected_states, strict=True):
        torch.testing.assert_close(part, other, rtol=2e-5, atol=2e-5)
    assert all((part[9] == GARBAGE).all() for part in kept)  # a slot that nobody writes


def test_a_prompt_may_be_cut_anywhere_and_marks_are_states() -> None:
    """Cut at each token, a row gives the same bits; what a mark kept goes on as if never cut."""
    parts, x, gates, states = make("grouped", torch.float32)
    layer, tokens = TritonDelta(parts), 6
    x, gates = x[:tokens], gates[:tokens]
    whole, kept = run(layer, x, gates, states, batch_of([tokens], [-1], [1], [(2, 3)]))
    for cut in range(1, tokens):
        first, between = run(layer, x[:cut], gates[:cut], states, batch_of([cut], [-1], [5], []))
        second, after = run(
            layer, x[cut:], gates[cut:], between, batch_of([tokens - cut], [5], [6], [])
        )
        assert torch.equal(torch.cat((first, second)), whole)
        assert all(torch.equal(part[6], other[1]) for part, other in zip(after, kept, strict=True))
        if cut == 3:
            assert all(
                torch.equal(part[5], other[3]) for part, other in zip(between, kept, strict=True)
            )
    again, _ = run(layer, x[3:], gates[3:], kept, batch_of([3], [3], [6], []))
    assert torch.equal(again, whole[3:])


def test_what_does_not_fit_is_refused() -> None:
    parts, x, gates, states = make("even", torch.float32)
    batch = batch_of([len(x)], [-1], [1], [])
    with pytest.raises(ValueError, match="takes no"):
        TritonDelta(parts)(x[:, 1:], gates, states, batch)
    odd = DeltaParts(DeltaShape(2, 3, 8, 8, 4), *(x,) * 4, 1e-6)
    with pytest.raises(ValueError, match="no kernel for recurrent layers"):
        TritonDelta(odd)
