"""Sampling against plain formulas, one row at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.core.plan import RowAdd, StepPlan
from weft.core.types import SamplingParams
from weft.exec.philox import philox, uniform
from weft.exec.rows import RowTable
from weft.exec.sample import FIRST_CANDIDATES, sample

VOCAB = 50


def table_with(rows: list[tuple[list[int], int, SamplingParams]], stop_ids=frozenset()) -> RowTable:
    """A row table with (tokens, number of prompt tokens, parameters) in rows 0, 1, ..."""
    table = RowTable(len(rows), 64, [4])
    adds = tuple(
        RowAdd(i, 100 + i, tuple(tokens), prompt, params.with_defaults({}), stop_ids, ((),))
        for i, (tokens, prompt, params) in enumerate(rows)
    )
    table.apply(StepPlan(1, (), add=adds))
    return table


def params(**changes) -> SamplingParams:
    return SamplingParams(**{"seed": 7, **changes})


def run(logits: torch.Tensor, table: RowTable):
    return sample(logits.clone(), np.arange(len(logits)), table)


def reference_probabilities(logits: np.ndarray, p: SamplingParams) -> np.ndarray:
    """The distribution by the definition: temperature, top-k, top-p, min-p in this order."""
    scaled = logits.astype(np.float64) / p.temperature
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities, kind="stable")
    if p.top_k:
        probabilities[order[p.top_k :]] = 0
        probabilities /= probabilities.sum()
    if p.top_p < 1:
        mass = 0.0
        for token in order:
            if mass >= p.top_p:
                probabilities[token] = 0
            mass += probabilities[token]
    probabilities[probabilities < p.min_p * probabilities.max()] = 0
    return probabilities / probabilities.sum()


def test_philox_gives_the_published_vectors():
    """Known answers that the authors of Random123 publish for philox4x32-10."""

    def words(*values):
        return tuple(np.array([v], np.uint64) for v in values)

    zero = philox(words(0, 0, 0, 0), words(0, 0))
    assert [int(w[0]) for w in zero] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = philox(words(*[0xFFFFFFFF] * 4), words(0xFFFFFFFF, 0xFFFFFFFF))
    assert [int(w[0]) for w in ones] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = philox(
        words(0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), words(0xA4093822, 0x299F31D0)
    )
    assert [int(w[0]) for w in pi] == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def test_uniform_numbers_are_uniform_and_do_not_repeat():
    numbers = uniform(np.full(20_000, 12345), np.arange(20_000))
    assert len(set(numbers)) == 20_000
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 50  # chi-square, 19 degrees: p is below 1e-4
    other = uniform(np.full(20_000, 12346), np.arange(20_000))
    assert abs(np.corrcoef(numbers, other)[0, 1]) < 0.03


def test_greedy_takes_the_likeliest_token():
    logits = torch.randn(5, VOCAB)
    table = table_with([([1, 2], 2, params(temperature=0))] * 5)
    assert run(logits, table).tokens.tolist() == logits.argmax(dim=-1).tolist()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31), st.floats(0.2, 3), st.integers(0, 60),
    st.floats(0.05, 1), st.one_of(st.just(0.0), st.floats(0, 1)),
)  # fmt: skip
def test_filters_keep_exactly_what_the_definition_keeps(seed, temperature, top_k, top_p, min_p):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(1, VOCAB, generator=generator)
    p = params(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = reference_probabilities(logits[0].numpy(), p)
    draws = 300
    many = logits.expand(draws, VOCAB).contiguous()
    rows = [([1], 1, SamplingParams(**{**as_dict(p), "seed": i})) for i in range(draws)]
    tokens = run(many, table_with(rows)).tokens
    allowed = set(np.flatnonzero(expected > 0).tolist())
    edge = set(np.flatnonzero(np.abs(expected - p.min_p * expected.max()) < 1e-6).tolist())
    assert set(tokens.tolist()) <= allowed | edge
    counts = np.bincount(tokens, minlength=VOCAB)
    likely = expected * draws >= 20
    deviation = np.abs(counts - expected * draws)[likely]
    assert (deviation <= 6 * np.sqrt(expected * draws)[likely]).all()


def as_dict(p: SamplingParams) -> dict:
    return {name: getattr(p, name) for name in ("temperature", "top_k", "top_p", "min_p")}


def test_draws_follow_the_distribution():
    """Chi-square over 20,000 draws from one distribution without filters."""
    logits = torch.linspace(0, 3, 12).unsqueeze(0)
    rows = [([1] * (i % 40 + 1), 1, params(seed=i // 40)) for i in range(20_000)]
    tokens = run(logits.expand(20_000, 12).contiguous(), table_with(rows)).tokens
    expected = torch.softmax(logits[0], -1).numpy() * 20_000
    chi_square = ((np.bincount(tokens, minlength=12) - expected) ** 2 / expected).sum()
    assert chi_square < 38  # 11 degrees of freedom: p is below 1e-4


def test_the_same_seed_draws_the_same_whatever_else_is_in_the_batch():
    logits = torch.randn(6, VOCAB)
    alone = [
        run(logits[i : i + 1], table_with([([1] * 5, 2, params(seed=40 + i, top_p=0.9))]))
        for i in range(6)
    ]
    together = run(
        logits,
        table_with([([1] * 5, 2, params(seed=40 + i, top_p=0.9)) for i in range(6)]),
    )
    assert together.tokens.tolist() == [int(a.tokens[0]) for a in alone]


def test_a_wide_vocabulary_needs_no_full_sort_to_be_exact():
    """top_p reaches beyond the first candidates: the rows that need it are sorted in full."""
    size = 4 * FIRST_CANDIDATES
    logits = torch.zeros(200, size)
    rows = [([1], 1, params(seed=i, top_p=0.9)) for i in range(200)]
    table = RowTable(200, 4, [1])
    table.apply(
        StepPlan(
            1,
            (),
            add=tuple(
                RowAdd(i, i, (1,), 1, p.with_defaults({}), frozenset(), ((),))
                for i, (_, _, p) in enumerate(rows)
            ),
        )
    )
    tokens = sample(logits, np.arange(200), table).tokens
    assert len(set(tokens.tolist())) > 150
    assert (tokens >= FIRST_CANDIDATES).sum() > 100


def test_penalties_match_the_formulas():
    logits = torch.randn(1, VOCAB)
    tokens, prompt = [3, 4, 9, 9, 9, 5], 2
    p = params(
        temperature=0, repetition_penalty=1.7, presence_penalty=0.6, frequency_penalty=0.4,
        logprobs=0,
    )  # fmt: skip
    expected = logits[0].clone()
    for token in {3, 4, 9, 5}:
        value = expected[token]
        expected[token] = value / 1.7 if value > 0 else value * 1.7
    for token, count in {9: 3, 5: 1}.items():
        expected[token] -= 0.6 + 0.4 * count
    changed = logits.clone()
    table = table_with([(tokens, prompt, p)])
    result = sample(changed, np.array([0]), table)
    torch.testing.assert_close(changed[0], expected)
    assert int(result.tokens[0]) == int(expected.argmax())


def test_logit_bias_forbids_and_forces():
    logits = torch.randn(2, VOCAB)
    best = int(logits[0].argmax())
    table = table_with(
        [
            ([1], 1, params(temperature=0, logit_bias={best: -100})),
            ([1], 1, params(temperature=1.0, logit_bias={17: 100})),
        ]
    )
    tokens = run(logits, table).tokens
    assert tokens[0] != best
    assert tokens[1] == 17


def test_stop_ids_are_impossible_before_min_tokens():
    logits = torch.zeros(2, VOCAB)
    logits[:, 8] = 50.0
    early, late = ([1, 2], 1), ([1, 2, 3, 4], 1)
    table = table_with(
        [
            (*early, params(min_tokens=3, temperature=0)),
            (*late, params(min_tokens=3, temperature=0)),
        ],
        stop_ids=frozenset({8}),
    )
    tokens = run(logits, table).tokens
    assert tokens[0] != 8
    assert tokens[1] == 8


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_does_not_touch_the_others(bad):
    logits = torch.randn(3, VOCAB)
    table = table_with([([1], 1, params(seed=i)) for i in range(3)])
    clean = run(logits, table)
    logits[1, 30] = bad
    dirty = run(logits, table)
    assert dirty.finite.tolist() == [True, False, True]
    assert dirty.tokens[[0, 2]].tolist() == clean.tokens[[0, 2]].tolist()


def test_logprobs_are_of_the_raw_distribution():
    logits = torch.randn(1, VOCAB)
    table = table_with([([1], 1, params(temperature=0.3, logprobs=20, logit_bias={4: 100}))])
    entry = run(logits, table).logprobs[0]
    expected = torch.log_softmax(logits[0], -1)
    assert entry.token == 4
    assert math.isclose(entry.logprob, float(expected[4]), rel_tol=1e-6)
    assert entry.rank == int((expected > expected[4]).sum()) + 1
    assert len(entry.top) == 20
    assert [value for _, value in entry.top] == sorted((v for _, v in entry.top), reverse=True)
    assert entry.top[0][0] == int(logits[0].argmax())
