"""Leases beside latency targets: nobody waits for one, and what ends one is dated as it came."""

from __future__ import annotations

import pytest
from costs import LinearCost

from weft.core.plan import StepOutputs
from weft.core.types import FinishReason, Request, SamplingParams, ServiceClass
from weft.engine.loop import EngineLoop
from weft.kv.cache import GroupSpec, KVCache
from weft.sched.registry import slo
from weft.sched.resources import TargetPolicy
from weft.sched.scheduler import Limits
from weft.sim.clock import VirtualClock
from weft.sim.executor import ModelledExecutor

COST = LinearCost(0.001, 0.00005)
GROUP = GroupSpec("full", 4, 4000)
LEASE_STEPS = 64
PREFIX = tuple(range(24))


class World:
    """An engine whose steps take so long, and an inbox that notes when first tokens come.

    A lease lasts as long as it may.
    """

    def __init__(self, *, lease_steps: int, ttft_s: float, rows: int, step_s: float) -> None:
        self.clock = VirtualClock()
        self.clock.advance(1.0)
        classes = [ServiceClass("interactive", 1, ttft_s=ttft_s, tpot_s=0.05)]
        classes.append(ServiceClass("batch", 3))
        limits = Limits(rows, 64, 2000, lease_steps=lease_steps)
        targets = TargetPolicy(admission="reject")
        self.scheduler = slo(KVCache([GROUP]), limits, COST, classes, targets)
        executor = ModelledExecutor([GROUP], 50, depth=1, leases=lambda steps: steps)
        self.loop = EngineLoop(self.scheduler, executor, self, self.clock)
        self.new: list[Request] = []
        self.arrived: dict[int, float] = {}
        self.first: dict[int, float] = {}
        self.longest = 0  # lease, in steps
        collect = executor.collect

        def timed(ticket):
            result = collect(ticket)
            steps = 1 + len(result.leased.steps) if result.leased else 1
            self.longest = max(self.longest, steps)
            self.clock.advance(step_s * steps)
            self.computed(steps)
            return result

        executor.collect = timed

    def computed(self, steps: int) -> None:
        """So many steps have been."""

    def send(self, number: int, prompt: tuple[int, ...], kind: str, tokens: int) -> None:
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        self.new.append(Request(number, prompt, sampling, service_class=kind))
        self.arrived[number] = self.clock.now()

    def receive(self) -> tuple[list[Request], list[tuple[int, FinishReason]]]:
        new, self.new = self.new, []
        return new, []

    def computing(self, sequence_ids) -> None:
        """Nothing outlives the test."""

    def lend(self, lease) -> None:
        lease.grant(None)

    def publish(self, outputs: StepOutputs) -> None:
        ids = [sequence_id for sequence_id, _ in outputs.tokens]
        for number in ids + [u.sequence_id for u in outputs.updates if u.token is not None]:
            self.first.setdefault(number, self.clock.now())

    def wait(self) -> None:
        """There is always something to do."""


@pytest.mark.parametrize("lease_steps", [0, LEASE_STEPS])
def test_who_waits_for_a_prefix_is_not_behind_a_lease(lease_steps):
    """Best effort has the other row, which is to be had as soon as the prefix is computed."""
    world = World(lease_steps=lease_steps, ttft_s=0.08, rows=2, step_s=0.0016)
    world.send(1, (40, 41, 42, 43, 44), "batch", 1500)
    for _ in range(3):
        world.loop.step()
    world.send(2, (*PREFIX, 20), "interactive", 200)
    world.send(3, (*PREFIX, 30), "interactive", 5)
    world.loop.run_until_idle()
    assert world.first[3] - world.arrived[3] < 0.02
    assert (world.longest > 1) == bool(lease_steps)


@pytest.mark.parametrize("lease_steps", [0, LEASE_STEPS])
def test_what_arrives_amid_a_lease_has_not_waited_since_its_begin(lease_steps):
    """It ends the lease, so it came in the last step of it; its target is counted from there."""
    world = World(lease_steps=lease_steps, ttft_s=0.06, rows=4, step_s=0.00105)
    done = 0

    def computed(steps: int) -> None:
        nonlocal done
        if done <= 70 < done + steps:
            world.send(2, PREFIX, "interactive", 5)
        done += steps

    world.computed = computed
    world.send(1, (1, 2, 3), "batch", 800)
    world.loop.run_until_idle()
    assert world.longest == 1 + lease_steps
    assert world.scheduler.totals.refused == 0
    assert world.first[2] - world.arrived[2] < 0.06
