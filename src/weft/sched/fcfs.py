"""First come, first served, without phases, within class ranks.

Every step, for one class after the other: running sequences that need one token first (so that no
long prompt of their class stalls them), then running ones with more to compute in chunks, then new
ones, all within one token budget (chunked prefill). When rows or blocks run out, a sequence that
comes later is preempted and computed again on resume.
"""

from __future__ import annotations

from weft.core.plan import StepPlan
from weft.sched.planner import Planner
from weft.sched.step import OpenStep


class FCFSScheduler(Planner):
    """See the module docstring; implements ``weft.core.ports.Scheduler``."""

    def plan(self, now: float) -> StepPlan | None:
        """Return the next step, or None if nothing can be computed at present."""
        self._open_plan(now)
        step = OpenStep(self.limits.max_num_batched_tokens)
        self._plan_in_order(step)
        return self._launch(step) if step.rows else None
