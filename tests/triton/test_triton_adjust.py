"""Penalties, edits and drafts on the device against plain torch, bit for bit, in small blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from depth import searching
from weft.kernels import reference_sampling
from weft.kernels.sampling import (
    EDIT,
    EDITED,
    HEADER,
    IN_PROMPT,
    NOT_FINITE,
    PENALISED,
    RowState,
    SampleBatch,
)
from weft.kernels.triton import process_logits as kernels

SIZE = 150  # of the vocabulary: two spans, three blocks
ROWS, EDITS = 5, 10


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(kernels, "_SPAN", 128)
    monkeypatch.setattr(kernels, "_BLOCK", 64)
    monkeypatch.setattr(kernels, "_EDITS", 4)


def on(array, dtype=None) -> torch.Tensor:
    """A numpy array where the kernels run."""
    return torch.tensor(array.tolist(), dtype=dtype)


def some_rows(draw: np.random.Generator) -> RowState:
    """Rows with penalties, edits and counts, and last tokens that nobody has."""
    device = torch.tensor(0).device
    state = RowState.empty(ROWS, EDITS, SIZE, device)
    for row in range(ROWS):
        number = int(draw.integers(0, EDITS + 1))
        penalties = draw.choice([1e-39, 0.3, 1.0, 1.05, 7.0]), *draw.uniform(-2, 2, 2)
        parts = torch.zeros(EDITS, EDIT, dtype=torch.int32)
        parts[:, 0] = on(draw.permutation(SIZE)[:EDITS])
        parts[:, 1] = on(draw.uniform(-100, 100, EDITS), torch.float32).view(torch.int32)
        parts[:, 2] = on(draw.integers(0, 9, EDITS))
        asked = state.asked[row]
        asked[: HEADER - 1] = torch.tensor([float(p) for p in penalties]).view(torch.int32)
        asked[HEADER - 1] = number
        asked[HEADER:] = parts.view(-1)
    counts = draw.integers(0, 4, (ROWS, SIZE)) * (draw.random((ROWS, SIZE)) < 0.3)
    prompts = IN_PROMPT * (draw.random((ROWS, SIZE)) < 0.3)
    state.counts[:ROWS] = on(counts + prompts)
    state.last_token.fill_(-7)
    allowed = draw.integers(0, 2**32, state.masks.shape, np.uint32) | draw.choice([0, 2**32 - 1])
    state.masks[:] = on(allowed.astype(np.uint32).view(np.int32))
    return state


def some_samples(draw: np.random.Generator, padding: int) -> SampleBatch:
    """Samples of all rows in any order, some along drafts with few different tokens."""
    rows, counters, changes, guesses = [], [], [], []
    for row in draw.permutation(ROWS).tolist():
        drafts = int(draw.integers(0, 5)) if draw.random() < 0.5 else 0
        start, change = int(draw.integers(0, 9)), int(draw.integers(0, 8))
        for i in range(1 + drafts):
            rows.append(row)
            counters.append(start + i)
            changes.append(change)
            guesses.append(int(draw.integers(0, 3)) if i else -1)
    rows += [ROWS] * padding
    counters, changes = counters + [0] * padding, changes + [0] * padding
    return SampleBatch(
        torch.tensor(rows), torch.tensor(counters), torch.tensor(changes, dtype=torch.int32),
        torch.tensor(guesses + [-1] * padding, dtype=torch.int32),
    )  # fmt: skip


def copied(state: RowState) -> RowState:
    return replace(state, counts=state.counts.clone(), last_token=state.last_token.clone())


@pytest.mark.filterwarnings("ignore:overflow")
@searching(25)
@given(st.integers(0, 2**31), st.integers(0, 3), st.booleans())
def test_logits_are_adjusted_as_by_plain_torch(seed, padding, broken):
    draw = np.random.default_rng(seed)
    state, samples = some_rows(draw), some_samples(draw, padding)
    count = len(samples.rows)
    whole = 10 * torch.randn(count, SIZE + 7)  # rows may lie apart
    whole[:, 3::9] = 0.0
    if broken:
        bad = on(draw.choice([np.nan, np.inf, -np.inf], 20))
        whole[on(draw.integers(0, count, 20)), on(draw.integers(0, SIZE, 20))] = bad.float()
    expected, found = whole.clone(), whole.clone()
    reference_sampling.process_logits(expected[:, :SIZE], samples, state)
    kernels.process_logits(found[:, :SIZE], samples, state)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
    plain = samples.changes == 0
    assert torch.equal(found[plain].view(torch.int32), whole[plain].view(torch.int32))
    unusual = ~torch.isfinite(whole)
    assert torch.equal(found[unusual].view(torch.int32), whole[unusual].view(torch.int32))


@searching(40)
@given(st.integers(0, 2**31), st.integers(0, 3), st.sampled_from([0.0, 0.3]))
def test_tokens_are_accepted_as_by_plain_torch(seed, padding, broken):
    draw = np.random.default_rng(seed)
    state, samples = some_rows(draw), some_samples(draw, padding)
    count = len(samples.rows)
    tokens = on(draw.integers(0, 3, count), torch.int64)
    finite = on(draw.random(count) >= broken)
    found = []
    for verify_drafts in (reference_sampling.verify_drafts, kernels.verify_drafts):
        after, results = copied(state), torch.full((count, 2), 99)
        verify_drafts(tokens, finite, samples, after, results)
        found.append((after, results))
    (expected, truth), (after, results) = found
    assert torch.equal(results, truth)
    assert torch.equal(after.counts, expected.counts)
    assert torch.equal(after.last_token[:ROWS], expected.last_token[:ROWS])


def test_the_longest_right_start_of_a_draft_is_kept_and_counted():
    state = RowState.empty(3, 0, SIZE, torch.tensor(0).device)
    rows = torch.tensor([0, 0, 0, 0, 1, 1, 2])
    guesses = torch.tensor([-1, 5, 5, 6, -1, 8, -1], dtype=torch.int32)
    tokens = torch.tensor([5, 5, 7, 9, 8, 4, 3])
    finite = torch.tensor([True] * 5 + [False] * 2)
    changes = torch.full((7,), PENALISED | EDITED, dtype=torch.int32)
    results = torch.zeros(7, 2, dtype=torch.int64)
    kernels.verify_drafts(tokens, finite, SampleBatch(rows, rows, changes, guesses), state, results)
    # Row 1 was guessed right, but what comes after the guess is not finite; row 2 has nothing.
    assert results[:, 1].tolist() == [3, 0, 0, 0, 1, 0, 1]
    assert results[:, 0].tolist() == [5, 5, 7, 9, 8, NOT_FINITE, NOT_FINITE]
    assert state.last_token.tolist() == [7, 8, 0, 0]
    counted = {(r, t): int(state.counts[r, t]) for r, t in state.counts.nonzero().tolist()}
    assert counted == {(0, 5): 2, (0, 7): 1, (1, 8): 1}


def test_what_cannot_be_adjusted_is_an_error():
    state = RowState.empty(1, 0, SIZE, torch.tensor(0).device)
    samples = some_samples(np.random.default_rng(0), 0)
    with pytest.raises(ValueError, match="float64"):
        kernels.process_logits(torch.zeros(1, SIZE, dtype=torch.float64), samples, state)
    with pytest.raises(ValueError, match="150 tokens"):
        kernels.process_logits(torch.zeros(1, 4), samples, state)
