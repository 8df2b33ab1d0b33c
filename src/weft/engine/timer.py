"""Times steps made by hand through an executor, as the engine's loop would run them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence as Seq
from itertools import pairwise

from weft.core.config import ResolvedConfig
from weft.core.plan import StepPlan
from weft.core.ports import Executor, Ticket
from weft.cost.steps import GroupRoom, StepRoom
from weft.engine.model import Model


def room_of(model: Model, resolved: ResolvedConfig) -> StepRoom:
    """What steps by hand may use of an engine."""
    groups = zip(model.facts.groups, resolved.group_blocks, strict=True)
    return StepRoom(
        rows=resolved.max_num_seqs,
        longest=resolved.max_model_len,
        tokens=resolved.max_num_batched_tokens,
        block_size=resolved.block_size,
        vocab_size=model.spec.vocab_size,
        groups=tuple(GroupRoom(blocks, group.window) for group, blocks in groups),
    )


class Timer:
    """Runs plans with as many in flight as the engine's loop has, and times each.

    A step takes from the end of the one before it, or from its launch, to its own end.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def run(self, plans: Seq[StepPlan]) -> list[float]:
        """Seconds of each plan."""
        in_flight: deque[Ticket] = deque()
        ends = [time.perf_counter()]
        for plan in plans:
            in_flight.append(self._executor.launch(plan))
            if len(in_flight) > self._executor.depth:
                in_flight.popleft().result()
                ends.append(time.perf_counter())
        while in_flight:
            in_flight.popleft().result()
            ends.append(time.perf_counter())
        return [end - start for start, end in pairwise(ends)]
