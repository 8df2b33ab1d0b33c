"""Headroom that admission leaves to running sequences, by hand, and the preemptions it avoids."""

from __future__ import annotations

from functools import partial

import pytest
from costs import LinearCost
from test_load_aware import planned, requests

from weft.core.types import Request, SamplingParams
from weft.kv.cache import GroupSpec, KVCache
from weft.kv.tiers import TieredCache
from weft.sched.registry import fcfs, slo
from weft.sched.resources import TargetPolicy
from weft.sched.scheduler import Limits
from weft.sim.executor import ModelledExecutor

SLO = partial(slo, cost=LinearCost(0.01, 0.001), targets=TargetPolicy("off"))


def make(kind, blocks: int, rows: int = 32):
    groups = (GroupSpec("full", 4, blocks),)
    cache = KVCache(groups, prefix_caching=False)
    if kind == "fcfs-swap":
        cache = TieredCache(groups, (8,), prefix_caching=False)
    return (SLO if kind == "slo" else fcfs)(cache, Limits(rows, 256, 512))


def started(scheduler, executor) -> list[int]:
    """Ids of those that start in the next step, which is computed."""
    plan = scheduler.plan(0.0)
    scheduler.commit(executor.launch(plan).result())
    scheduler.check()
    return [add.sequence_id for add in plan.add]


def request(number: int, prompt: int, output: int, service_class="interactive") -> Request:
    tokens = tuple((number * 31 + i) % 97 for i in range(prompt))
    return Request(number, tokens, SamplingParams(max_tokens=output), service_class=service_class)


@pytest.mark.parametrize("kind", ["fcfs", "fcfs-swap", "slo"])
@pytest.mark.parametrize(("prompt", "starts"), [(8, True), (9, False)])
def test_a_newcomer_leaves_what_those_that_run_will_ask_for(kind, prompt, starts):
    """The first has 9 tokens in 2 of 13 blocks and gets 32 more, for which it needs 9 blocks."""
    scheduler = make(kind, blocks=13)
    executor = ModelledExecutor(scheduler.cache.groups, 97, host_blocks=(8,))
    scheduler.add(request(1, 7, 40))
    assert started(scheduler, executor) == [1]
    scheduler.add(request(2, prompt, 1))
    assert started(scheduler, executor) == ([2] if starts else [])


def test_no_more_is_left_than_a_sequence_can_still_become():
    scheduler = make("fcfs", blocks=13)
    executor = ModelledExecutor(scheduler.cache.groups, 97)
    scheduler.add(request(1, 7, 5))  # 12 tokens at most: one block more
    assert started(scheduler, executor) == [1]
    scheduler.add(request(2, 40, 1))
    assert started(scheduler, executor) == [2]


def test_the_rest_of_a_prompt_that_comes_in_chunks_is_left_to_it():
    scheduler = fcfs(KVCache((GroupSpec("full", 4, 13),), prefix_caching=False), Limits(4, 8, 64))
    scheduler.memory.watermark_tokens = 0
    executor = ModelledExecutor(scheduler.cache.groups, 97)
    scheduler.add(request(1, 40, 2))
    assert started(scheduler, executor) == [1]
    scheduler.add(request(2, 16, 1))
    while len(scheduler.sequences.running[0].tokens) == 40:
        assert started(scheduler, executor) == []
    assert scheduler.totals.preemptions == 0


@pytest.mark.parametrize("kind", ["fcfs", "fcfs-swap", "slo"])
def test_an_empty_engine_starts_whatever_fits_at_all(kind):
    scheduler = make(kind, blocks=13)
    scheduler.add(request(1, 51, 1))
    scheduler.add(request(2, 51, 1))
    plans = planned(scheduler, ModelledExecutor(scheduler.cache.groups, 97, host_blocks=(8,)))
    assert [add.sequence_id for plan in plans for add in plan.add] == [1, 2]


def test_nothing_is_left_to_a_lower_class():
    scheduler = make("fcfs", blocks=13)
    executor = ModelledExecutor(scheduler.cache.groups, 97)
    scheduler.add(request(1, 7, 40, "batch"))
    assert started(scheduler, executor) == [1]
    scheduler.add(request(2, 44, 1, "priority"))
    assert started(scheduler, executor) == [2]
    assert scheduler.totals.preemptions == 0


@pytest.mark.parametrize("kind", ["fcfs", "slo"])
@pytest.mark.parametrize(("prompt", "preempted"), [(8, 0), (24, 1)])
def test_lower_classes_give_up_no_more_than_the_newcomer_needs_now(kind, prompt, preempted):
    """What those that run will ask for they take themselves, when they need it.

    Were it to be free at once, lower classes that grow could take each block that one gives up, and
    the newcomer would wait for as long as they run. Here 4 of 16 blocks are free, and the first
    will ask for 4 more.
    """
    scheduler = make(kind, blocks=16)
    executor = ModelledExecutor(scheduler.cache.groups, 97)
    scheduler.add(request(1, 7, 16))
    scheduler.add(request(2, 17, 3, "batch"))
    scheduler.add(request(3, 17, 3, "batch"))
    assert started(scheduler, executor) == [1, 2, 3]
    scheduler.add(request(4, prompt, 1))
    assert started(scheduler, executor) == [4]
    assert scheduler.totals.preemptions == preempted


def test_half_of_what_was_computed_twice_is_spared():
    """Answers much longer than what is looked ahead, in a pool for some ten of 64 sequences."""
    computed, preempted = [], []
    for ahead in (0, 32):
        scheduler = make("fcfs", blocks=300)
        scheduler.memory.watermark_tokens = ahead
        for each in requests(64, output=100):
            scheduler.add(each)
        plans = planned(scheduler, ModelledExecutor(scheduler.cache.groups, 97))
        computed.append(sum(plan.num_tokens for plan in plans) - 64 * (12 + 100 - 1))
        preempted.append(scheduler.totals.preemptions)
    assert preempted[1] < preempted[0] / 3
    assert computed[1] < computed[0] / 2


def victims(scheduler, asked, steps: int) -> int:
    """Preemptions in so many steps after the requests, one of which comes with each step."""
    executor = ModelledExecutor(scheduler.cache.groups, 97)
    asked = list(asked)
    for _ in range(steps):
        if asked:
            scheduler.add(asked.pop(0))
        started(scheduler, executor)
    return scheduler.totals.preemptions


def test_nobody_loses_a_row_to_a_request_that_does_not_fit_anyhow():
    """The second would have to give its row to the third, which needs more blocks than there are.

    The first keeps 25 blocks of 60 and is left 8; the third needs 38.
    """
    scheduler = make("fcfs", blocks=60, rows=2)
    asked = [request(1, 100, 60), request(2, 60, 60, "batch"), request(3, 150, 4)]
    assert victims(scheduler, asked, steps=15) == 0
    assert len(scheduler.sequences.running) == 2


def test_nobody_gives_way_for_blocks_that_others_hold_too():
    """Preempting those that share a prefix with a sequence that goes on gives little free."""
    prefix = request(0, 80, 1).prompt
    cache = KVCache((GroupSpec("full", 4, 40),), prefix_caching=True)
    scheduler = fcfs(cache, Limits(8, 256, 512))

    def sharing(number: int, output: int, service_class: str) -> Request:
        sampling = SamplingParams(max_tokens=output)
        return Request(number, (*prefix, number), sampling, service_class=service_class)

    asked = [sharing(1, 24, "interactive"), sharing(2, 24, "batch"), sharing(3, 24, "batch")]
    assert victims(scheduler, [*asked, request(4, 100, 4)], steps=12) == 0
    assert len(scheduler.sequences.running) == 3
    assert cache.freed([2, 3])[0] < 40 - cache.available()[0] - 20
