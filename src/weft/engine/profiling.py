"""``weft profile``: measures steps of a built engine as its loop runs them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import pairwise

from weft.core.config import EngineConfig
from weft.core.plan import StepPlan
from weft.core.ports import Executor, Ticket
from weft.cost.fit import Fitted, ProfileKey
from weft.cost.options import ProfileOptions
from weft.cost.profiler import profile
from weft.cost.steps import GroupRoom, StepRoom
from weft.engine.build import Engine, build_engine
from weft.engine.costs import profile_key


def profile_engine(
    config: EngineConfig, options: ProfileOptions
) -> tuple[ProfileKey, Fitted, dict[str, object]]:
    """Build the engine, measure it, and fit costs to it; the key, the fit and its report.

    Raises:
        WeftError: a typed error for everything that can be wrong with settings, model or memory.
    """
    engine = build_engine(replace(config, scheduler="fcfs"))  # the others need a profile
    key = profile_key(config, engine.model)
    try:
        fitted, report = profile(
            Timer(engine.executor).run, room_of(engine), key, engine.model.spec.num_layers, options
        )
    finally:
        engine.executor.close()
    return key, fitted, report


def room_of(engine: Engine) -> StepRoom:
    """The limits of hand-made steps on an engine."""
    resolved, model = engine.resolved, engine.model
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
