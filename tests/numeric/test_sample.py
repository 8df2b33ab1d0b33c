"""Sampling against plain formulas, one row at a time."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import philox
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from depth import searching
from rows_of_settings import whole_row
from weft.core.errors import ParameterError
from weft.core.plan import RowAdd, StepPlan
from weft.core.types import SamplingParams
from weft.exec.input_batch import InputBatch
from weft.exec.sample import sample
from weft.kernels import reference_sampling, sampling
from weft.kernels.cpu import attention
from weft.kernels.cpu.sample import sample_rows, uniform
from weft.kernels.ops import select_ops
from weft.kernels.sampling import PenalisedRows

OPS = select_ops("cpu", "float32")
VOCAB = 50
WIDE = 4096  # candidates that the native code sorts at once


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def table_with(
    rows: list[tuple[list[int], int, SamplingParams]], stop_ids=frozenset()
) -> InputBatch:
    """A row table with (tokens, number of prompt tokens, parameters) in rows 0, 1, ..."""
    table = InputBatch(len(rows), 64, [4])
    adds = tuple(
        RowAdd(i, 100 + i, tuple(tokens), prompt, params.with_defaults({}), stop_ids, ((),))
        for i, (tokens, prompt, params) in enumerate(rows)
    )
    table.apply(StepPlan(1, (), add=adds))
    return table


def params(**changes) -> SamplingParams:
    return SamplingParams(**{"seed": 7, **changes})


def run(logits: torch.Tensor, table: InputBatch):
    return sample(logits.clone(), np.arange(len(logits)), table, OPS)


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

    zero = philox.philox(words(0, 0, 0, 0), words(0, 0))
    assert [int(w[0]) for w in zero] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = philox.philox(words(*[0xFFFFFFFF] * 4), words(0xFFFFFFFF, 0xFFFFFFFF))
    assert [int(w[0]) for w in ones] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = philox.philox(
        words(0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), words(0xA4093822, 0x299F31D0)
    )
    assert [int(w[0]) for w in pi] == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def test_the_numbers_of_draws_are_those_of_philox():
    seeds = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 1000)
    counters = np.random.default_rng(1).integers(0, 2**40, 1000)
    assert uniform(seeds, counters).tolist() == philox.uniform(seeds, counters).tolist()


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
    logits = normal(5, VOCAB)
    table = table_with([([1, 2], 2, params(temperature=0))] * 5)
    assert run(logits, table).tokens.tolist() == logits.argmax(dim=-1).tolist()


@searching(60)
@given(
    st.integers(0, 2**31), st.floats(0.2, 3), st.integers(0, 60),
    st.floats(0.05, 1), st.one_of(st.just(0.0), st.floats(0, 1)),
)  # fmt: skip
def test_filters_keep_exactly_what_the_definition_keeps(seed, temperature, top_k, top_p, min_p):
    logits = 2 * normal(1, VOCAB, seed=seed)
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


MIXED = (
    params(temperature=0),
    params(seed=1),
    params(seed=2, temperature=0.7, top_p=0.9),
    params(seed=3, top_k=40, min_p=0.01),
    params(seed=4, top_k=3000, top_p=0.95, logprobs=3),
    params(seed=5, min_p=0.02, repetition_penalty=1.3, presence_penalty=0.5),
    params(seed=6, temperature=2.0, top_p=0.999, frequency_penalty=1.5, logprobs=20),
    params(temperature=0, logprobs=0, logit_bias={7: 50.0, 9: -100.0}),
    params(seed=8, temperature=1e-40, min_tokens=30),
    params(seed=9, top_p=0.5, logprobs=7),
)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("scale", [0.05, 3.0])
def test_a_row_is_the_same_alone_and_among_rows_with_other_parameters(scale, threads):
    """Bit for bit, log probabilities included; over-long rows, ties and all filters take part."""
    torch.set_num_threads(threads)
    size, count = 3 * WIDE + 11, len(MIXED)
    logits = (scale * normal(count, size)).half().float()  # rounding makes ties
    rows = [([5, 7, 7 + i, 9, 9], 2 + i % 3, p) for i, p in enumerate(MIXED)]
    stop_ids = frozenset({3, 11})
    together = run(logits, table_with(rows, stop_ids))
    for i in range(count):
        alone = run(logits[i : i + 1], table_with([rows[i]], stop_ids))
        assert alone.tokens[0] == together.tokens[i]
        assert alone.logprobs.get(0) == together.logprobs.get(i)
    order = np.arange(count)[::-1].copy()
    turned = sample(logits[order.copy()].clone(), order, table_with(rows, stop_ids), OPS)
    assert turned.tokens.tolist() == together.tokens[order].tolist()
    assert turned.logprobs == {count - 1 - i: x for i, x in together.logprobs.items()}


def kept_tokens(logits: torch.Tensor, draws: int, **filters) -> list[int]:
    """The tokens that so many draws from one row [V] of logits give."""
    table = table_with([([1], 1, params(seed=i, **filters)) for i in range(draws)])
    return run(logits.expand(draws, len(logits)), table).tokens


def test_top_p_of_a_flat_vocabulary_keeps_the_first_of_equally_likely_tokens():
    size = 4 * WIDE
    tokens = kept_tokens(torch.zeros(size), 300, top_p=0.9)
    assert tokens.max() < math.ceil(0.9 * size)
    assert (tokens >= WIDE).sum() > 150
    assert len(set(tokens.tolist())) > 250


@pytest.mark.parametrize("isa", attention.isas())
@pytest.mark.parametrize("size", [1, 7, 63, 64, 257, 1000, 4 * WIDE + 3])
def test_native_choices_equal_the_reference(isa, size):
    """With numbers in the middle of what a token has of the kept mass, where rounding is no matter.

    Filters whose limit falls between two tokens that rounding could exchange are none of these.
    """
    draw = np.random.default_rng(size)
    filters = [(0, 1, 0), (1, 1, 0), (5, 1, 0), (200, 0.9, 0), (0, 0.5, 0), (0, 0.97, 0.001),
               (0, 1, 0.05), (3000, 0.999, 0), (0, 0.02, 0)]  # fmt: skip
    logits, settings, numbers, expected = [], [], [], []
    for scale in (0.05, 1.0, 9.0):
        for temperature in (0.0, 0.5, 1.3):
            for kept in filters:
                row = (scale * draw.standard_normal(size)).astype(np.float32)
                weights = reference_sampling.weights_kept(
                    row.astype(float), np.array(whole_row(temperature or 1.0, *kept))
                )
                if temperature:
                    token = draw.choice(np.flatnonzero(weights > weights.max() * 1e-3))
                else:
                    token = row.argmax()
                shares = weights / weights.sum()
                logits.append(row)
                settings.append(whole_row(temperature, *kept))
                numbers.append(shares[:token].sum() + shares[token] / 2)
                expected.append(token)
    arrays = np.array(settings, float), np.array(numbers)
    reference, _ = reference_sampling.sample_rows(np.array(logits, np.float32), *arrays)
    assert reference.tolist() == expected
    attention.use_isa(isa)
    tokens, finite = sample_rows(torch.from_numpy(np.array(logits)), *arrays)
    assert finite.all()
    assert tokens.tolist() == expected


@pytest.mark.parametrize("top_k", [0, 3 * WIDE])
@pytest.mark.parametrize("top_p", [0.02, 0.3, 0.77, 0.98])
@pytest.mark.parametrize("scale", [0.1, 2.0, 8.0])
def test_top_p_of_a_wide_vocabulary_is_exact(scale, top_p, top_k):
    """The last token kept, by a number just below 1 where the others come in descending order."""
    size = 4 * WIDE
    logits = (scale * normal(size, seed=3)).sort(descending=True).values
    p = params(top_p=top_p, top_k=top_k).with_defaults({})
    expected = reference_probabilities(logits.numpy(), p)
    kept = int((expected > 0).sum())
    settings = np.array([whole_row(1.0, top_k, top_p)])
    (last,), _ = sample_rows(logits.unsqueeze(0).clone(), settings, np.array([1 - 2**-53]))
    assert abs(last + 1 - kept) <= max(1, kept // 10_000)  # float32 against float64
    assert (kept_tokens(logits, 50, top_p=top_p, top_k=top_k) <= last).all()


@pytest.mark.parametrize("temperature", [1e-5, 1e-30, 1e-38, 1e-44, 1e-45])
def test_the_smallest_temperatures_take_the_likeliest_token(temperature):
    logits = 10 * normal(4, VOCAB)
    table = table_with([([1], 1, params(temperature=temperature, seed=i)) for i in range(4)])
    result = run(logits, table)
    assert result.finite.all()
    assert result.tokens.tolist() == logits.argmax(dim=-1).tolist()


def test_a_tiny_temperature_draws_among_equally_likely_tokens():
    logits = torch.zeros(VOCAB)
    logits[[3, 8]] = 5.0
    assert set(kept_tokens(logits, 50, temperature=1e-44).tolist()) == {3, 8}


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
@pytest.mark.parametrize("draw", [0.0, 1 - 2**-53])
def test_the_extreme_draws_fall_on_kept_tokens(monkeypatch, filters, draw):
    monkeypatch.setattr(
        "weft.kernels.cpu.sample.uniform", lambda seeds, _: np.full(len(seeds), draw)
    )
    logits = 4 * normal(VOCAB, seed=1)
    logits[[0, VOCAB - 1]] = -500.0  # their probability is exactly 0
    (token,) = kept_tokens(logits, 1, **filters)
    assert 0 < token < VOCAB - 1


def test_penalties_match_the_formulas():
    logits = normal(1, VOCAB)
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
    both = torch.cat([normal(1, VOCAB, seed=9), logits, logits])
    changed = both.clone()
    longer = ([1] * 9, 3, params(temperature=0, frequency_penalty=1.0))
    table = table_with([([2], 1, params(temperature=0)), (tokens, prompt, p), longer])
    result = sample(changed, np.arange(3), table, OPS)
    torch.testing.assert_close(changed[1], expected)
    torch.testing.assert_close(changed[0], both[0])
    assert math.isclose(float(changed[2, 1]), float(logits[0, 1]) - 6, rel_tol=1e-6)
    torch.testing.assert_close(changed[2, 2:], logits[0, 2:])
    assert int(result.tokens[1]) == int(expected.argmax())


@pytest.mark.parametrize("penalty", [1e-45, 1e-60])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_penalty_that_overflows_still_gives_a_token(penalty, temperature):
    logits = normal(1, VOCAB)
    logits[0, 4] = 0.0
    p = params(temperature=temperature, repetition_penalty=penalty, logprobs=2)
    result = run(logits, table_with([(list(range(10)), 5, p)]))
    assert result.finite.all()
    assert 0 <= result.tokens[0] < VOCAB


def test_logit_bias_forbids_and_forces():
    logits = normal(2, VOCAB)
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


def test_end_ids_beyond_the_vocabulary_are_no_matter():
    """A ``generation_config.json`` may name one; the step must not fail for all rows."""
    logits = normal(2, VOCAB)
    logits[:, 8] = 50.0
    rows = [([1], 1, params(min_tokens=1, temperature=0)), ([1], 1, params())]
    for beyond in (VOCAB, 99_999, 2**31 - 1):
        result = run(logits, table_with(rows, stop_ids=frozenset({8, beyond})))
        assert result.finite.all()
        assert result.tokens[0] not in (8, beyond)


@pytest.mark.parametrize("p", [params(min_tokens=5), params(min_tokens=5, top_p=0.5, logprobs=1)])
def test_a_row_whose_every_token_is_forbidden_still_gives_one(p):
    result = run(normal(1, VOCAB), table_with([([1], 1, p)], stop_ids=frozenset(range(VOCAB))))
    assert result.finite.all()
    assert 0 <= result.tokens[0] < VOCAB


@pytest.mark.parametrize("p", [params(temperature=0), params(), params(top_p=0.5)])
def test_finite_logits_whose_sum_overflows_are_finite(p):
    logits = torch.full((2, VOCAB), 3e38)
    logits[0, :9] = -3e38
    logits[1, 30] = float("inf")
    result = run(logits, table_with([([1], 1, p)] * 2))
    assert result.finite.tolist() == [True, False]
    assert 9 <= result.tokens[0] < VOCAB


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_does_not_touch_the_others(bad):
    logits = normal(3, VOCAB)
    table = table_with([([1], 1, params(seed=i)) for i in range(3)])
    clean = run(logits, table)
    logits[1, 30] = bad
    dirty = run(logits, table)
    assert dirty.finite.tolist() == [True, False, True]
    assert dirty.tokens[[0, 2]].tolist() == clean.tokens[[0, 2]].tolist()


def test_logprobs_are_of_the_raw_distribution():
    logits = normal(1, VOCAB)
    table = table_with([([1], 1, params(temperature=0.3, logprobs=20, logit_bias={4: 100}))])
    entry = run(logits, table).logprobs[0]
    expected = torch.log_softmax(logits[0], -1)
    assert entry.token == 4
    assert math.isclose(entry.logprob, float(expected[4]), rel_tol=1e-6)
    assert entry.rank == int((expected > expected[4]).sum()) + 1
    assert len(entry.top) == 20
    assert [value for _, value in entry.top] == sorted((v for _, v in entry.top), reverse=True)
    assert entry.top[0][0] == int(logits[0].argmax())


def test_each_row_gets_as_many_alternatives_as_it_asked_for():
    logits = normal(5, VOCAB)
    asked = [3, None, 0, 20, 1]
    rows = [([1], 1, params(seed=i, logprobs=count)) for i, count in enumerate(asked)]
    result = run(logits, table_with(rows))
    assert {row: len(entry.top) for row, entry in result.logprobs.items()} == {
        0: 3, 2: 0, 3: 20, 4: 1,
    }  # fmt: skip
    assert all(entry.token == result.tokens[row] for row, entry in result.logprobs.items())
    narrow = run(normal(1, 6), table_with([([1], 1, params(logprobs=20))]))
    assert len(narrow.logprobs[0].top) == 6


def test_allowed_ids_are_all_that_may_be_sampled():
    logits = normal(4, VOCAB)
    asked = [params(seed=i, allowed_token_ids=(7, 30, 7), temperature=5) for i in range(3)]
    table = table_with([*(([1], 1, p) for p in asked), ([1], 1, params(temperature=0))])
    result = run(logits, table)
    assert set(result.tokens[:3].tolist()) <= {7, 30}
    assert result.tokens[3] == int(logits[3].argmax())
    best = run(logits[:1], table_with([([1], 1, replace(asked[0], temperature=0))]))
    assert best.tokens[0] == (7 if logits[0, 7] > logits[0, 30] else 30)
    lone = run(
        logits[:1], table_with([([1], 1, params(allowed_token_ids=(4,), min_tokens=9))], {4})
    )
    assert lone.tokens[0] == 4  # nothing else is left, as with a grammar's end


def test_bad_sequences_are_not_completed():
    p = params(temperature=0, bad_token_sequences=((9,), (4, 5, 6), (5, 8), (1, 7)))
    rows = [([1], 1, p), ([1, 4, 5], 1, p), ([4, 5], 1, p), ([1, 5, 4], 1, p), ([4, 1], 2, p)]
    forbidden = [{9}, {9, 6, 8}, {9, 8}, {9}, {9}]
    for token in (6, 7, 8, 9):
        logits = normal(5, VOCAB)
        logits[:, token] = 100.0
        result = run(logits, table_with(rows))
        for row, never in enumerate(forbidden):
            assert (result.tokens[row] == token) == (token not in never)


def test_a_row_that_may_sample_nothing_ends_alone():
    nothing = params(allowed_token_ids=(4, 5), bad_token_sequences=((4,), (3, 5)))
    rows = [([1, 3], 1, nothing), ([1, 2], 1, nothing), ([1], 1, params())]
    result = run(normal(3, VOCAB), table_with(rows))
    assert list(result.faults) == [0]
    assert isinstance(result.faults[0], ParameterError)
    assert result.finite.all()
    assert result.tokens[1] == 5


def test_log_probabilities_of_named_tokens():
    logits = normal(2, VOCAB)
    rows = [([1], 1, params(logprob_token_ids=(3, 40, 8))), ([1], 1, params(logprobs=2))]
    result = run(logits, table_with(rows))
    expected = torch.log_softmax(logits, -1)
    order = sorted((3, 40, 8), key=lambda token: -float(expected[0, token]))
    assert result.logprobs[0].top == tuple((t, float(expected[0, t])) for t in order)
    assert result.logprobs[0].token == result.tokens[0]
    assert len(result.logprobs[1].top) == 2


def test_a_row_that_is_dropped_leaves_nothing_to_the_next_one():
    table = table_with([([1, 2], 1, MIXED[7]), ([1, 2], 1, MIXED[8])], frozenset({3}))
    adds = tuple(
        RowAdd(row, 7 + row, (1,), 1, params(temperature=0).with_defaults({}), frozenset(), ((),))
        for row in range(2)
    )
    table.apply(StepPlan(2, (), drop=(0, 1), add=adds))
    logits = normal(2, VOCAB)
    result = run(logits, table)
    assert result.logprobs == {}
    assert result.tokens.tolist() == logits.argmax(dim=-1).tolist()


@searching(60)
@given(st.integers(0, 2**32 - 1))
def test_native_penalties_are_the_bits_of_the_formula(seed):
    rng = np.random.default_rng(seed)
    count, size, most = int(rng.integers(1, 5)), int(rng.integers(2, 80)), 40
    tokens = rng.integers(0, size, (6, most)).astype(np.int32)
    logits = (rng.standard_normal((7, size)) * 10.0 ** rng.integers(-3, 39)).astype(np.float32)
    logits[rng.random((7, size)) < 0.1] = 0.0
    lengths = rng.integers(1, most + 1, count)
    penalties = np.stack(
        [
            10.0 ** rng.uniform(-38, 2, count),
            rng.choice([0.0, 0.7, -2.0], count),
            rng.choice([0.0, 0.3, -1.3], count),
        ],
        1,
    ).astype(np.float32)
    asked = PenalisedRows(
        rng.permutation(7)[:count], tokens, rng.integers(0, 6, count), lengths,
        rng.integers(0, lengths + 1), penalties,
    )  # fmt: skip
    expected, found = logits.copy(), logits.copy()
    with np.errstate(all="ignore"):
        sampling.penalise(expected, asked)
    OPS.penalise(found, asked)
    assert found.tobytes() == expected.tobytes()
    OPS.penalise(found, asked)  # nothing of the last call is left to the next one
    with np.errstate(all="ignore"):
        sampling.penalise(expected, asked)
    assert found.tobytes() == expected.tobytes()


def test_native_penalties_refuse_what_does_not_fit():
    logits, one = np.ones((2, 5), np.float32), np.array([1])
    known, neutral = np.array([[1, 7]], np.int32), np.array([[1.5, 0, 0]], np.float32)
    row = np.array([0])
    with pytest.raises(IndexError, match="a token without a logit"):
        OPS.penalise(logits, PenalisedRows(one, known, row, np.array([2]), one, neutral))
    for at, rows, lengths in (
        ([2], [0], [1]),
        ([1], [1], [1]),
        ([1], [0], [3]),
        ([1], [0, 0], [1]),
    ):
        asked = PenalisedRows(np.array(at), known, np.array(rows), np.array(lengths), one, neutral)
        with pytest.raises(ValueError, match="rows"):
            OPS.penalise(logits, asked)
    assert (logits == 1).all()
