"""The schedulers that OmniServe is compared with, and its own order of moves, made of weft's."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import chain

from weft.core.types import DEFAULT_CLASSES, Sequence, ServiceClass
from weft.cost.model import CostModel
from weft.kv.cache import KVCache
from weft.kv.tiers import TieredCache
from weft.sched.admission import Admission
from weft.sched.balance import Balance
from weft.sched.batch import BatchBuilder, TimedBatch
from weft.sched.memory_device import DeviceMemory
from weft.sched.memory_host import HostMemory, SwapMemory
from weft.sched.piggyback import PiggybackPart
from weft.sched.policy_fcfs import FCFSPolicy
from weft.sched.policy_slo import SLOPolicy
from weft.sched.resources import DEFAULT_POLICY, TargetPolicy
from weft.sched.scheduler import Limits, Scheduler
from weft.sched.two_batch import TwoBatch

HEADROOM = 0.8  # share of KV memory that Llumnix keeps for interactive requests (section 2.3.1)


class HeadroomAdmission(Admission):
    """Memory kept free: best effort holds at most what the headroom leaves."""

    def __init__(self, scheduler: Scheduler, best_effort: int) -> None:
        super().__init__(
            scheduler.sequences, scheduler.memory, scheduler.limits.max_num_batched_tokens
        )
        self._best_effort = best_effort

    def admit(self, step: BatchBuilder, priority: int) -> None:
        if priority == self._best_effort:
            pool, block = self._cache.pools[0], self._cache.groups[0].block_size
            running = self._sequences.running_of(priority)
            held = sum(self._cache.held(s.id)[0] for s in running)
            first = next(self._sequences.waiting.of_priority(priority), None)
            if first is None or held + first.end / block > (1 - HEADROOM) * pool.num_blocks:
                return
        super().admit(step, priority)


def headroom(
    cache: KVCache, limits: Limits, classes: Seq[ServiceClass] = DEFAULT_CLASSES
) -> Scheduler:
    """Class priorities with memory kept free."""
    scheduler = Scheduler(FCFSPolicy(classes), DeviceMemory(cache), limits)
    best_effort = next(row.priority for row in classes if row.name == "batch")
    scheduler.admission = HeadroomAdmission(scheduler, best_effort)
    return scheduler


class TimedFCFS(FCFSPolicy):
    """Steps with the token budget that keeps the target between tokens, as is predicted.

    Of its decodes on the device and of prompts; the margin is that of scheduler slo.
    """

    def __init__(
        self, classes: Seq[ServiceClass], cost: CostModel, tpot_s: float, *, fills: bool = True
    ) -> None:
        super().__init__(classes, cost, fills=fills)
        self._limit_s = tpot_s * (1 - DEFAULT_POLICY.margin)

    def budget(self) -> int:
        """Tokens that the next step may have."""
        assert self._cost is not None
        scheduler = self._scheduler
        most = scheduler.limits.max_num_batched_tokens
        here = scheduler.memory.on_device(scheduler.sequences.running)
        decodes = [s.planned for s in here if s.known - s.planned == 1]
        start = next((s.planned for s in here if s.known - s.planned > 1), 0)
        step = TimedBatch(most, cost=self._cost, limit_s=self._limit_s)
        step.work.decodes = step.work.tokens = step.work.sampled = len(decodes)
        step.work.decode_context = sum(decodes) + len(decodes)
        return max(16, len(decodes) + step.room(start, most - len(decodes)))


def timed_load_aware(
    cache: TieredCache,
    limits: Limits,
    cost: CostModel,
    classes: Seq[ServiceClass],
    *,
    tpot_s: float,
    host_only: bool = False,
) -> Scheduler:
    """Load-aware "with a latency control mechanism similar to OmniServe's" (section 5.1.3).

    Args:
        host_only: all decode attention is the host's, as the paper says that NEO has it.
    """
    memory = SwapMemory(cache, host_computes=True, comes_back=not host_only)
    balance = Balance(cost, limits.max_num_batched_tokens)
    part = TwoBatch(memory, balance, host_only=host_only)
    policy = TimedFCFS(classes, cost, tpot_s, fills=not host_only)
    return Scheduler(policy, memory, limits, [part])


class EagerPiggyback(PiggybackPart):
    """Sends a decode to the host as soon as a step has no time for it beside prompts.

    As the paper has it (section 3.3.5). weft's own keeps it on the device if a step could hold all
    decodes without prompts, since there a token takes one step.
    """

    _passed_over: Seq[Sequence] = ()

    def after_best_effort(self, step: TimedBatch) -> Iterable[int]:
        priorities = super().after_best_effort(step)
        planned = {sequence.id for sequence in step.sequences}
        self._passed_over = [s for s in self._decoding() if s.id not in planned]
        return priorities

    def _too_many(self, step: TimedBatch) -> list[Sequence]:  # noqa: ARG002
        passed = {sequence.id for sequence in self._passed_over}
        return [sequence for sequence in self._decoding() if sequence.id in passed]

    def _decoding(self) -> list[Sequence]:
        running = [
            s for priority in self._policy.best_effort for s in self._policy.running_of(priority)
        ]
        return [s for s in running if s.known - s.planned == 1]


class RoomyPiggyback(EagerPiggyback):
    """Also sends decodes to the host where the device has no memory for the next prompt.

    "Overflowed" best effort, which the paper has on its hosts (section 3.1), may mean that, too.
    """

    def _headroom(self) -> list[int]:
        policies = self._policy.best_effort
        waiting = (self._scheduler.sequences.waiting.of_priority(each) for each in policies)
        first = next(chain.from_iterable(waiting), None)
        end = 0 if first is None else first.end
        sizes = (-(-end // group.block_size) for group in self._cache.groups)
        return [rest + size for rest, size in zip(super()._headroom(), sizes, strict=True)]


def eager_piggyback(
    cache: TieredCache,
    limits: Limits,
    cost: CostModel,
    classes: Seq[ServiceClass],
    policy: TargetPolicy = DEFAULT_POLICY,
    *,
    roomy: bool = False,
) -> Scheduler:
    """Scheduler slo-piggyback with the paper's order of moves."""
    targets, memory = SLOPolicy(cost, classes, policy), HostMemory(cache)
    part = RoomyPiggyback if roomy else EagerPiggyback
    return Scheduler(targets, memory, limits, [part(memory, targets)])
