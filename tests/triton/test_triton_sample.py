"""The choice of tokens on the device against the plain one, in blocks so small that loops turn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from depth import searching
from rows_of_settings import whole_row
from weft.kernels import reference_sampling
from weft.kernels.cpu.sample import uniform
from weft.kernels.triton import sample

SIZE = 150  # of the vocabulary: three blocks
EDGE = 1e-6  # of the mass: how close to a limit float32 weights may fall on its other side


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(sample, "_SPAN", 128)
    monkeypatch.setattr(sample, "_BLOCK", 64)
    monkeypatch.setattr(sample, "_SETS", 16)
    monkeypatch.setattr(sample, "_REGION", 48)
    monkeypatch.setattr(sample, "_CANDIDATES", 64)


def sampled(logits, rows, seeds, counters) -> tuple[list[int], list[bool]]:
    tokens = torch.full((len(logits),), -1, dtype=torch.int64)
    finite = torch.zeros(len(logits), dtype=torch.bool)
    sample.sample(
        logits, torch.tensor([whole_row(*row) for row in rows]).double(), torch.tensor(seeds),
        torch.tensor(counters), tokens, finite,
    )  # fmt: skip
    return tokens.tolist(), finite.tolist()


def acceptable(logits: np.ndarray, row: tuple[float, ...], draw: float) -> set[int]:
    """The tokens that a number may fall on when every limit is uncertain by ``EDGE``."""
    found = set()
    temperature, top_k, top_p, min_p = row
    for p in (top_p - EDGE, top_p, top_p + EDGE) if top_p < 1 else (1.0,):
        for least in {min_p, min_p * (1 - EDGE), min(1, min_p * (1 + EDGE))}:
            kept = reference_sampling.weights_kept(
                logits.astype(np.float64), np.array(whole_row(temperature, top_k, p, least))
            )
            cumulative = np.cumsum(kept) / kept.sum()
            for number in (draw - EDGE, draw, draw + EDGE):
                token = int(
                    np.searchsorted(cumulative, min(max(number, 0), 1 - 1e-12), side="right")
                )
                found.add(token)
    return found


@searching(25)
@given(
    st.integers(0, 2**31), st.sampled_from([0.05, 1.0, 4.0]), st.floats(0.2, 3),
    st.one_of(st.just(0), st.integers(1, 170)), st.one_of(st.just(1.0), st.floats(0, 1)),
    st.one_of(st.just(0.0), st.floats(0, 1)),
)  # fmt: skip
def test_tokens_are_those_of_the_plain_choice(seed, spread, temperature, top_k, top_p, min_p):
    torch.manual_seed(seed)
    logits = spread * torch.randn(1, SIZE)
    logits = logits.half().float()  # rounding makes ties
    row = (temperature, float(top_k), top_p, min_p)
    (token,), (finite,) = sampled(logits, [row], [seed], [5])
    (draw,) = uniform(np.array([seed]), np.array([5]))
    assert finite
    assert token in acceptable(logits[0].cpu().numpy(), row, draw)


@pytest.mark.parametrize("spread", [0.3, 2.0])
def test_tokens_do_not_depend_on_where_they_are_ranked(spread, monkeypatch):
    """In the list of all spans, in the row itself, and by thresholds of fewer sets."""
    logits = spread * torch.randn(8, SIZE)
    logits[:, :60] += 2.0  # most of what is kept lies in one span
    row = [(1.0, 0.0, 0.9, 0.0), (1.0, 30.0, 1.0, 0.0), (0.7, 12.0, 0.8, 0.1), (0.0, 0.0, 1.0, 0.0)]
    found = []
    for sizes in ((16, 128, 256), (4, 48, 64), (16, 8, 64), (16, 48, 16)):
        for name, size in zip(("_SETS", "_REGION", "_CANDIDATES"), sizes, strict=True):
            monkeypatch.setattr(sample, name, size)
        found.append(sampled(logits, 2 * row, range(8), range(8)))
    assert found == [found[0]] * 4
    assert len(set(found[0][0])) > 4


@pytest.mark.parametrize("row", [(1.0, 5.0, 1.0, 0.0), (1.0, 0.0, 0.1, 0.0), (1.0, 5.0, 0.3, 0.0)])
def test_of_equally_likely_tokens_the_first_are_kept(row):
    logits = torch.zeros(6, SIZE)
    logits[:, 20:] = 1.0
    logits[:, 90] = 3.0
    seeds = range(6)
    tokens, _ = sampled(logits, [row] * 6, seeds, [7] * 6)
    draws = uniform(np.array(seeds), np.full(6, 7))
    for token, draw in zip(tokens, draws, strict=True):
        assert token in acceptable(logits[0].cpu().numpy(), row, draw)
        assert token in (90, *range(20, 27))


def test_greedy_takes_the_first_of_the_likeliest_tokens():
    logits = torch.randn(4, SIZE)
    logits[1, [17, 70, 149]] = 9.0
    logits[2, 149] = 9.0
    logits[3] = -0.0
    logits[3, 5:] = 0.0
    tokens, finite = sampled(logits, [(0.0, 0.0, 1.0, 0.0)] * 4, [0] * 4, [0] * 4)
    assert tokens == [int(logits[0].argmax()), 17, 149, 0]
    assert finite == [True] * 4


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_rows_that_are_not_finite_are_told(bad):
    logits = torch.randn(3, SIZE)
    logits[1, 140] = bad
    tokens, finite = sampled(logits, [(1.0, 3.0, 0.5, 0.0)] * 3, [1] * 3, [2] * 3)
    assert finite == [True, False, True]
    assert all(0 <= token < SIZE for token in tokens)
    alone, _ = sampled(logits[:1], [(1.0, 3.0, 0.5, 0.0)], [1], [2])
    assert tokens[0] == alone[0]


def test_the_smallest_temperature_takes_the_likeliest_token():
    logits = torch.randn(1, SIZE)
    tokens, _ = sampled(logits, [(1e-40, 0.0, 1.0, 0.0)], [1], [2])
    assert tokens == [int(logits[0].argmax())]


@triton.jit
def _numbers(seeds, counters, numbers, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(numbers + at, sample.uniform(tl.load(seeds + at), tl.load(counters + at)))


def test_numbers_are_those_of_the_cpu():
    seeds = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 256)
    counters = np.random.default_rng(1).integers(0, 2**40, 256)
    found = torch.empty(256, dtype=torch.float64)
    _numbers[(1,)](torch.tensor(seeds), torch.tensor(counters), found, 256)
    assert found.tolist() == uniform(seeds, counters).tolist()


def test_what_cannot_be_chosen_from_is_an_error():
    with pytest.raises(ValueError, match="float64"):
        sampled(torch.zeros(1, 4, dtype=torch.float64), [(0.0,) * 4], [0], [0])
