"""Random traffic through the real scheduler on the modelled executor: exact, nothing lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traffic import (
    COMMON,
    VOCAB,
    ScriptedInbox,
    World,
    assert_answers,
    ids,
    plans,
    run,
    run_with_deaths,
    traffic,
    watching,
    worlds,
)

from depth import searching
from weft.core.errors import InvariantError
from weft.core.types import Request, SamplingParams
from weft.engine.loop import EngineLoop
from weft.kv.cache import GroupSpec, KVCache
from weft.sched.draft import REMEMBERED, NgramDrafter
from weft.sched.registry import fcfs
from weft.sched.scheduler import Limits
from weft.sim.clock import VirtualClock
from weft.sim.executor import ModelledExecutor


@searching(600, **COMMON)
@given(st.data())
def test_random_traffic_is_answered_exactly(data):
    world = data.draw(worlds())
    arrivals, cancels = data.draw(traffic(world))
    requests, inbox, _ = run(world, arrivals, cancels)
    assert_answers(world, requests, inbox, ids(cancels), set())


@searching(600, **COMMON)
@given(st.data())
def test_a_pool_that_is_always_full_answers_everybody(data):
    world = data.draw(worlds(tight=True))
    arrivals, cancels = data.draw(traffic(world))
    requests, inbox, _ = run(world, arrivals, cancels)
    assert_answers(world, requests, inbox, ids(cancels), set())


@searching(600, **COMMON)
@given(st.data())
def test_engines_that_die_leave_kv_that_is_true(data):
    """The model's next token depends on all KV before it, so one wrong slot is a wrong token."""
    world = replace(data.draw(worlds(tight=data.draw(st.booleans()))), prefix_caching=True)
    arrivals, cancels = data.draw(traffic(world))
    rounds = st.integers(5, 80)
    deaths = data.draw(st.dictionaries(rounds, st.integers(0, 3), min_size=2, max_size=9))
    requests, inbox, _ = run_with_deaths(world, arrivals, cancels, deaths)
    assert_answers(world, requests, inbox, ids(cancels), set())


@searching(300, **COMMON)
@given(st.data())
def test_a_faulty_row_ends_alone(data):
    world = data.draw(worlds(tight=data.draw(st.booleans())))
    arrivals, cancels = data.draw(traffic(world))
    bad = data.draw(st.sets(st.integers(0, 13), max_size=4))
    at = data.draw(st.integers(1, 40))
    requests, inbox, _ = run(
        world, arrivals, cancels, faulty=lambda sequence, length: sequence in bad and length >= at
    )
    assert_answers(world, requests, inbox, ids(cancels), bad)


@searching(100, **COMMON)
@given(st.data())
def test_equal_inputs_give_equal_plans(data):
    world = data.draw(worlds())
    arrivals, cancels = data.draw(traffic(world))
    assert plans(world, arrivals, cancels) == plans(world, arrivals, cancels)


@searching(300, **COMMON)
@given(st.data())
def test_stages_of_a_pipeline_compute_known_tokens_only(data):
    """However many steps are in flight; and decodes are in no more of them than groups."""
    world = data.draw(worlds(tight=data.draw(st.booleans())))
    groups = data.draw(st.integers(1, 4))
    limits = replace(world.limits, groups=groups, lease_steps=0)
    world = replace(world, limits=limits, depth=data.draw(st.integers(groups - 1, groups + 1)))

    def look(scheduler, _):
        launched = scheduler._launched
        for sequence, count in zip(launched[-1].sequences, launched[-1].counts, strict=True):
            assert sequence.planned <= len(sequence.tokens)
            decodes = count == 1 and sequence.planned > sequence.num_prompt
            assert not decodes or len(launched) <= groups

    arrivals, cancels = data.draw(traffic(world))
    requests, inbox, _ = run(world, arrivals, cancels, make=watching(fcfs, look))
    assert_answers(world, requests, inbox, ids(cancels), set())


def test_lower_classes_do_not_take_the_blocks_that_come_back_for_a_higher_one():
    """Two batch requests took turns in being preempted for a third, which never ran again."""
    groups = (GroupSpec("full", 4, 15), GroupSpec("sliding", 4, 5, 10))
    world = World(groups, Limits(6, 7, 58), 1, prefix_caching=False)
    low = [
        Request(i, tuple(range(1, n)), SamplingParams(), (), "batch") for i, n in ((0, 2), (1, 6))
    ]
    first = Request(2, (1, 2, 3, 4, 5, 6), SamplingParams())
    last = Request(3, (79, 26, 51, 68, 69, 31, 84), SamplingParams(max_tokens=4), (), "priority")
    arrivals = {0: [first, low[0]], 1: [low[1]], 8: [last]}
    requests, inbox, _ = run(world, arrivals, {})
    assert_answers(world, requests, inbox, set(), set())


def test_rows_are_leased_as_long_as_nothing_changes():
    """Three sequences of 40 tokens take as many steps, of which few are planned."""
    groups = (GroupSpec("full", 4, 80), GroupSpec("sliding", 4, 40, 10))
    world = World(groups, Limits(4, 32, 60, lease_steps=9), 1)
    sampling = SamplingParams(max_tokens=40)
    planned, leased = [], []

    def look(_, plan):
        planned.append(plan.step_id)
        leased.append(plan.lease)

    requests = [Request(i, (i + 1,) * 5, sampling) for i in range(3)]
    requests, inbox, scheduler = run(
        replace(world, leases=3), {0: requests}, {}, make=watching(fcfs, look)
    )
    assert_answers(world, requests, inbox, set(), set())
    assert max(leased) == 9
    assert len(planned) < 20 < scheduler.totals.steps
    assert scheduler.totals.output_tokens >= 120  # those of steps in flight at an end are counted


def test_rows_are_leased_while_others_wait_for_one():
    """Five requests, and blocks for hardly more than two: a lease ends before a sequence does."""
    world = World((GroupSpec("full", 4, 9),), Limits(2, 32, 18, lease_steps=9), 1, leases=9)
    leased = []
    requests = [Request(i, (i + 1,) * 3, SamplingParams(max_tokens=10 + i)) for i in range(5)]
    ready = watching(fcfs, lambda _, plan: leased.append(plan.lease))
    found, inbox, scheduler = run(world, {0: requests}, {}, make=ready)
    assert_answers(world, found, inbox, set(), set())
    assert sum(lease > 0 for lease in leased) > 5
    assert scheduler.totals.preemptions == 0


def run_rounds(loop: EngineLoop, rounds: int) -> None:
    for _ in range(rounds):
        loop.step()


def test_drafts_are_taken_where_they_come_out_right():
    """A text of one token repeats for ever: each step gives as many tokens as were drafted."""
    world = World((GroupSpec("full", 4, 40),), Limits(4, 32, 150), 1, vocab=1)
    request = Request(0, (0,) * 8, SamplingParams(max_tokens=100, speculation=8))
    requests, inbox, scheduler = run(world, {0: [request]}, {})
    assert_answers(world, requests, inbox, set(), set())
    totals = scheduler.totals
    assert totals.drafted_tokens == totals.accepted_tokens > 70
    assert totals.output_tokens == 100
    assert totals.steps < 28  # seven of them until it has shown that it pays


def test_a_pipeline_waits_for_tokens_after_drafts_that_were_wrong():
    """Its first stage does not know a token before it is told of it."""
    groups = (GroupSpec("full", 4, 800),)
    world = World(groups, Limits(8, 32, 150, groups=2), 2, vocab=2)

    def look(scheduler, _):
        for sequence in scheduler._launched[-1].sequences:
            assert sequence.planned <= len(sequence.tokens)

    sampling = SamplingParams(max_tokens=100, speculation=3)
    prompts = [tuple((i >> bit) & 1 for bit in range(3)) * 3 for i in range(6)]
    requests = [Request(i, prompt, sampling) for i, prompt in enumerate(prompts)]
    requests, inbox, scheduler = run(world, {0: requests}, {}, make=watching(fcfs, look))
    assert_answers(world, requests, inbox, set(), set())
    totals = scheduler.totals
    assert totals.drafted_tokens > totals.accepted_tokens


def test_drafts_that_fail_become_rare():
    """Text in which runs repeat that are long enough for a draft, and go on differently."""
    drafter, tokens, drafted = NgramDrafter(8, start=50), [], []
    for i in range(4000):
        tokens += [1, 2, 3, 4, 5, 6, 7, 100 + i]
    at = 50
    while at < len(tokens):
        draft = drafter.propose(tokens[:at], 8)
        at += 1
        if draft:
            taken = next((j for j, t in enumerate(draft) if t != tokens[at - 1 + j]), len(draft))
            drafted.append(at)
            at += taken + drafter.learn(len(draft), taken)
        else:
            at += drafter.searched_in_vain()
    late = [at for at in drafted if at > len(tokens) // 2]
    assert drafted
    assert len(late) < len(tokens) / 2 / 5


def test_the_index_of_drafts_is_bounded_and_filled_bit_by_bit():
    drafter, tokens = (
        NgramDrafter(4),
        [i % 50_000 for i in range(100_000)] + list(range(40_000, 40_008)),
    )
    calls = 0
    while not (draft := drafter.propose(tokens, 4)):
        calls += 1
        assert len(drafter._after) <= 2 * 1024 * calls
        assert calls < 40
    assert calls >= REMEMBERED // 1024 - 1
    assert draft == (40_008, 40_009)


def test_the_property_test_can_fail():
    """A cache that shares blocks it should not is caught by the modelled executor."""

    class Forgetful(KVCache):
        def open(self, sequence_id, hit, loaded=0):
            super().open(sequence_id, hit, loaded)
            if hit:
                (wrong,) = self.pools[0].allocate(1)
                table = self._tables[sequence_id].blocks[0]
                self.pools[0].release(table[-1])
                table[-1] = wrong

    world = World((GroupSpec("full", 2, 40),), Limits(4, 16, 30), 0)
    cache = Forgetful(world.groups)
    scheduler = fcfs(cache, world.limits)
    executor = ModelledExecutor(world.groups, VOCAB)
    request = [Request(i, tuple(range(1, 10)), SamplingParams(max_tokens=3)) for i in range(2)]
    inbox = ScriptedInbox({0: request[:1], 20: request[1:]}, {})
    loop = EngineLoop(scheduler, executor, inbox, VirtualClock())
    with pytest.raises(InvariantError, match="reads"):
        run_rounds(loop, 40)
