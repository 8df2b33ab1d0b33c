"""Learnt output lengths: Kaplan-Meier by hand, bounds, prefixes, and recorded lengths of chats."""

from __future__ import annotations

import csv
import heapq

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from depth import searching
from shareddata import need
from weft.blend.blending import SAMPLED
from weft.blend.lengths import (
    MOST_NODES,
    NEVER,
    LengthCurves,
    LengthTable,
    Running,
    estimate_outputs,
    scope_hash,
)

ROOT = np.zeros(1, np.int64)


class Runs:
    """An order that runs something."""

    def __init__(self, *runs: tuple[int, int, int]) -> None:
        self.runs = runs

    def running(self) -> Running:
        columns = np.asarray(self.runs, np.int64).reshape(-1, 3).T
        return Running(*columns)


def curves(ended, runs=(), bound: int = NEVER) -> LengthCurves:
    table = LengthTable()
    for output in ended:
        table.add(0, output, bound)
    order = Runs(*((0, age, bound) for age in runs))
    table.watch(order)
    return LengthCurves(table.snapshot())


# -- curves ---------------------------------------------------------------------------------------


def test_the_average_of_what_has_ended_where_nothing_runs():
    ended = [3, 5, 5, 11, 20] * 200
    assert curves(ended).expected(ROOT)[0] == pytest.approx(np.mean(ended), rel=0.01)


def test_what_runs_counts_with_its_age_as_by_hand():
    """Of 4 one ends at 10, one is 20 old, one ends at 30, one is 40 old: alive beyond 10 is 3/4,
    beyond 30 half of that. So 1000 of each: 10 + 3/4 * 20 up to 30, where 3/8 are left."""
    found = curves([10, 30] * 1000, [20, 40] * 1000)
    up_to_30 = found.expected(ROOT, 0, np.array([30]))[0]
    assert up_to_30 == pytest.approx(10 + 0.75 * 20, rel=0.02)
    plain = curves([10, 30] * 1000)
    assert plain.expected(ROOT)[0] == pytest.approx(20, rel=0.02)
    assert found.expected(ROOT)[0] > 30


def test_an_age_changes_what_is_expected():
    found = curves([10] * 500 + [100] * 500)
    expected = found.expected(np.zeros(3, np.int64), [0, 20, 99])
    assert expected[0] == pytest.approx(55, rel=0.03)
    assert expected[1] == pytest.approx(100, rel=0.06)
    assert 99 < expected[2] < 115
    reserved = found.quantile(np.zeros(3, np.int64), [0, 20, 99])
    assert (reserved >= [100, 100, 100]).all()
    assert (reserved <= 110).all()


def test_four_of_five_are_not_longer_than_what_is_reserved():
    ended = list(range(1, 1001))
    assert curves(ended).quantile(ROOT)[0] == pytest.approx(800, rel=0.08)


def test_bounded_outputs_follow_the_share_of_their_bounds():
    table = LengthTable()
    for bound in (40, 400):
        for _ in range(300):
            table.add(0, bound // 2, bound)
    found = LengthCurves(table.snapshot())
    bounds = np.array([40, 400, 1000])
    expected = found.expected(np.zeros(3, np.int64), 0, bounds)
    assert expected == pytest.approx(bounds / 2, rel=0.06)
    assert (found.quantile(np.zeros(3, np.int64), 0, bounds) <= 0.6 * bounds).all()


def test_outputs_that_always_reach_their_bound_are_expected_to():
    found = curves([64] * 50, bound=64)
    assert found.expected(ROOT, 0, np.array([500]))[0] == pytest.approx(500, rel=0.03)
    unbounded = found.expected(ROOT)[0]
    assert unbounded > 64, "nobody knows how long they would have become"


def test_nothing_known_is_a_guess_and_a_bound_is_the_bound():
    found = curves([])
    ages = np.array([0, 100, 1000])
    expected = found.expected(np.zeros(3, np.int64), ages)
    assert (expected > ages + 50).all()
    assert found.expected(ROOT, 0, np.array([77]))[0] == 77
    assert found.quantile(ROOT, 0, np.array([77]))[0] == 77
    assert curves([10] * 100).expected(ROOT, 0, np.array([77]))[0] == pytest.approx(10, rel=0.1)


@given(
    st.lists(st.integers(1, 5000), max_size=30),
    st.lists(st.integers(0, 5000), max_size=30),
    st.lists(st.integers(0, 6000), min_size=1, max_size=8),
    st.sampled_from([NEVER, 3000, 9]),
)
@searching(200)
def test_expectations_grow_with_age_and_stay_within_bounds(ended, runs, ages, bound):
    found = curves([min(n, bound) for n in ended], [min(n, bound - 1) for n in runs], bound)
    ages = sorted(min(age, bound - 1) for age in ages)
    nodes, bounds = np.zeros(len(ages), np.int64), np.full(len(ages), bound)
    expected = found.expected(nodes, ages, bounds)
    reserved = found.quantile(nodes, ages, bounds)
    for row in (expected, reserved):
        assert np.isfinite(row).all()
        assert (row >= np.maximum(ages, 1)).all()
        assert (row <= max(bound, 2**21)).all()
    assert (np.diff(expected) >= -0.02 * expected[1:] - 1).all()


# -- nodes ----------------------------------------------------------------------------------------


def family(head: int, count: int, head_tokens: int = 40) -> list[list[int]]:
    return [[head] * head_tokens + [number, *range(5)] for number in range(count)]


def test_prompts_that_begin_alike_have_a_node_under_the_nearest_one():
    table = LengthTable()
    prompts = [*family(1, 20), *family(2, 20), *family(3, 3), [9]]
    nodes = table.places(prompts)
    assert len(set(nodes[:20])) == len(set(nodes[20:40])) == 1
    assert nodes[0] != nodes[20]
    assert set(nodes[40:]) == {0}, "too few to tell anything, so with all others"
    assert (table.places(prompts) == nodes).all(), "the same in another batch"
    assert (table.places(family(1, 1)) == nodes[0]).all()
    other = table.places(prompts, b"/v1/embeddings")
    assert not set(other.tolist()) & set(nodes.tolist())
    deeper = table.places([[1] * 40 + [7] * 100 + [n] for n in range(10)])
    assert len(set(deeper.tolist())) == 1
    assert table.parents[deeper[0]] == nodes[0]


def test_a_node_takes_after_the_one_above_until_it_knows():
    prompts = [*family(1, 20), *family(2, 20)]
    found = estimate_outputs(prompts, dict.fromkeys(range(15), 100))
    assert found[16] == pytest.approx(100, rel=0.1)
    assert found[30] == pytest.approx(100, rel=0.2), "nothing is known of its own kind"
    found = estimate_outputs(
        prompts, dict.fromkeys(range(15), 100) | dict.fromkeys(range(20, 35), 9)
    )
    assert found[16] == pytest.approx(100, rel=0.2)
    assert found[36] == pytest.approx(9, rel=0.4)
    assert (found[:15] == 100).all(), "what has ended is known"


def test_long_ones_elsewhere_are_not_expected_of_a_node_that_has_none():
    prompts = [*family(1, 220), *family(2, 220)]
    ended = dict.fromkeys(range(200), 10) | dict.fromkeys(range(220, 420), 20_000)
    found = estimate_outputs(prompts, ended)
    assert found[210] == pytest.approx(10, rel=0.1)
    assert found[430] == pytest.approx(20_000, rel=0.1)


def test_a_node_tells_when_one_in_ten_of_it_ends():
    table = LengthTable()
    node = int(table.places(family(1, 20))[0])
    other = int(table.places(family(2, 20))[0])
    order = Runs(*((node, 50, NEVER) for _ in range(10)))
    table.watch(order)
    good, kind, _, starts = table.snapshot().told()
    assert not good[node]
    assert (kind[node], kind[other]) == (node, 0)
    assert starts[node] == 10
    assert not good[other], "it is judged by all"
    table.add(node, 52)
    order.runs = tuple((node, 60, NEVER) for _ in range(11))
    assert not table.snapshot().told()[0][node]
    order.runs = order.runs[:9]
    assert table.snapshot().told()[0][node]
    order.runs += ((node, 1, NEVER),) * 500
    assert table.snapshot().told()[0][node], "those that have just begun say nothing"


def test_the_number_of_nodes_is_bounded():
    table = LengthTable()
    for start in range(0, MOST_NODES + 2000, 100):
        heads = range(start, start + 100)
        table.places([prompt for head in heads for prompt in family(head, 8, 20)])
    assert MOST_NODES - 4 < len(table) <= MOST_NODES
    assert table.places(family(10**6, 8)).tolist() == [0] * 8


def test_old_ends_count_less_than_new_ones():
    table = LengthTable()
    for _ in range(60_000):
        table.add(0, 10)
    for _ in range(20_000):
        table.add(0, 100)
    assert LengthCurves(table.snapshot()).expected(ROOT)[0] > 60


# -- recorded lengths -----------------------------------------------------------------------------


def served(lengths, at_once: int, share: float) -> tuple[list[int], list[tuple[int, int]]]:
    """Serve in order until a share has ended: their numbers, and (number, age) of what runs."""
    heap: list[tuple[int, int]] = []
    now, came, ended = 0, 0, []
    while len(ended) < share * len(lengths):
        while len(heap) < at_once:
            heapq.heappush(heap, (now + int(lengths[came]), came))
            came += 1
        now, number = heapq.heappop(heap)
        ended.append(number)
    return ended, [(number, now - end + int(lengths[number])) for end, number in heap]


@pytest.mark.parametrize("at_once", [64, 256])
def test_lengths_of_chats_are_known_after_a_twentieth_of_the_ends(at_once):
    """Compared with the ends alone, and with a sample of 1 % whose running ones are half way, which
    is what BlendServe's estimate comes to."""
    with need("lengths/sharegpt_8k_filtered_stats_llama2_tokenizer.csv").open() as file:
        recorded = np.asarray([int(row["num_decode_tokens"]) for row in csv.DictReader(file)])
    errors = {"learnt": [], "ends": [], "sample": []}
    for seed in range(12):
        lengths = np.random.default_rng(seed).permutation(recorded)
        ended, runs = served(lengths, at_once, 0.05)
        left = lengths[len(ended) + len(runs) :].mean()
        learnt = curves(lengths[ended].tolist(), [age for _, age in runs]).expected(ROOT)[0]
        size = SAMPLED * len(lengths)
        sample = [lengths[number] for number in ended if number < size]
        sample += [2 * age for number, age in runs if number < size]
        for name, found in (
            ("learnt", learnt),
            ("ends", lengths[ended].mean()),
            ("sample", np.mean(sample)),
        ):
            errors[name].append(found / left - 1)
    bias = {name: abs(np.mean(found)) for name, found in errors.items()}
    off = {name: np.sqrt(np.mean(np.square(found))) for name, found in errors.items()}
    assert bias["learnt"] < 0.01
    assert max(map(abs, errors["learnt"])) < 0.05
    assert off["learnt"] < 0.5 * off["sample"]
    assert off["learnt"] < off["ends"]


def documents(count: int, start: int) -> list[list[int]]:
    """Eight questions to each of some documents."""
    return [[n] * 40 + [q] for n in range(start, start + count) for q in range(8)]


def test_many_documents_leave_room_for_what_comes_later():
    table = LengthTable()
    for number in range(4):
        table.places(documents(2000, 1 + 2000 * number), b"chats")
    family = [[90_000] * 40 + [n] for n in range(1000)]
    [node] = set(table.places(family, b"chats").tolist())
    assert table.hashes[table.parents[node]] == scope_hash(b"chats")
    assert set(table.places(family, b"other").tolist()).isdisjoint({0, node})
