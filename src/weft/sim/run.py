"""Runs a real scheduler through the engine's own loop on the simulated executor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from weft.core.types import DEFAULT_CLASSES, ServiceClass
from weft.cost.model import CostModel
from weft.engine.loop import EngineLoop
from weft.kv.cache import KVCache
from weft.kv.pool import BlockPool
from weft.kv.tiers import TieredCache
from weft.sched.batch import Totals
from weft.sched.piggyback import PiggybackPart
from weft.sched.scheduler import Scheduler
from weft.sim.clock import VirtualClock
from weft.sim.inbox import SimulatedInbox
from weft.sim.jobs import SimulatedRequest
from weft.sim.piggyback import Piggyback, on_hosts
from weft.sim.record import Record, StepLog
from weft.sim.simulated import Errors, SimulatedExecutor


@dataclass(frozen=True, slots=True)
class Traffic:
    """Traffic: timed jobs, and a backlog of which ``keep`` are always open."""

    arrivals: Iterator[SimulatedRequest]
    backlog: Iterator[SimulatedRequest] | None = None
    keep: int = 0


@dataclass(frozen=True, slots=True)
class Simulated:
    """The results of a simulation; times are virtual seconds from its start."""

    record: Record
    log: StepLog
    totals: Totals
    seconds: float


def simulate(
    scheduler: Scheduler,
    cost: CostModel,
    traffic: Traffic,
    errors: Errors | None = None,
    classes: Seq[ServiceClass] = DEFAULT_CLASSES,
    done: Callable[[int], None] | None = None,
    piggyback: Piggyback | None = None,
    state_tokens: int = 0,
) -> Simulated:
    """Serve the traffic until every request has ended.

    Args:
        scheduler: a new one; its invariants are checked at the end.
        cost: what steps really take: another source than the scheduler's own costs.
        errors: by how much they differ from that.
        done: hears the number of each request that has ended.
        piggyback: the hosts of a scheduler that has piggybacked rows; unset is one, as fast as
            ``cost`` says.
        state_tokens: as large as the KV of so many tokens is a slot of recurrent state.

    Raises:
        InvariantError: the scheduler got stuck or lost something.
    """
    clock, log = VirtualClock(), StepLog()
    record = Record([row.name for row in classes], done)
    inbox = SimulatedInbox(traffic.arrivals, clock, record, traffic.backlog, traffic.keep)
    device, host = _pools(scheduler.memory.kv)

    def gauges() -> tuple[float, float, float]:
        return _held(device), _held(host), float(len(scheduler.sequences.waiting))

    if piggyback is None and any(isinstance(part, PiggybackPart) for part in scheduler.parts):
        piggyback = on_hosts(cost)
    executor = SimulatedExecutor(
        cost,
        clock,
        inbox.ends,
        errors=errors or Errors(),
        log=log,
        gauges=gauges,
        block_size=scheduler.cache.groups[0].block_size,
        piggyback=piggyback,
        speeds=None if scheduler.halves is None else scheduler.halves.speeds,
        state_tokens=state_tokens,
    )
    loop = EngineLoop(scheduler, executor, inbox, clock)
    while True:
        if not loop.step():
            if inbox.done:
                break
            inbox.wait()
    scheduler.check()
    executor.close()
    return Simulated(record, log, scheduler.totals, clock.now())


def _pools(cache: KVCache | TieredCache) -> tuple[Seq[BlockPool], Seq[BlockPool]]:
    """The block pools of device and host."""
    if isinstance(cache, TieredCache):
        return cache.device.pools, cache.host.pools
    return cache.pools, ()


def _held(pools: Seq[BlockPool]) -> float:
    """The share of blocks that sequences hold."""
    blocks = sum(pool.num_blocks for pool in pools)
    return sum(pool.held for pool in pools) / blocks if blocks else 0.0
