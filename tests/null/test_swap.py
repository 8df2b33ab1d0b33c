"""FCFS with swapping: which sequences move out and back, and recomputed tokens, by hand."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from test_load_aware import planned, requests
from traffic import World, assert_answers, run, watching

from weft.core.errors import ConfigError
from weft.core.plan import Tier
from weft.core.types import Request, SamplingParams
from weft.kv.cache import GroupSpec, KVCache
from weft.kv.tiers import TieredCache
from weft.sched.memory_host import SwapMemory
from weft.sched.registry import fcfs, make_scheduler
from weft.sched.resources import Resources
from weft.sched.scheduler import Limits
from weft.sim.executor import ModelledExecutor

GROUPS = (GroupSpec("full", 4, 16),)
LIMITS = Limits(16, 64, 64)


def computed(plans) -> int:
    return sum(plan.num_tokens for plan in plans)


def eager(scheduler):
    """A scheduler that admits whatever fits now, so that sequences must give way later."""
    scheduler.memory.watermark_tokens = 0
    return scheduler


def swapped(host: int, count: int = 8):
    """Plans for requests of 12 + 20 tokens, two of which fill the device."""
    scheduler = eager(fcfs(TieredCache(GROUPS, (host,), prefix_caching=False), LIMITS))
    for request in requests(count):
        scheduler.add(request)
    executor = ModelledExecutor(GROUPS, 97, host_blocks=(host,))
    return planned(scheduler, executor), scheduler


def test_no_token_is_computed_twice_where_the_host_has_room():
    plans, scheduler = swapped(host=200)
    moves = [move for plan in plans for move in plan.moves]
    assert scheduler.totals.preemptions == 0
    assert {move.to for move in moves} == {Tier.HOST, Tier.DEVICE}
    assert computed(plans) == 8 * (12 + 20 - 1)


def test_a_step_that_only_moves_computes_nothing(monkeypatch):
    """While the tokens that all wait for are on their way, those that give way can go already."""
    world = World(GROUPS, LIMITS, depth=1, host_blocks=(200,), watermark_tokens=0)
    monkeypatch.setattr("weft.sched.requests.NEVER", 0)  # each token waits for the one before it
    plans = []
    make = watching(fcfs, lambda _, plan: plans.append(plan))
    found, inbox, _ = run(world, {0: requests(8)}, {}, make=make)
    assert_answers(world, found, inbox, set(), set())
    moving = [plan for plan in plans if plan.moves and not plan.num_tokens]
    assert moving
    assert not any(plan.batches for plan in moving)
    assert all(batch.rows for plan in plans for batch in plan.batches)


def test_without_the_host_the_same_load_is_computed_again():
    scheduler = eager(fcfs(KVCache(GROUPS, prefix_caching=False), LIMITS))
    for request in requests(8):
        scheduler.add(request)
    plans = planned(scheduler, ModelledExecutor(GROUPS, 97))
    assert scheduler.totals.preemptions > 0
    assert computed(plans) > 8 * (12 + 20 - 1)


def test_a_host_that_is_full_leaves_computing_again():
    plans, scheduler = swapped(host=8)  # one sequence
    assert scheduler.totals.preemptions > 0
    assert any(plan.moves for plan in plans)


def test_who_was_sent_away_comes_back_before_newer_ones_begin():
    scheduler = eager(fcfs(TieredCache(GROUPS, (200,), prefix_caching=False), LIMITS))
    for request in requests(8):
        scheduler.add(request)
    executor, away, begun = ModelledExecutor(GROUPS, 97, host_blocks=(200,)), set(), set()
    while (plan := scheduler.plan(0.0)) is not None:
        begun |= {add.row for add in plan.add}
        away |= {move.row for move in plan.moves if move.to is Tier.HOST}
        away -= {move.row for move in plan.moves if move.to is Tier.DEVICE}
        if away:
            assert not plan.add, "a newer sequence began while an older one lay on the host"
        scheduler.commit(executor.launch(plan).result())
    assert scheduler.idle
    assert begun


def test_one_on_the_host_waits_there_while_higher_classes_come():
    """It goes on where it was when there is room again."""
    scheduler = eager(fcfs(TieredCache(GROUPS, (200,), prefix_caching=False), LIMITS))
    executor = ModelledExecutor(GROUPS, 97, host_blocks=(200,))
    batch, *crowd = requests(9)
    scheduler.add(replace(batch, service_class="batch"))
    moves, steps = [], 0
    while not scheduler.idle:
        if steps > 3 and len(scheduler.sequences.by_id) == 1 and crowd:
            scheduler.add(crowd.pop())  # two fill the device; the next come when these have ended
            scheduler.add(crowd.pop())
        plan = scheduler.plan(0.0)
        moves += plan.moves
        scheduler.commit(executor.launch(plan).result())
        scheduler.check()
        steps += 1
    assert not crowd
    assert moves[0].to is Tier.HOST
    assert moves[-1].to is Tier.DEVICE
    assert scheduler.totals.preemptions == 0


@pytest.mark.parametrize("host", [12, 20, 30])
@pytest.mark.parametrize("seed", range(8))
def test_no_newcomer_begins_while_an_older_one_is_on_the_host(host, seed):
    random = Random(seed)
    scheduler = eager(fcfs(TieredCache(GROUPS, (host,), prefix_caching=False), LIMITS))
    executor = ModelledExecutor(GROUPS, 97, host_blocks=(host,))
    waiting = [
        Request(
            number,
            tuple(random.randrange(97) for _ in range(random.randint(1, 30))),
            SamplingParams(max_tokens=random.randint(1, 30)),
            service_class=random.choice(["interactive", "batch"]),
        )
        for number in range(20)
    ]
    while waiting or not scheduler.idle:
        while waiting and random.random() < 0.4:
            scheduler.add(waiting.pop())
        orders = {s.id: s.order for s in scheduler.sequences.by_id.values()}
        if (plan := scheduler.plan(0.0)) is None:
            continue
        on_host = [orders[number] for number in scheduler.memory.host.sequences()]
        newest = max((orders[add.sequence_id] for add in plan.add), default=None)
        assert newest is None or not on_host or newest < min(on_host)
        scheduler.commit(executor.launch(plan).result())
        scheduler.check()


def test_the_device_is_full_while_sequences_wait_on_the_host():
    scheduler = eager(fcfs(TieredCache(GROUPS, (200,)), LIMITS))
    for request in requests(8):
        scheduler.add(request)
    executor = ModelledExecutor(GROUPS, 97, host_blocks=(200,))
    fewest = GROUPS[0].num_blocks
    while (plan := scheduler.plan(0.0)) is not None:
        fewest = min(fewest, scheduler.cache.pools[0].available)
        scheduler.commit(executor.launch(plan).result())
        scheduler.check()
    assert fewest == 0


def test_without_a_host_tier_the_name_is_refused():
    with pytest.raises(ConfigError, match="needs a host tier"):
        make_scheduler("fcfs-swap", Resources(GROUPS, LIMITS))
    made = make_scheduler("fcfs-swap", Resources(GROUPS, LIMITS, host_blocks=(8,)))
    assert isinstance(made.memory, SwapMemory)
