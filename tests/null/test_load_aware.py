"""Load-aware scheduling: placement on device and host, by hand."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from functools import partial

import pytest
from costs import LinearCost
from traffic import World, assert_answers, run

from weft.core.errors import ConfigError, OutOfMemoryError
from weft.core.plan import StepPlan, Tier
from weft.core.types import Request, SamplingParams
from weft.cost.work import Work
from weft.kv.cache import GroupSpec, KVCache
from weft.kv.tiers import TieredCache
from weft.sched.balance import Balance, HostWork
from weft.sched.registry import fcfs, load_aware, make_scheduler
from weft.sched.resources import Resources
from weft.sched.scheduler import Limits, Scheduler
from weft.sched.two_batch import PATIENCE, TwoBatch
from weft.sim.executor import ModelledExecutor

HALVES = LinearCost(10.0, 0.01, host_context_s=0.001)  # a second step of the weights pays soon
SLOW_HOST = LinearCost(10.0, 0.01, host_context_s=1000.0)


def requests(count: int, prompt: int = 12, output: int = 20, **more) -> list[Request]:
    return [
        Request(
            i,
            tuple((i * 31 + j) % 97 for j in range(prompt)),
            SamplingParams(max_tokens=output),
            **more,
        )
        for i in range(count)
    ]


def planned(scheduler, executor, after=repr) -> list[StepPlan]:
    """Run until nothing is left, calling ``after`` with each committed plan; return the plans."""
    seen, tickets = [], deque()
    while (plan := scheduler.plan(0.0)) is not None or tickets:
        if plan is not None:
            seen.append(plan)
            tickets.append(executor.launch(plan))
        scheduler.commit(tickets.popleft().result())
        scheduler.check()
        after(seen[-1])
    assert scheduler.idle
    return seen


def served(cost, blocks=16, host=200, count=8, budget=64, longest=64, **more) -> list[StepPlan]:
    """Plans for requests of which about two fit onto the device."""
    groups = (GroupSpec("full", 4, blocks),)
    scheduler = load_aware(TieredCache(groups, (host,)), Limits(16, budget, longest), cost)
    for request in requests(count, **more):
        scheduler.add(request)
    return planned(scheduler, ModelledExecutor(groups, 97, host_blocks=(host,)))


def host_rows(plan: StepPlan) -> int:
    return sum(tier is Tier.HOST for batch in plan.batches for tier in batch.tiers)


# -- the choice -------------------------------------------------------------------------------

BASE = Work(tokens=4, sampled=4, decodes=4, decode_context=400)


def chosen(cost, contexts, pieces=(), budget=100, base=BASE, least=(0, 0)):
    return Balance(cost, 100).choose(base.copy(), HostWork(contexts, pieces, budget), least)


def test_two_sub_batches_hide_the_host_behind_the_layers_of_the_other():
    choice = chosen(LinearCost(10, 0, host_context_s=1e-2), [100] * 40)
    # one decode takes 1 s: ten hide behind each sub-batch's ten seconds
    assert (len(choice.first), len(choice.second)) == (10, 10)
    assert choice.seconds == pytest.approx(20)


def test_one_sub_batch_is_better_where_the_host_is_fast():
    choice = chosen(LinearCost(10, 0, host_context_s=1e-5), [100] * 40)
    assert (len(choice.first), len(choice.second)) == (40, 0)


def test_what_the_device_can_do_faster_stays_out():
    choice = chosen(LinearCost(10, 0, host_context_s=1.0), [100] * 40)
    assert choice == (0, (), (), 10.0, 1.0)


def test_what_must_go_along_does():
    choice = chosen(LinearCost(10, 0, host_context_s=1.0), [100] * 40, least=(1, 0))
    assert choice.first + choice.second == (0,)


@pytest.mark.parametrize("place", [0, 7, 40])
def test_a_decode_that_is_too_long_is_skipped_and_holds_up_none_behind_it(place):
    contexts = [100] * 40
    contexts.insert(place, 60_000)
    cost = LinearCost(10, 0, host_context_s=1e-2)
    choice, without = chosen(cost, contexts), chosen(cost, [100] * 40)
    assert choice[3:] == without[3:]
    assert (len(choice.first), len(choice.second)) == (10, 10)
    assert place not in choice.first + choice.second


def test_of_lengths_that_do_not_fit_together_later_ones_fill_the_rest():
    choice = chosen(LinearCost(10, 0, host_context_s=1e-2), [600, 500, 300, 200, 100, 90])
    assert choice.second == (0, 2, 4)  # 10 s of one second for 100 tokens
    assert choice.first == (1, 3, 5)


def test_what_must_go_along_is_the_oldest_however_long_it_is():
    cost = LinearCost(10, 0, host_context_s=1e-2)
    choice = chosen(cost, [60_000] + [100] * 40, least=(1, 0))
    assert 0 in choice.first + choice.second


@pytest.mark.parametrize("host_s", [1e-5, 1e-3, 4e-3, 1e-2])
@pytest.mark.parametrize("chunk", [0, 50])
def test_one_sub_batch_never_waits_longer_for_the_host_than_its_layers_take(host_s, chunk):
    cost = LinearCost(1, 0.1, context_s=1e-3, host_context_s=host_s)
    pieces = [(0, chunk)] if chunk else []
    choice = chosen(cost, [400] * 60, pieces, budget=100)
    work = BASE.copy()
    if choice.chunk:
        work.add(0, choice.chunk)
    terms = cost.terms(work)
    assert choice.second or 400 * host_s * len(choice.first) <= max(terms.dense, terms.attention)


def test_with_nothing_on_the_device_the_host_goes_on_as_it_can():
    choice = chosen(LinearCost(1, 0, host_context_s=1.0), [400] * 3, base=Work())
    assert choice.first


def test_prompts_for_the_host_are_cut_to_what_covers_batch_1():
    """A chunk that costs time is worth it only as long as it hides attention on the host."""
    cost = LinearCost(10, 1.0, host_context_s=1e-2)
    with_all = chosen(cost, [100] * 20, pieces=[(0, 60)], budget=80)
    assert with_all.second
    assert 14 + with_all.chunk >= len(
        with_all.second
    )  # the linear part of batch 0 covers batch 1 ...
    assert with_all.chunk < 60  # ... and not more
    free = Balance(cost, 100).free_tokens
    assert with_all.chunk in (free - 4, len(with_all.second) - 14)


def test_a_prompt_that_fits_beside_the_decodes_for_nothing_goes_along():
    cost = LinearCost(0, 1e-3, context_s=0, host_context_s=1.0)

    class Flat(LinearCost):
        def terms(self, work):
            terms = super().terms(work)
            return terms._replace(dense=max(terms.dense, 0.05 if work.tokens else 0.0))

    assert chosen(cost, [], pieces=[(0, 60)]).chunk == 0
    flat = Flat(0, 1e-3, host_context_s=1.0)
    assert Balance(flat, 100).free_tokens == pytest.approx(50, abs=1)
    assert chosen(flat, [], pieces=[(0, 60)]).chunk == Balance(flat, 100).free_tokens - 4


# -- the scheduler ----------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_sequences_beyond_the_device_decode_on_the_host(depth):
    world = World((GroupSpec("full", 4, 16),), Limits(16, 64, 64), depth, host_blocks=(200,))

    def make(cache, limits):
        return load_aware(cache, limits, HALVES)

    asked = {0: requests(8)}
    requests_, inbox, scheduler = run(world, asked, {}, make=make)
    assert_answers(world, requests_, inbox, set(), set())
    assert scheduler.totals.preemptions == 0
    steps = served(HALVES)
    alone = planned(fcfs := queued_fcfs(), ModelledExecutor((GroupSpec("full", 4, 16),), 97))
    assert fcfs.totals.steps == len(alone)
    assert len(steps) < len(alone) * 2 / 3
    assert any(host_rows(plan) > 1 for plan in steps)


def test_a_host_that_is_slow_or_stopped_is_asked_less_and_is_no_slowness_of_the_device():
    def plans(late_s: float) -> list[StepPlan]:
        groups, now = (GroupSpec("full", 4, 16),), 1.0
        scheduler = load_aware(TieredCache(groups, (200,)), Limits(16, 64, 64), HALVES)
        executor, found = ModelledExecutor(groups, 97, host_blocks=(200,)), []
        for request in requests(8):
            scheduler.add(request)
        while (plan := scheduler.plan(now)) is not None:
            found.append(plan)
            now += 10.0 + (late_s if host_rows(plan) else 0.0)
            scheduler.commit(executor.launch(plan).result(), now)
        assert scheduler.idle
        return found

    def joined(plans: list[StepPlan]) -> int:
        return sum(host_rows(plan) > 0 for plan in plans)

    in_time, late, stopped = plans(0.0), plans(20.0), plans(1e4)
    assert joined(in_time[: len(in_time) // 2]) > 3
    assert joined(stopped) <= joined(late) < joined(in_time) / 2
    alone = planned(queued_fcfs(), ModelledExecutor((GroupSpec("full", 4, 16),), 97))
    assert len(stopped) <= len(alone)


@pytest.mark.parametrize("host_only", [False, True])
def test_a_slow_host_that_has_passed_its_oldest_over_takes_newcomers_when_it_is_empty(host_only):
    groups, now = (GroupSpec("full", 4, 16),), 1.0
    given = TieredCache(groups, (200,)), Limits(16, 64, 64), HALVES
    scheduler = load_aware(*given, host_only=host_only)
    executor = ModelledExecutor(groups, 97, depth=1, host_blocks=(200,))
    launched = deque()
    *pair, late = requests(3)
    for request, tokens in zip(pair, (12, 13), strict=True):
        scheduler.add(replace(request, sampling=SamplingParams(max_tokens=tokens)))
    came = False
    for _ in range(400):
        if scheduler.idle and not came:
            scheduler.add(late)
            came = True
        plan = scheduler.plan(now)
        if plan is not None:
            launched.append((plan, executor.launch(plan)))
        if launched and (plan is None or len(launched) == 2):
            done, result = launched.popleft()
            now += 40.0 if host_rows(done) else 10.0
            scheduler.commit(result.result(), now)
    assert came
    assert scheduler.idle


def queued_fcfs(blocks: int = 16, count: int = 8) -> Scheduler:
    scheduler = fcfs(KVCache((GroupSpec("full", 4, blocks),)), Limits(16, 64, 64))
    for request in requests(count):
        scheduler.add(request)
    return scheduler


def test_with_room_on_the_device_it_plans_as_first_come_first_served():
    def without_host(plan: StepPlan):
        return plan.batches, plan.add, plan.extend, plan.drop

    alone = planned(queued_fcfs(200), ModelledExecutor((GroupSpec("full", 4, 200),), 97))
    both = served(HALVES, blocks=200)
    assert [without_host(plan) for plan in both] == [without_host(plan) for plan in alone]
    assert not any(plan.needs_host for plan in both)


def test_an_error_that_all_predictions_share_changes_nothing():
    """It weighs times against each other only, so a correction by measured steps would be idle."""
    slower = LinearCost(80.0, 0.08, host_context_s=0.008)  # 8 times HALVES, without rounding
    assert served(HALVES) == served(slower)
    assert served(HALVES) != served(SLOW_HOST)


def test_the_newest_leave_and_the_oldest_come_back():
    """Three short prompts fit, their answers do not."""
    steps = served(SLOW_HOST, blocks=15, count=3, output=30)
    adds = {add.row: add.sequence_id for plan in steps for add in plan.add}
    moves = [(adds[move.row], move.to) for plan in steps for move in plan.moves]
    out = [sequence for sequence, to in moves if to is Tier.HOST]
    back = [sequence for sequence, to in moves if to is Tier.DEVICE]
    assert out[0] == 2
    assert 0 not in out
    assert back == sorted(back)
    assert back


def test_on_a_slow_host_the_oldest_goes_on_when_that_is_little_of_what_it_has_waited():
    """A token costs the host six tenths of a step more than it is worth, so 60 steps pay for it."""
    cost = LinearCost(10.0, 0.01, host_context_s=0.03)
    steps = served(cost, blocks=162, count=3, output=300, longest=320)
    counts = [host_rows(plan) for plan in steps]
    at = [step for step, count in enumerate(counts) if count]
    left = next(i for i, plan in enumerate(steps) if plan.moves)
    assert max(counts) == 1
    assert len(at) == 1
    assert left + PATIENCE < at[0]


def test_a_long_sequence_of_the_host_is_overtaken_but_goes_on():
    """No step hides its attention of 15 seconds; the short ones behind it take about one each."""
    cost = LinearCost(10.0, 0.01, host_context_s=0.075)
    groups = (GroupSpec("full", 4, 100),)
    scheduler = load_aware(TieredCache(groups, (400,)), Limits(16, 400, 400), cost)
    first, long, *others = requests(16, output=100)
    first = replace(first, prompt=tuple(range(180)), sampling=SamplingParams(max_tokens=215))
    for request in (first, replace(long, prompt=tuple(range(200))), *others):
        scheduler.add(request)
    steps = planned(scheduler, ModelledExecutor(groups, 97, host_blocks=(400,)))
    row = next(add.row for plan in steps for add in plan.add if add.sequence_id == 1)
    alone, along = [], []
    for plan in steps:
        hosted = {
            each
            for batch in plan.batches
            for each, tier in zip(batch.rows, batch.row_tiers, strict=True)
            if tier is Tier.HOST
        }
        if hosted:
            (along if row in hosted else alone).append(plan.step_id)
    assert along
    assert min(alone) < along[0]


def test_a_host_that_is_far_too_slow_keeps_what_left_until_there_is_room_again():
    steps = served(SLOW_HOST, blocks=15, count=3, output=30)
    assert not any(host_rows(plan) for plan in steps)
    assert any(move.to is Tier.DEVICE for plan in steps for move in plan.moves)


def test_lower_classes_leave_for_higher_ones_and_are_not_computed_again():
    groups = (GroupSpec("full", 4, 16),)
    scheduler = load_aware(TieredCache(groups, (99,)), Limits(16, 64, 64), SLOW_HOST)
    executor = ModelledExecutor(groups, 97, host_blocks=(99,))
    for request in requests(3, prompt=16, service_class="batch"):
        scheduler.add(request)
    late = [Request(9, tuple(range(20)), SamplingParams(max_tokens=20), service_class="priority")]

    def arrive(plan: StepPlan) -> None:
        if plan.step_id >= 3 and late:
            scheduler.add(late.pop())

    steps = planned(scheduler, executor, arrive)
    first = next(plan.step_id for plan in steps for add in plan.add if add.sequence_id == 9)
    assert first <= 6
    assert any(move.to is Tier.HOST for plan in steps[: first + 1] for move in plan.moves)
    assert scheduler.totals.preemptions == 0


@pytest.mark.parametrize("cost", [HALVES, SLOW_HOST])
def test_equal_requests_of_a_class_end_about_in_the_order_of_their_arrival(cost):
    groups = (GroupSpec("full", 4, 24),)
    scheduler = load_aware(TieredCache(groups, (400,)), Limits(32, 64, 64), cost)
    for request in requests(24):
        scheduler.add(request)
    ended: list[int] = []
    known = set(range(24))

    def note(_: StepPlan) -> None:
        gone = sorted(known - set(scheduler.sequences.by_id))
        ended.extend(gone)
        known.difference_update(gone)

    planned(scheduler, ModelledExecutor(groups, 97, host_blocks=(400,)), note)
    running_at_once = 16
    assert all(abs(place - number) <= running_at_once for place, number in enumerate(ended))
    assert sum(abs(place - number) for place, number in enumerate(ended)) / 24 < 4


def test_plans_without_rows_do_not_count_as_steps_that_take_no_time():
    """One with drafts is planned only when its last token has come: every second time here."""
    world = World((GroupSpec("full", 4, 16),), Limits(4, 64, 64), 1, host_blocks=(16,))
    (asked,) = requests(1)
    asked = replace(asked, sampling=replace(asked.sampling, speculation=2))
    make = partial(load_aware, cost=HALVES)
    *_, scheduler = run(world, {0: [asked]}, {}, make=make)
    assert scheduler.parts[0]._step_s == pytest.approx(10.0, rel=0.01)


def test_host_only_computes_no_decode_attention_on_the_device():
    groups = (GroupSpec("full", 4, 16),)
    scheduler = load_aware(TieredCache(groups, (200,)), Limits(16, 64, 64), HALVES, host_only=True)
    for request in requests(8):
        scheduler.add(request)
    steps = planned(scheduler, ModelledExecutor(groups, 97, host_blocks=(200,)))
    assert all(host_rows(plan) == sum(len(b.rows) for b in plan.batches) for plan in steps)


def test_host_only_refuses_what_is_longer_than_the_hosts_memory():
    """Queued, it would wait for ever, and all behind it."""
    groups = (GroupSpec("full", 4, 16),)
    scheduler = load_aware(TieredCache(groups, (7,)), Limits(16, 64, 64), HALVES, host_only=True)
    with pytest.raises(OutOfMemoryError, match="32 tokens, but the KV memory holds 28"):
        scheduler.add(requests(1)[0])
    scheduler.add(requests(1, output=16)[0])
    assert planned(scheduler, ModelledExecutor(groups, 97, host_blocks=(7,)))


def test_it_is_made_by_name_and_says_what_it_lacks():
    given = Resources((GroupSpec("full", 4, 16),), Limits(4, 16, 32), host_blocks=(8,), cost=HALVES)
    (part,) = make_scheduler("load-aware", given).parts
    assert isinstance(part, TwoBatch)
    for lacking, word in (({"host_blocks": ()}, "host tier"), ({"cost": None}, "costs")):
        with pytest.raises(ConfigError, match=word):
            make_scheduler("load-aware", Resources(**{**vars_of(given), **lacking}))


def vars_of(given: Resources) -> dict:
    return {name: getattr(given, name) for name in given.__slots__}
