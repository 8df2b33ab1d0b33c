"""First come, first served, without phases, within class priorities.

Every step, for one class after the other: running sequences that need one token first (so that no
long prompt of their class stalls them), then running ones with more to compute in chunks, then new
ones, all within one token budget (chunked prefill). When rows or blocks run out, a later
sequence is preempted.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from weft.core.types import DEFAULT_CLASSES, Sequence, ServiceClass
from weft.cost.model import CostModel
from weft.sched.batch import BatchBuilder, TimedBatch
from weft.sched.resources import Resources
from weft.sched.scheduler import Policy, Scheduler


class FCFSPolicy:
    """See the module docstring; implements ``weft.sched.scheduler.Policy``.

    Args:
        cost: what the time of a step is predicted with, where a part of the scheduler asks.
        fills: whether the device computes anything; not with all KV on the host.
    """

    name = "fcfs"
    preempts_ahead = True

    def __init__(
        self,
        classes: Seq[ServiceClass] = DEFAULT_CLASSES,
        cost: CostModel | None = None,
        *,
        fills: bool = True,
    ) -> None:
        self.classes = classes
        self._cost = cost
        self._fills = fills
        self._scheduler: Scheduler

    def attach(self, scheduler: Scheduler) -> None:
        """Decide for this scheduler."""
        self._scheduler = scheduler

    def consider(self, sequence: Sequence) -> None:
        """Every request is taken."""

    def fill(self, now: float) -> BatchBuilder | None:  # noqa: ARG002 - time decides nothing
        """Return the next step, or None if there is nothing to do at present."""
        scheduler = self._scheduler
        budget = self.budget()
        step = BatchBuilder(budget, whole=scheduler.limits.whole_prompts)
        if self._cost is not None:
            step = TimedBatch(budget, cost=self._cost, limit_s=float("inf"))
        scheduler.memory.make_way(step)
        if self._fills:
            self._fill(step)
        for part in scheduler.parts:
            part.filled(step)
        return step if step.rows or scheduler.memory.moves else None

    def budget(self) -> int:
        """Tokens that the next step may have."""
        return self._scheduler.limits.max_num_batched_tokens

    def _fill(self, step: BatchBuilder) -> None:
        """One class after the other: single tokens, chunks, then new sequences."""
        scheduler = self._scheduler
        for priority in scheduler.sequences.priorities():
            running = scheduler.memory.on_device(scheduler.sequences.running_of(priority))
            rest = scheduler.filler.single_tokens(step, running)
            scheduler.filler.chunks(step, rest)
            scheduler.admission.admit(step, priority)

    def collected(self, now: float, *, leased: bool = False) -> None:
        """Times do not affect this policy."""

    def check(self) -> None:
        """Nothing is remembered."""


def make_policy(given: Resources) -> Policy:
    """Made of what a scheduler has."""
    return FCFSPolicy(given.classes)
