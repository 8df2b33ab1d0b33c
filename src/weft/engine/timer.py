"""Times steps made by hand through an executor, as the engine's loop would run them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq

from weft.core.config import EngineConfig
from weft.core.plan import StepPlan, StepResult
from weft.core.ports import Executor, Ticket
from weft.core.resolved import ResolvedConfig
from weft.cost.host_steps import HostCounts
from weft.cost.steps import GroupRoom, HostRoom, StepRoom
from weft.engine.costs import host_name
from weft.engine.model import Model
from weft.kernels.cpu.host import HostMailbox


def room_of(config: EngineConfig, model: Model, resolved: ResolvedConfig) -> StepRoom:
    """What steps by hand may use of an engine."""
    groups = zip(model.facts.groups, resolved.group_blocks, strict=True)
    host = zip(model.facts.groups, resolved.host_blocks, strict=False)
    return StepRoom(
        rows=min(resolved.max_num_seqs, resolved.state_slots // 2 or resolved.max_num_seqs),
        longest=resolved.max_model_len,
        tokens=resolved.max_num_batched_tokens,
        block_size=resolved.block_size,
        vocab_size=model.spec.vocab_size,
        groups=tuple(GroupRoom(blocks, group.window) for group, blocks in groups),
        states=bool(resolved.state_slots),
        host=HostRoom(
            host_name(config),
            tuple(GroupRoom(blocks, group.window) for group, blocks in host),
            config.attends_on_host,
            sum(group.bytes_per_token for group in model.facts.groups),
            carries=model.spec.rows_exchangeable,
            overlaps=config.overlaps,
            slots=resolved.host_slots,
        )
        if resolved.host_blocks
        else None,
    )


class Timer:
    """Runs plans with as many in flight as the engine's loop has, and times each.

    A step takes from the end of the one before it, or from its launch, to its own end.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._ended = 0.0

    def run(self, plans: Seq[StepPlan]) -> list[float]:
        """Seconds of each plan."""
        return [seconds for seconds, _ in self.follow(plans)]

    def follow(self, plans: Iterable[StepPlan]) -> Iterator[tuple[float, StepResult]]:
        """Yield the seconds and the result of each plan, while later ones are in flight."""
        in_flight: deque[Ticket] = deque()
        self._ended = time.perf_counter()
        for plan in plans:
            in_flight.append(self._executor.launch(plan))
            if len(in_flight) > self._executor.depth:
                yield self._collect(in_flight)
        while in_flight:
            yield self._collect(in_flight)

    def _collect(self, in_flight: deque[Ticket]) -> tuple[float, StepResult]:
        result = in_flight.popleft().result()
        before, self._ended = self._ended, time.perf_counter()
        return self._ended - before, result


class HostTimer(Timer):
    """Also knows what a host worker has done; implements ``weft.cost.host_steps.HostRun``."""

    def __init__(self, executor: Executor, mailbox: HostMailbox | None) -> None:
        super().__init__(executor)
        self._mailbox = mailbox

    def counted(self) -> HostCounts:
        """What the worker has done so far."""
        if self._mailbox is None:
            return HostCounts()
        counters = self._mailbox.counters()
        return HostCounts(counters.jobs, counters.busy_ns * 1e-9, counters.round_trip_ns * 1e-9)
