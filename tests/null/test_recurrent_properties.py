"""Random traffic with recurrent layers: each step reads the state of the tokens before it.

Drafts come out right and wrong anywhere, sequences give way and move to the host, rows are faulty;
the modelled executor refuses a state of other tokens, and a wrong one gives a wrong token.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from costs import LinearCost
from hypothesis import given
from hypothesis import strategies as st
from traffic import (
    COMMON,
    World,
    assert_answers,
    ids,
    plans,
    recurrent_worlds,
    run,
    traffic,
    watching,
)

from depth import searching
from weft.core.plan import Tier
from weft.core.types import Request, SamplingParams
from weft.kv.cache import GroupSpec
from weft.sched.registry import fcfs, slo
from weft.sched.resources import TargetPolicy
from weft.sched.scheduler import Limits

COST = LinearCost(0.01, 0.001, layers=4)
MAKERS = {"fcfs": fcfs, "slo": partial(slo, cost=COST, targets=TargetPolicy("off"))}


@st.composite
def cases(draw):
    """A world, with a host of any size or none, and its traffic."""
    world = draw(recurrent_worlds(tight=draw(st.booleans())))
    if draw(st.booleans()):
        share = draw(st.sampled_from([0.3, 1, 4]))
        host = tuple(max(1, int(share * group.num_blocks)) for group in world.groups)
        world = replace(world, host_blocks=host)
    return world, draw(traffic(world))


@pytest.mark.parametrize("name", MAKERS)
@searching(400, **COMMON)
@given(case=cases())
def test_random_traffic_is_answered_exactly(name, case):
    world, (arrivals, cancels) = case
    step_s = 0.01 * (name == "slo")
    requests, inbox, _ = run(world, arrivals, cancels, make=MAKERS[name], step_s=step_s)
    assert_answers(world, requests, inbox, ids(cancels), set())


@searching(200, **COMMON)
@given(cases(), st.sets(st.integers(0, 13), max_size=4), st.integers(1, 40))
def test_a_faulty_row_ends_alone(case, bad, at):
    world, (arrivals, cancels) = case

    def faulty(sequence, length):
        return sequence in bad and length >= at

    requests, inbox, _ = run(world, arrivals, cancels, faulty=faulty)
    assert_answers(world, requests, inbox, ids(cancels), bad)


@searching(50, **COMMON)
@given(cases())
def test_equal_inputs_give_equal_plans(case):
    world, (arrivals, cancels) = case
    assert plans(world, arrivals, cancels) == plans(world, arrivals, cancels)


GROUPS = (GroupSpec("full", 4, 80), GroupSpec("state", 4, 30, window=1, recurrent=True))


def test_drafts_that_are_right_cost_no_token_more():
    """A text of one token: each step gives as many tokens as were drafted, and none comes again."""
    computed = []
    make = watching(fcfs, lambda _, plan: computed.append(plan.num_tokens))
    world = World(GROUPS, Limits(4, 32, 150), 1, vocab=1)
    request = Request(0, (0,) * 8, SamplingParams(max_tokens=100, speculation=8))
    requests, inbox, scheduler = run(world, {0: [request]}, {}, make=make)
    assert_answers(world, requests, inbox, set(), set())
    totals = scheduler.totals
    assert totals.drafted_tokens == totals.accepted_tokens > 70
    assert totals.steps < 28
    assert sum(computed) <= 108


def test_moves_take_states_along():
    """Two of eight sequences fit the device; no token is computed twice where the host has room."""
    plans, moves = [], []

    def look(_, plan):
        plans.append(plan)
        moves.extend(plan.moves)

    groups = (GroupSpec("full", 4, 16), GroupSpec("state", 4, 40, window=1, recurrent=True))
    world = World(
        groups, Limits(16, 64, 64), 1, prefix_caching=False, host_blocks=(200, 16),
        watermark_tokens=0,
    )  # fmt: skip
    sampling = SamplingParams(max_tokens=20)
    arrivals = {0: [Request(i, tuple(range(i, i + 12)), sampling) for i in range(8)]}
    requests, inbox, scheduler = run(world, arrivals, {}, make=watching(fcfs, look))
    assert_answers(world, requests, inbox, set(), set())
    assert scheduler.totals.preemptions == 0
    assert {move.to for move in moves} == set(Tier)
    assert all(move.state is not None for move in moves)
    assert any(move.after_layer for move in moves) or len(moves) > 8


def test_a_host_without_slots_left_takes_nobody():
    """One slot on the host: the others are computed again."""
    groups = (GroupSpec("full", 4, 16), GroupSpec("state", 4, 40, window=1, recurrent=True))
    world = World(groups, Limits(16, 64, 64), 0, host_blocks=(200, 1), watermark_tokens=0)
    sampling = SamplingParams(max_tokens=20)
    arrivals = {0: [Request(i, tuple(range(i, i + 12)), sampling) for i in range(8)]}
    requests, inbox, scheduler = run(world, arrivals, {})
    assert_answers(world, requests, inbox, set(), set())
    assert scheduler.totals.preemptions > 0 < scheduler.totals.blocks_to_host


@pytest.mark.parametrize(("blocks", "slots"), [(16, 40), (80, 4), (16, 4)])
def test_a_prefix_that_the_device_has_given_up_comes_back_with_its_state(blocks, slots):
    """Its KV, its state or both have gone to the host; at most a block of it is computed again."""
    groups = (GroupSpec("full", 4, blocks), GroupSpec("state", 4, slots, window=1, recurrent=True))
    seen = []
    world = World(groups, Limits(2, 64, 64), 1, host_blocks=(400, 100))
    texts = [tuple(range(n, n + 41)) for n in (0, 30, 50)]
    texts.append((*texts[0], 5, 6, 7))
    arrivals = {
        30 * turn: [Request(turn, text, SamplingParams(max_tokens=6))]
        for turn, text in enumerate(texts)
    }
    make = watching(fcfs, lambda _, plan: seen.append(plan))
    requests, inbox, scheduler = run(world, arrivals, {}, make=make)
    assert_answers(world, requests, inbox, set(), set())
    groups_of = {group for plan in seen for group, _, _ in plan.fills}
    assert groups_of == ({0} if blocks == 16 else set()) | ({1} if slots == 4 else set())
    assert scheduler.totals.cached_tokens == 40
