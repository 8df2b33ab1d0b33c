"""First come, first served, where the KV of those who give way is kept in the host's memory.

Plans are those of FCFS, and nothing is computed on the host. But a sequence that must give way
keeps what it has computed: its KV goes to the host and comes back when the device has room, before
newer sequences of its class begin. Only where the host has no room is it computed again.
"""

from __future__ import annotations

from weft.core.plan import StepPlan
from weft.sched.step import OpenStep
from weft.sched.tiered import TieredPlanner


class SwapScheduler(TieredPlanner):
    """See the module docstring; implements ``weft.core.ports.Scheduler``."""

    def plan(self, now: float) -> StepPlan | None:
        """Return the next step, or None if nothing can be computed at present."""
        self._open_plan(now)
        step = OpenStep(self.limits.max_num_batched_tokens)
        self._swap_out_ahead(step)
        self._swap_in(step)
        self._give_up_one_that_is_stuck()
        self._plan_in_order(step)
        return self._launch(step) if step.rows or self._moving.moves else None

    def _give_up_one_that_is_stuck(self) -> None:
        """Preempt the oldest on the host if not even an empty device takes it back as it is.

        A chunk of a sliding group needs more blocks than what it leaves behind. Begun again, a
        sequence fits by the rules of admission.
        """
        on_host = self._on_host()
        empty = len(on_host) == len(self.running) and not self.live.closing
        if not on_host or not empty or self._moving.moves or any(self._coming):
            return
        if not self._fits_device(on_host[0], [0] * len(self.cache.groups)):
            self._preempt(on_host[0])

    def _takes_too_long(self, tokens: int) -> bool:
        """More than the tokens that a step computes, which takes longer than to copy their KV."""
        return tokens > self.limits.max_num_batched_tokens

    def _blocks_come_back(self) -> bool:
        return super()._blocks_come_back() or any(self._coming)
