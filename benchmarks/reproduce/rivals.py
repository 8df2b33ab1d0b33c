"""The schedulers that OmniServe is compared with, and its own order of moves, made of weft's."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from weft.core.plan import StepPlan
from weft.core.types import Sequence
from weft.cost.model import CostModel
from weft.sched.fcfs import FCFSScheduler
from weft.sched.load_aware import LoadAwareScheduler
from weft.sched.riders import RidingScheduler, RidingStep
from weft.sched.slo import DEFAULT_POLICY
from weft.sched.step import OpenStep
from weft.sched.timed import TimedStep

HEADROOM = 0.8  # share of KV memory that Llumnix keeps for interactive requests (section 2.3.1)


class HeadroomScheduler(FCFSScheduler):
    """Class ranks with memory kept free: best effort holds at most what the headroom leaves."""

    def _admit(self, step: OpenStep, rank: int) -> None:
        best_effort = [s for s in self.running if s.order[0] == self._ranks["batch"]]
        if rank == self._ranks["batch"]:
            pool, block = self.cache.pools[0], self.cache.groups[0].block_size
            held = sum(self.cache.held(s.id)[0] for s in best_effort)
            first = next(self.waiting.of_rank(rank), None)
            if first is None or held + first.end / block > (1 - HEADROOM) * pool.num_blocks:
                return
        super()._admit(step, rank)


class TimedLoadAware(LoadAwareScheduler):
    """Load-aware "with a latency control mechanism similar to OmniServe's" (section 5.1.3).

    Each step gets the token budget with which it keeps the target between tokens, as is predicted
    of its decodes on the device and of prompts; the margin is that of scheduler slo.
    """

    def __init__(self, *given: Any, tpot_s: float) -> None:
        super().__init__(*given)
        self._most = self.limits.max_num_batched_tokens
        self._limit_s = tpot_s * (1 - DEFAULT_POLICY.margin)

    def plan(self, now: float) -> StepPlan | None:
        budget = self._within(self._cost)
        self.limits = replace(self.limits, max_num_batched_tokens=budget)
        return super().plan(now)

    def _within(self, cost: CostModel) -> int:
        hosted = set(self.host.sequences())
        here = [s for s in self.running if s.id not in hosted]
        decodes = [s.planned for s in here if s.known - s.planned == 1]
        start = next((s.planned for s in here if s.known - s.planned > 1), 0)
        step = TimedStep(self._most, cost=cost, limit_s=self._limit_s)
        step.work.decodes = step.work.tokens = step.work.sampled = len(decodes)
        step.work.decode_context = sum(decodes) + len(decodes)
        return max(16, len(decodes) + step.room(start, self._most - len(decodes)))


class EagerRiders(RidingScheduler):
    """Sends a decode to the host as soon as a step has no time for it beside prompts.

    As the paper has it (section 3.3.5). weft's own keeps it on the device if a step could hold all
    decodes without prompts, since there a token takes one step.
    """

    _passed_over: Seq[Sequence] = ()

    def _plan_best_effort(self, step: TimedStep, now: float, *, prompts: bool) -> None:
        super()._plan_best_effort(step, now, prompts=prompts)
        planned = {sequence.id for sequence in step.sequences}
        self._passed_over = [s for s in self._decoding() if s.id not in planned]

    def _too_many(self, step: RidingStep) -> list[Sequence]:  # noqa: ARG002
        passed = {sequence.id for sequence in self._passed_over}
        return [sequence for sequence in self._decoding() if sequence.id in passed]

    def _decoding(self) -> list[Sequence]:
        running = [s for rank in self._best_effort for s in self._running_of(rank)]
        return [s for s in running if s.known - s.planned == 1]
