"""Piggybacked rows: their tokens pass the layers with later steps, exactly, and none is lost."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial

import pytest
from costs import LinearCost
from hypothesis import given
from hypothesis import strategies as st
from traffic import COMMON, World, assert_answers, ids, plans, run, traffic, watching, worlds

from depth import searching
from weft.core.errors import InvariantError
from weft.core.types import Request, SamplingParams, ServiceClass
from weft.cost.host_costs import CarryCost
from weft.cost.work import Work
from weft.kv.cache import GroupSpec
from weft.kv.tiers import TieredCache
from weft.sched.pace import Pace
from weft.sched.registry import slo_piggyback
from weft.sched.resources import TargetPolicy
from weft.sched.scheduler import Limits
from weft.sim.piggyback import Piggyback

CLASSES = [ServiceClass("priority", 0, tpot_s=0.05), ServiceClass("interactive", 1),
           ServiceClass("batch", 3)]  # fmt: skip
LAYERS = 3


def piggyback(slowest_s: float, seed: int, hosts: int) -> Piggyback:
    """Results come back after random times, up to ``slowest_s`` steps."""
    draw = random.Random(seed)
    room = draw.choice([0.0, 40.0, math.inf])
    return Piggyback(LAYERS, lambda _: draw.uniform(0.0, slowest_s), hosts, 0.01, room)


@st.composite
def cases(draw):
    """A world with a host, its traffic, and a scheduler whose target leaves room or does not."""
    world = draw(worlds(tight=draw(st.booleans())))
    share = draw(st.sampled_from([0.3, 1, 4]))
    speed = draw(st.sampled_from([0.0, 0.4, 3.0]))
    piggybacking = partial(piggyback, speed, draw(st.integers(0, 9)), draw(st.integers(1, 3)))
    world = replace(
        world,
        host_blocks=tuple(max(1, int(share * group.num_blocks)) for group in world.groups),
        piggyback=piggybacking,
    )
    token_s = draw(st.sampled_from([0.001, 0.01, 0.02]))
    move_s = draw(st.sampled_from([0.0, 0.001]))
    cost = LinearCost(0.01, token_s, layers=LAYERS, move_s=move_s)
    targets = TargetPolicy("off", 0.0, draw(st.sampled_from([0.0, 0.05, 1e9])))
    make = partial(slo_piggyback, cost=cost, classes=CLASSES, targets=targets)
    return world, draw(traffic(world)), make, draw(st.sampled_from([0.0, 0.02]))


@searching(400, **COMMON)
@given(cases())
def test_random_traffic_is_answered_exactly(case):
    world, (arrivals, cancels), make, step_s = case
    requests, inbox, _ = run(world, arrivals, cancels, make=make, step_s=step_s)
    assert_answers(world, requests, inbox, ids(cancels), set())


@searching(120, **COMMON)
@given(cases(), st.sets(st.integers(0, 13), max_size=4), st.integers(1, 40))
def test_a_faulty_row_ends_alone(case, bad, at):
    world, (arrivals, cancels), make, step_s = case

    def faulty(sequence, length):
        return sequence in bad and length >= at

    requests, inbox, _ = run(world, arrivals, cancels, faulty, make, step_s)
    assert_answers(world, requests, inbox, ids(cancels), bad)


def closing_soon(make, depth: int):
    """Schedulers that fail if an ended sequence keeps its row for more than a step or two."""

    def made(cache, limits):
        scheduler = make(cache, limits)
        commit, commits = scheduler.commit, Counter()

        def watched(result, now=0.0):
            news = commit(result, now)
            closing = [s.id for s in scheduler.sequences.closing]
            commits.update(closing)
            for gone in set(commits) - set(closing):
                del commits[gone]
            assert max(commits.values(), default=0) <= depth + 2
            return news

        scheduler.commit = watched
        return scheduler

    return made


@searching(200, **COMMON)
@given(cases(), st.integers(1, 9))
def test_a_piggybacked_row_that_ends_on_its_way_gives_back_its_row_at_once(case, often):
    """However slow the host is."""
    world, (arrivals, cancels), make, step_s = case
    numbers = [request.id for batch in arrivals.values() for request in batch]
    last = max(arrivals)
    cancels = dict(cancels)
    for at, number in enumerate(numbers[::2]):
        cancels.setdefault(last + often * (at + 1), []).append(number)
    make = closing_soon(make, world.depth)
    requests, inbox, _ = run(world, arrivals, cancels, make=make, step_s=step_s)
    assert_answers(world, requests, inbox, ids(cancels), set())


def test_piggybacked_rows_whose_host_never_answers_can_be_cancelled():
    world, arrivals, make = crowded()
    world = replace(world, piggyback=partial(Piggyback, LAYERS, lambda _: 1e9))
    plans_seen = []
    watched = watching(closing_soon(make, world.depth), lambda _, plan: plans_seen.append(plan))
    run(world, arrivals, {40: list(range(6))}, make=watched, step_s=0.05)
    assert sum(len(plan.abort) for plan in plans_seen) > 0
    assert all(plan.piggybacks for plan in plans_seen if plan.abort)


def test_a_host_that_never_answers_holds_up_nobody_however_slow_steps_seem():
    """Where not even one token seems to keep the limit, the device computes one all the same."""
    world, arrivals, make = crowded()
    world = replace(world, piggyback=partial(Piggyback, LAYERS, lambda _: 1e9))
    plans_seen = []

    def pessimistic(cache, limits):
        scheduler = make(cache, limits)
        for ratio in scheduler.policy.pace._ratios.values():
            ratio.learn = lambda *_: None
            ratio.value = 100.0
        return scheduler

    watched = watching(pessimistic, lambda _, plan: plans_seen.append(plan))
    run(world, arrivals, {250: list(range(6))}, make=watched, step_s=0.05)
    first = next(i for i, plan in enumerate(plans_seen) if plan.piggybacked)
    beside = [plan for plan in plans_seen[first:] if plan.batches]
    assert sum(plan.num_tokens for plan in beside) > 500


def test_best_effort_of_the_host_leaves_rows_to_targets():
    """Also where nothing runs on the device: a row whose token is on its way gives none up."""
    groups = (GroupSpec("full", 4, 40),)
    world = World(groups, Limits(16, 16, 60), 1, host_blocks=(400,),
                  piggyback=partial(Piggyback, LAYERS, lambda _: 1e9))  # fmt: skip
    make = partial(slo_piggyback, cost=LinearCost(0.01, 0.001, layers=LAYERS), classes=CLASSES,
                   targets=TargetPolicy("off", 0.0, 1e9))  # fmt: skip
    sampling = SamplingParams(max_tokens=40)
    batch = [Request(i, tuple(range(i, i + 9)), sampling, (), "batch") for i in range(40)]
    urgent = Request(99, (1, 2, 3), SamplingParams(max_tokens=3), (), "priority")
    begun = []

    def look(scheduler, plan):
        begun.extend((add.sequence_id, len(scheduler.memory.hosted)) for add in plan.add)

    cancels = {500: list(range(40))}
    run(world, {0: batch, 400: [urgent]}, cancels, make=watching(make, look), step_s=0.05)
    assert [0 < hosted <= 14 for number, hosted in begun if number == 99] == [True]


def test_an_aborted_piggybacked_row_frees_its_row_and_leaves_the_others_their_order():
    piggybacked = Piggyback(1, lambda _: 0.01)
    for row in range(3):
        piggybacked.keep(row, 10)
    piggybacked.begin(dict.fromkeys(range(3), 10), at_s=0.0)
    piggybacked.abort(1, 0.0)
    piggybacked.abort(1, 0.0)
    piggybacked.give_up(1)
    assert piggybacked.in_layers == (2,)
    assert piggybacked.piggyback(1.0, 1.0, (9,)).finished == [0, 2]


@searching(60, **COMMON)
@given(cases())
def test_equal_inputs_give_equal_plans(case):
    world, (arrivals, cancels), make, step_s = case
    first = plans(world, arrivals, cancels, make, step_s)
    assert first == plans(world, arrivals, cancels, make, step_s)


def crowded(patience_s: float = 1e9):
    """Prompts with a target fill every step, so that all best-effort decodes piggyback."""
    groups = (GroupSpec("full", 4, 200),)
    world = World(
        groups, Limits(32, 64, 60), 1, host_blocks=(400,), piggyback=partial(piggyback, 0.4, 1, 2)
    )
    cost = LinearCost(0.01, 0.001, layers=LAYERS, move_s=1e-5)
    make = partial(slo_piggyback, cost=cost, classes=CLASSES,
                   targets=TargetPolicy("off", 0.0, patience_s))  # fmt: skip
    arrivals = {0: [Request(i, tuple(range(i, i + 9)), SamplingParams(max_tokens=40), (), "batch")
                    for i in range(6)]}  # fmt: skip
    for turn in range(2, 60):
        prompt = tuple((turn + i) % 50 for i in range(35))
        sampling = SamplingParams(max_tokens=3)
        arrivals[turn] = [Request(100 + turn, prompt, sampling, (), "priority")]
    return world, arrivals, make


def test_best_effort_piggybacks_where_targets_fill_every_step():
    world, arrivals, make = crowded()
    steps = []
    watched = watching(make, lambda _, plan: steps.append(plan))
    requests, inbox, _ = run(world, arrivals, {}, make=watched, step_s=0.05)
    assert_answers(world, requests, inbox, set(), set())
    assert sum(len(plan.piggybacked) for plan in steps) > 40
    assert all(
        plan.piggyback_limits and min(plan.piggyback_limits) >= 1
        for plan in steps
        if plan.piggybacked
    )
    assert {move.to for plan in steps for move in plan.moves} == {"host", "device"}


@dataclass(frozen=True)
class Reading(LinearCost):
    """Reading the weights hides so many tokens of a step."""

    hidden: int = 16
    piggyback_row_s: float = 0.0
    piggyback_step_s: float = 0.0

    def terms(self, work):
        carry = CarryCost(self.piggyback_step_s, self.piggyback_row_s)
        terms = LinearCost.terms(self, work)
        terms = terms._replace(piggybacked=carry.seconds(work.piggyback_layers))
        if not work.tokens:
            return terms
        return terms._replace(dense=self.step_s + self.token_s * max(0, work.tokens - self.hidden))


@pytest.mark.parametrize(
    ("targets", "piggyback_row_s", "piggyback_step_s"),
    [(0, 0.0, 0.0), (30, 0.0, 0.0), (30, 1e-4, 0.0), (30, 1e-4, 2e-3)],
)
def test_piggybacked_rows_are_priced_with_what_the_step_has_in_the_end(
    targets, piggyback_row_s, piggyback_step_s
):
    """Reading the weights is counted once, as is what any step with such rows costs, and a
    piggybacked row beside a long prompt is not for nothing.
    """
    world, arrivals, _ = crowded()
    cost = Reading(
        0.01, 0.001, layers=LAYERS, move_s=1e-5, piggyback_row_s=piggyback_row_s,
        piggyback_step_s=piggyback_step_s,
    )  # fmt: skip
    late = {turn: asked for turn, asked in arrivals.items() if turn > 30 + targets}
    arrivals = {turn: asked for turn, asked in arrivals.items() if turn <= 30}
    arrivals |= {turn: [replace(each, service_class="batch") for each in asked]
                 for turn, asked in late.items()}  # fmt: skip
    found = []

    def watched(cache, limits):
        scheduler = slo_piggyback(cache, limits, cost, CLASSES, TargetPolicy("off", 0.0, 1e9))
        (part,), fill = scheduler.parts, scheduler.policy.fill
        scheduler.policy.pace.surplus.learn = lambda _: None

        def note(now):
            step = fill(now)
            if step is not None and part._piggybacking:
                alone = cost.terms(step.work).linear
                more = [cost.terms(Work(tokens=step.work.tokens + cap)).linear - alone
                        + cap * piggyback_row_s * LAYERS for cap in part._caps]  # fmt: skip
                least = sum(s for s, cap in zip(more, part._caps, strict=True) if cap > 1)
                rows_s = step.beside_s - piggyback_step_s
                assert least / LAYERS - 1e-9 <= rows_s <= sum(more) / LAYERS + 1e-9
                found.append((step.work.tokens, step.beside_s))
            return step

        scheduler.policy.fill = note
        return scheduler

    run(world, arrivals, {}, make=watched, step_s=0.05)
    assert any(tokens > 16 and beside_s for tokens, beside_s in found)


class Piggybacking:
    """Does something beside every step that takes so long by prediction."""

    def __init__(self, beside_s: float) -> None:
        self.beside_s = beside_s

    def busy(self) -> bool:
        return True

    def before_best_effort(self, step, *_) -> None:
        step.beside_s = self.beside_s

    def after_best_effort(self, _step) -> tuple[int, ...]:
        return ()

    def may_begin(self, fits: bool) -> bool:
        return fits


def test_what_carried_rows_add_is_no_slowness_of_the_device():
    """Steps that carry rows take twice as long: their surplus is learned, and others keep pace."""
    pace, now = Pace(prior_s=0.03), 1.0
    pace.urgent = True
    for number in range(60):
        pace.launched(0.012, now, carries=number % 2 == 0, beside_s=0.002 * (number % 2 == 0))
        now += 0.02 if number % 2 == 0 else 0.012
        pace.collected(now)
    assert pace.correction == pytest.approx(1.0)
    assert pace.surplus.value == pytest.approx(0.01, rel=0.03)
    for _ in range(60):  # moves have a cost of their own
        pace.launched(0.01, now, moves=True)
        now += 0.05
        pace.collected(now)
    assert pace.correction == pytest.approx(1.0)


@pytest.mark.parametrize("surplus_s", [0.0, 0.02])
def test_rows_that_break_a_target_wait_for_steps_without_one(surplus_s):
    world, arrivals, make = crowded()
    carried: Counter[bool] = Counter()

    def costly(cache, limits):
        scheduler = make(cache, limits)
        surplus = scheduler.policy.pace.surplus
        surplus.learn(surplus_s)
        surplus.learn, surplus.fade = lambda _: None, lambda: None
        return scheduler

    def look(scheduler, plan):
        if scheduler.policy.pace.urgent and plan.batches:
            carried[bool(plan.piggyback_limits)] += 1

    run(world, arrivals, {}, make=watching(costly, look), step_s=0.05)
    assert sum(carried.values()) > 40
    assert carried[True] == 0 if surplus_s else carried[True] > 20


@pytest.mark.parametrize("carry_step_s", [0.0, 0.02])
def test_rows_whose_measured_cost_breaks_a_target_wait_for_steps_without_one(carry_step_s):
    world, arrivals, _ = crowded()
    cost = Reading(0.01, 0.001, layers=LAYERS, move_s=1e-5, piggyback_step_s=carry_step_s)
    carried: Counter[bool] = Counter()

    def measured(cache, limits):
        scheduler = slo_piggyback(cache, limits, cost, CLASSES, TargetPolicy("off", 0.0, 1e9))
        scheduler.policy.pace.surplus.learn = lambda _: None
        return scheduler

    def look(scheduler, plan):
        if scheduler.policy.pace.urgent and plan.batches:
            carried[bool(plan.piggyback_limits)] += 1

    run(world, arrivals, {}, make=watching(measured, look), step_s=0.05)
    assert carried[False] > 20
    assert carried[True] == 0 if carry_step_s else carried[True] > 0


def test_a_surplus_that_holds_rows_back_is_tried_again():
    """It was slowness of another kind: once it has faded, rows are carried and it is known."""
    world, arrivals, make = crowded()
    carried = []

    def misled(cache, limits):
        scheduler = make(cache, limits)
        scheduler.policy.pace.surplus.learn(0.004)
        return scheduler

    watched = watching(misled, lambda _, plan: carried.append(bool(plan.piggyback_limits)))
    run(world, arrivals, {}, make=watched, step_s=0.05)
    assert carried.index(True) > 6, carried


def test_the_wait_for_the_host_is_no_slowness_of_the_device():
    cost = LinearCost(0.01, 0.0, layers=LAYERS)
    cache = TieredCache((GroupSpec("full", 4, 20),), (20,))
    scheduler = slo_piggyback(cache, Limits(4, 16, 32), cost, CLASSES)
    policy, now = scheduler.policy, 1.0
    policy.part = Piggybacking(0.0175)
    for _ in range(60):
        step = policy.fill(now)
        assert step is not None
        assert not step.rows
        now += 0.06
        policy.collected(now)
        assert policy.pace.correction == 1.0
    assert policy.pace.ends_at(now) == now


def test_a_piggybacked_row_comes_a_layer_further_with_each_step():
    piggybacked = Piggyback(4, lambda context: 0.001 * context)
    piggybacked.keep(7, 100)
    piggybacked.begin({7: 100}, at_s=0.0)
    carried = [piggybacked.piggyback(float(step), 1.0, (1,) * 4) for step in range(4)]
    # attention takes 100 ms and a layer 250 ms, so one step carries it through several layers
    assert carried[0].by_layer == [1, 1, 1, 1]
    assert carried[0].finished == [7]
    piggybacked.begin({7: 300}, at_s=4.0)
    carried = [piggybacked.piggyback(4.0 + step, 1.0, (1,) * 4) for step in range(4)]
    # 300 ms are longer than a layer: back too late for this step, in time for the next one
    assert [each.by_layer for each in carried] == [
        [0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0],
    ]  # fmt: skip
    assert piggybacked.piggyback(8.0, 1.0, (1,) * 4).finished == [7]


def test_caps_hold_results_back_in_their_order():
    piggybacked = Piggyback(2, lambda _: 0.01)
    for row in range(4):
        piggybacked.keep(row, 10)
    piggybacked.begin(dict.fromkeys(range(4), 10), at_s=0.0)
    assert piggybacked.piggyback(1.0, 1.0, (2, 9)).by_layer == [2, 2]
    assert piggybacked.piggyback(2.0, 1.0, ()).by_layer == [0, 0]
    assert piggybacked.piggyback(3.0, 1.0, (9, 1)).by_layer == [2, 1]
    assert len(piggybacked) == 1
    assert piggybacked.in_layers == (0, 1)


def test_hosts_share_the_work_and_a_row_on_its_way_stays():
    alone, many = (Piggyback(1, lambda _: 1.0, hosts, room=10) for hosts in (1, 4))
    for piggybacked in (alone, many):
        for row in range(4):
            piggybacked.keep(row, 10)
        piggybacked.begin(dict.fromkeys(range(4), 10), at_s=0.0)
    assert len(many.piggyback(1.0, 0.6, (9,)).finished) == 4
    assert alone.piggyback(1.0, 2.9, (9,)).finished == [], "one call: all come back together"
    with pytest.raises(InvariantError, match="on its way"):
        alone.give_up(3)
    assert alone.piggyback(3.9, 0.1, (9,)).finished == [0, 1, 2, 3]
    many.give_up(3)


def test_the_own_host_is_filled_first_and_only_the_others_are_far():
    piggybacked = Piggyback(1, lambda _: 1.0, 3, latency_s=0.5, room=25)
    for row in range(6):
        piggybacked.keep(row, 10)  # 0 and 1 here, then 2 and 4 on one host, 3 and 5 on the other
    piggybacked.begin(dict.fromkeys((1, 2, 3), 10), at_s=0.0)
    assert piggybacked.piggyback(0.0, 1.2, (9,)).finished == [1]
    assert piggybacked.piggyback(1.2, 0.4, (9,)).finished == [2, 3]
