"""Fairness of every scheduler: turns within a class, and progress for best effort."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
from costs import LinearCost
from hypothesis import given
from hypothesis import strategies as st
from traffic import COMMON, World, assert_answers, ids, run, traffic, watching, worlds

from depth import searching
from weft.core.plan import StepPlan, Tier
from weft.core.types import Request, SamplingParams, ServiceClass
from weft.kv.cache import GroupSpec
from weft.sched.registry import fcfs, load_aware, slo, slo_piggyback
from weft.sched.resources import TargetPolicy
from weft.sched.scheduler import Limits
from weft.sched.two_batch import PATIENCE
from weft.sim.piggyback import Piggyback

LAYERS = 2
CLASSES = [
    ServiceClass("priority", 0, ttft_s=0.5, tpot_s=0.05),
    ServiceClass("interactive", 1, tpot_s=0.2),
    ServiceClass("batch", 3),
]
COST = LinearCost(0.01, 0.001, layers=LAYERS, host_context_s=0.002, move_s=1e-4)


def maker(name: str, patience_s: float = 0.1):
    """Makes the scheduler of that name."""
    more = {"cost": COST, "classes": CLASSES}
    targets = TargetPolicy("off", 0.0, patience_s)
    return {
        "fcfs": fcfs,
        "fcfs-swap": fcfs,
        "load-aware": partial(load_aware, **more),
        "slo": partial(slo, **more, targets=targets),
        "slo-swap": partial(slo, **more, targets=targets),
        "slo-piggyback": partial(slo_piggyback, **more, targets=targets),
    }[name]


def with_host(world: World, name: str, share: float = 2.0) -> World:
    """The world with a host tier, for those schedulers that have one."""
    if name in ("fcfs", "slo"):
        return world
    blocks = tuple(max(1, int(share * group.num_blocks)) for group in world.groups)
    piggyback = partial(Piggyback, LAYERS, lambda _: 0.01) if name == "slo-piggyback" else None
    return replace(world, host_blocks=blocks, piggyback=piggyback)


@pytest.mark.parametrize(
    "name", ["fcfs", "fcfs-swap", "load-aware", "slo", "slo-swap", "slo-piggyback"]
)
@searching(120, **COMMON)
@given(st.data())
def test_within_a_class_who_comes_first_starts_first(name, data):
    """Nobody starts for the first time while one of its class waits that came before it.

    Without prefixes to share, for which requests wait on purpose.
    """
    drawn = data.draw(worlds(tight=data.draw(st.booleans())))
    world = with_host(replace(drawn, prefix_caching=False), name)
    arrivals, _ = data.draw(traffic(world))
    requests = [request for batch in sorted(arrivals) for request in arrivals[batch]]
    place = {request.id: at for at, request in enumerate(requests)}
    classes = {request.id: request.service_class for request in requests}
    started: list[int] = []

    def look(_, step):
        started.extend(add.sequence_id for add in step.add if add.sequence_id not in started)

    run(world, arrivals, {}, make=watching(maker(name), look), step_s=0.02)
    for each in Counter(classes.values()):
        mine = [place[number] for number in started if classes[number] == each]
        assert mine == sorted(mine)


@pytest.mark.parametrize("name", ["slo", "slo-swap", "slo-piggyback"])
@searching(25, **COMMON)
@given(st.data())
def test_best_effort_ends_beside_an_endless_crowd(name, data):
    """Requests with targets fill every step until they are cancelled; best effort ends before."""
    rows = data.draw(st.integers(1, 6))
    blocks = data.draw(st.integers(16, 40))
    rounds, crowd = 200, data.draw(st.integers(1, 2))
    world = with_host(
        World((GroupSpec("full", 4, blocks),), Limits(rows, 24, 60), data.draw(st.integers(0, 2))),
        name,
    )
    arrivals: dict[int, list[Request]] = {
        at: [
            Request(1000 + 10 * at + i, (at % 50, i, 7), SamplingParams(max_tokens=9))
            for i in range(crowd)
        ]
        for at in range(rounds)
    }
    low = [
        Request(i, tuple(range(1, data.draw(st.integers(3, 20)))), SamplingParams(max_tokens=8),
                service_class="batch")
        for i in range(data.draw(st.integers(1, 3)))
    ]  # fmt: skip
    arrivals[5] += low
    ended: list[int] = []

    def look(scheduler, _):
        waiting = scheduler.sequences.by_id
        if len(ended) < len(low) and not any(request.id in waiting for request in low):
            ended.extend(request.id for request in low)
            assert any(number >= 1000 for number in waiting)  # the crowd is still there

    make = watching(maker(name, 0.1), lambda s, step: s.totals.steps > 20 and look(s, step))
    cancels = {rounds: [request.id for batch in arrivals.values() for request in batch]}
    requests, inbox, _ = run(world, arrivals, cancels, make=make, step_s=0.02)
    assert_answers(world, requests, inbox, ids(cancels), set())
    assert ended


def host_decodes(step: StepPlan) -> int:
    """Rows of one token whose KV lies with the host, where their attention is computed."""
    return sum(
        tier is Tier.HOST and count == 1
        for batch in step.batches
        for tier, count in zip(batch.tiers, batch.counts, strict=bool(batch.tiers))
    )


def device_rows(step: StepPlan) -> int:
    tiers = [tier for batch in step.batches for tier in batch.tiers or (Tier.DEVICE,)]
    return tiers.count(Tier.DEVICE)


@searching(80, **COMMON)
@given(st.data())
def test_the_oldest_on_the_host_is_not_left_out_for_long(data):
    """Unless those before it fill the step, or it moves, or it ends, or the host is too slow.

    A host that is far too slow attends for decodes only when the device has nothing to do; that of
    chunks is the device's work.
    """
    drawn = data.draw(worlds(tight=True))
    world = with_host(drawn, "load-aware", data.draw(st.sampled_from([0.5, 1.0, 3.0])))
    slow = data.draw(st.booleans())
    cost = LinearCost(1.0, 0.01, host_context_s=100.0 if slow else 1e-4)
    arrivals, _ = data.draw(traffic(world))
    passed = Counter()

    def look(scheduler, step):
        on_host = set(scheduler.memory.host.sequences())
        oldest = next((s for s in scheduler.sequences.running if s.id in on_host), None)
        rows = {row for batch in step.batches for row in batch.rows}
        if slow:
            assert not (host_decodes(step) and device_rows(step))
            return
        moving = oldest is not None and scheduler.memory.tiers.moving(oldest.id)
        if oldest is None or moving or oldest.row in rows or oldest.known >= oldest.end:
            passed.clear()
            return
        before = {s.row for s in scheduler.sequences.running if s.order < oldest.order}
        full = step.num_tokens >= world.limits.max_num_batched_tokens and rows <= before
        passed[oldest.id] += not full
        assert passed[oldest.id] <= PATIENCE + 1 + world.depth

    make = watching(partial(load_aware, cost=cost), look)
    requests, inbox, _ = run(world, arrivals, {}, make=make)
    assert_answers(world, requests, inbox, set(), set())
