"""Latency targets first, best effort in what is left (OmniServe section 3.3).

Classes with a target are latency-sensitive, the others are best effort. Every step: one token of
each latency-sensitive sequence that decodes, then chunks of latency-sensitive prompts, then
best-effort prompts, then best-effort decodes; all of it only as far as the step is predicted to
keep the tightest target for the time between tokens. Within a class it is first come, first served.

What the paper leaves open: predictions are corrected by what steps really take and kept below the
target by a margin; steps are shorter while a sequence is behind its target; a class with a laxer
target skips steps that are too full, as long as its own target allows; and one best-effort sequence
at a time, of a class that got nothing for too long, advances by a least piece in every step, so
none waits for ever.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Protocol

from weft.core.errors import ConfigError, InvariantError, TargetError
from weft.core.types import DEFAULT_CLASSES, Sequence, ServiceClass
from weft.cost.model import CostModel
from weft.cost.work import Work
from weft.sched.batch import TimedBatch
from weft.sched.first_token import first_token_s
from weft.sched.pace import Pace
from weft.sched.resources import DEFAULT_POLICY, Resources, TargetPolicy
from weft.sched.scheduler import Policy, Scheduler
from weft.sched.targets import check_targets

AGED = -1  # priority of the best-effort sequence that has waited for too long
LEAST_PIECE = 16  # tokens that cost hardly more than one (OmniServe section 3.3.1, flat region)
LONGEST_RETRY_S = 60
PRIOR_STEPS = 3  # steps at the tightest target that predictions count as exact for, at the start


def prioritise_by_target(classes: Seq[ServiceClass]) -> list[ServiceClass]:
    """The table with new priorities: first the classes with targets, each with one of its own."""
    urgent = [row for row in classes if row.has_target]
    others = [row for row in classes if row not in urgent]
    urgent.sort(key=lambda row: (row.priority, row.tpot_s or math.inf, row.ttft_s or math.inf))
    levels = sorted({row.priority for row in others})
    return [replace(row, priority=priority) for priority, row in enumerate(urgent)] + [
        replace(row, priority=len(urgent) + levels.index(row.priority)) for row in others
    ]


class BestEffortPart(Protocol):
    """Best-effort work beside the steps of the device."""

    def busy(self) -> bool:
        """Whether a step without rows has something to do."""

    def before_best_effort(self, step: TimedBatch, now: float, target_s: float) -> None:
        """Latency-sensitive sequences are in the step, whose target is given; best effort comes."""

    def after_best_effort(self, step: TimedBatch) -> Iterable[int]:
        """The step is full; return priorities that advance beside it."""

    def may_begin(self, fits: bool) -> bool:
        """Whether best-effort prompts may begin, given whether decodes of their class fit."""

    def blocks_come_back(self) -> bool:
        """Whether memory of the device is on its way back."""


class SLOPolicy:
    """See the module docstring; implements ``weft.sched.scheduler.Policy``.

    Attributes:
        best_effort: priorities of the classes without targets.
        part: what is done for best effort beside the steps of the device, if anything.
    """

    name = "slo"
    preempts_ahead = False

    def __init__(
        self,
        cost: CostModel,
        classes: Seq[ServiceClass] = DEFAULT_CLASSES,
        targets: TargetPolicy = DEFAULT_POLICY,
    ) -> None:
        """Raises ConfigError if no class has a target, or no load can meet one."""
        table = prioritise_by_target(classes)
        self.cost = cost
        check_targets(table, cost, targets)
        self.part: BestEffortPart | None = None
        self._scheduler: Scheduler
        self._keep(table, targets)
        self._num_urgent = len(self._with_target)
        top = max([row.priority for row in table[self._num_urgent :]], default=self._num_urgent)
        self.best_effort = range(self._num_urgent, top + 1)
        steady = min(self._tightest_s, self._tightest_ttft_s)
        self.pace = Pace(prior_s=PRIOR_STEPS * steady)
        self._now = self._looked_at = 0.0
        self._undated: list[Sequence] = []
        self._aged: Sequence | None = None
        self._served_at: dict[int, float] = {}
        self._token_at = [0.0] * self._num_urgent

    def _keep(self, table: Seq[ServiceClass], targets: TargetPolicy) -> None:
        self.classes: Seq[ServiceClass] = table
        self.targets = targets
        self._with_target = [row for row in table if row.has_target]
        tpots = [row.tpot_s for row in self._with_target if row.tpot_s is not None]
        self._tightest_s = min(tpots, default=math.inf)
        ttfts = [row.ttft_s for row in self._with_target if row.ttft_s is not None]
        self._tightest_ttft_s = min(ttfts, default=math.inf)

    def retarget(self, classes: Seq[ServiceClass], targets: TargetPolicy) -> None:
        """Keep other targets from the next step on.

        Args:
            classes: the same as before, with other targets.

        Raises:
            ConfigError: no load can meet one, or a class without would get one; nothing changed.
        """
        given = {row.name: row for row in classes}
        table = [
            replace(row, ttft_s=given[row.name].ttft_s, tpot_s=given[row.name].tpot_s)
            for row in self.classes
        ]
        for old, new in zip(self.classes, table, strict=True):
            if old.has_target != new.has_target:
                raise ConfigError(
                    f"Class '{old.name}' is best effort; a target makes it latency-sensitive, "
                    "which can only be set when the server starts.",
                    param=f"classes.{old.name}",
                )
        check_targets(table, self.cost, targets)
        self._keep(table, targets)

    def attach(self, scheduler: Scheduler) -> None:
        """Decide for this scheduler."""
        self._scheduler = scheduler
        self._limits, self._cache = scheduler.limits, scheduler.cache
        self._sequences, self._memory = scheduler.sequences, scheduler.memory
        self._filler, self._admission = scheduler.filler, scheduler.admission
        self._admission.growing = self._growing

    def running_of(self, priority: int) -> list[Sequence]:
        """Running sequences of a priority that the device computes, in order."""
        return self._memory.on_device(self._sequences.running_of(priority))

    # -- arrivals -----------------------------------------------------------------------------

    def consider(self, sequence: Sequence) -> None:
        """Refuse or demote a request whose first token would come too late.

        Raises:
            TargetError: it would, and ``TargetPolicy.admission`` is "reject".
        """
        priority = sequence.order[0]
        if priority >= self._num_urgent:
            return
        target = self._with_target[priority].ttft_s
        request = sequence.request
        known = request.output or request.crashes or request.memory_kills  # it was promised before
        if target is not None and self.targets.admission != "off" and not known:
            seconds = self._predict_first_token(sequence, target)
            if seconds > target:
                self._turn_away(sequence, seconds, target)
                return
        self._undated.append(sequence)

    def _predict_first_token(self, sequence: Sequence, target: float) -> float:
        """Seconds from the arrival of a new request to its first token.

        It may have arrived since the last look at the inbox, and nothing happens to it before the
        launched steps have ended.
        """
        self.pace.urgent = True
        sequence.reused = self._cached_tokens(sequence)
        prompts, decodes, tokens, count = [], Work(), sequence.known, 1
        for priority in range(self._num_urgent):
            for other in self.running_of(priority):
                tokens, count = tokens + self._known_soon(other), count + 1
                if other.known - other.planned <= 1:
                    decodes.add(other.known, 1)
                elif other.order < sequence.order:
                    prompts.append((other.planned, other.known - other.planned))
            for other in self._sequences.waiting.of_priority(priority):
                tokens, count = tokens + self._known_soon(other), count + 1
                if other.order < sequence.order:
                    prompts.append((other.reused, other.known - other.reused))
        if count > self._limits.max_num_seqs or tokens > self._cache.max_tokens():
            return math.inf  # it waits for others, whose end is unknown
        prompts.append((sequence.reused, sequence.known - sequence.reused))
        waits = self.pace.ends_at(self._now) - self._looked_at
        seconds = first_token_s(
            self.cost,
            prompts,
            decodes,
            limit_s=self._in_predictions(self._tpot_of(self._present() | {sequence.order[0]})),
            budget=self._limits.max_num_batched_tokens,
            patience_s=target / self.pace.correction,
        )
        return waits + seconds * self.pace.correction

    def _known_soon(self, sequence: Sequence) -> int:
        """Tokens for which admission leaves room to a sequence."""
        return min(sequence.known + self._memory.watermark_tokens, sequence.end)

    def _growing(self) -> Iterable[Sequence]:
        """Not the aged one: it advances by a least piece a step, however long it still is."""
        return (sequence for sequence in self._memory.growing() if sequence.order[0] != AGED)

    def _cached_tokens(self, sequence: Sequence) -> int:
        if sequence.request.sampling.prompt_logprobs is not None:
            return 0
        self._cache.register(sequence.id, sequence.request.cache_salt, sequence.request.images)
        hit = self._cache.find_prefix(sequence.id, sequence.tokens)
        self._cache.forget(sequence.id)
        return hit

    def _turn_away(self, sequence: Sequence, seconds: float, target: float) -> None:
        if self.targets.admission == "demote":
            self._scheduler.totals.demoted += 1
            sequence.order = (self.best_effort[0], sequence.order[1])
            return
        self._scheduler.totals.refused += 1
        name = sequence.request.service_class
        alone = [(sequence.reused, sequence.known - sequence.reused)]
        least = self.pace.correction * first_token_s(
            self.cost,
            alone,
            Work(),
            limit_s=self._in_predictions(self._tpot_of({sequence.order[0]})),
            budget=self._limits.max_num_batched_tokens,
        )
        if least > target:
            raise TargetError(
                f"The prompt of {sequence.num_prompt} tokens takes {least:.3g} s by itself, longer "
                f"than the {target:g} s in which class '{name}' promises the first token; choose "
                "another service tier.",
                retry_after_s=None,
            )
        retry = 1 if math.isinf(seconds) else min(LONGEST_RETRY_S, math.ceil(seconds - target))
        when = "not foreseeable" if math.isinf(seconds) else f"{seconds:.3g} s from now"
        raise TargetError(
            f"The first token would come too late: class '{name}' promises it within {target:g} s, "
            f"and it is {when}, as predicted; try again in {retry} s.",
            retry_after_s=retry,
        )

    # -- planning -----------------------------------------------------------------------------

    def fill(self, now: float) -> TimedBatch | None:
        """Return the next step, or None if there is nothing to do at present."""
        self._date_arrivals(now)
        if self._nothing_to_hold_back():
            return self._fill_urgent(now)
        begin = self.pace.ends_at(now)
        self.pace.urgent = bool(self._present())
        limit_s = self._catch_up(self._in_predictions(self._limit_s()), begin)
        step = self._new_step(limit_s)
        self._memory.make_way(step)
        self._fill(step, begin, now, self.part)
        if not (step.rows or self._memory.moves) and self.pace.device_idle:
            # Not even one token keeps the limit, so it is kept as well as it can be.
            step.lift_limit(LEAST_PIECE)
            self._fill(step, begin, now, None)
        if self._is_empty(step):
            return None
        step.predicted_s = self.pace.launched(
            step.seconds(), now, computes=bool(step.rows) or self.part is None,
            carries=step.carries, moves=self.part is not None and self._memory.moves,
            beside_s=step.beside_s,
        )  # fmt: skip
        return step

    def _nothing_to_hold_back(self) -> bool:
        """Whether there are latency-sensitive sequences only, and none is to be cut."""
        if self.targets.strict or self._aged is not None or self.part is not None:
            return False
        running, waiting = self._sequences.running, self._sequences.waiting.priorities()
        last = max(running[-1].order[0] if running else 0, waiting[-1] if waiting else 0)
        return last < self._num_urgent

    def _fill_urgent(self, now: float) -> TimedBatch | None:
        """Return a step of latency-sensitive sequences alone, as FCFS would fill it."""
        self.pace.urgent = True
        step = self._new_step(math.inf)
        self._memory.make_way(step)
        self._plan_urgent_prompts(step, self._plan_urgent_decodes(step, now))
        if self._is_empty(step):
            return None
        step.predicted_s = self.pace.launched(step.seconds(), now)
        return step

    def _new_step(self, limit_s: float) -> TimedBatch:
        return TimedBatch(self._limits.max_num_batched_tokens, cost=self.cost, limit_s=limit_s)

    def _fill(
        self, step: TimedBatch, begin: float, now: float, part: BestEffortPart | None
    ) -> None:
        self._choose_aged(now)
        self._plan_aged(step)
        limit_s = step.limit_s
        if not self.targets.strict:
            step.limit_s = math.inf
        prompts = self._plan_urgent_decodes(step, begin)
        due, done = self._plan_urgent_prompts(step, prompts)
        step.limit_s = limit_s
        step.limit_s = min(step.limit_s, (due - begin) / self.pace.correction)
        if step.rows and self._present():
            step.limit_s = min(step.limit_s, self.targets.slowdown * step.seconds())
        if part is not None:
            part.before_best_effort(step, now, self._in_predictions(self._limit_s()))
        self._plan_best_effort(step, now, prompts=done)
        if part is not None:
            for priority in part.after_best_effort(step):
                self._served_at[priority] = now

    def _is_empty(self, step: TimedBatch) -> bool:
        return not (step.rows or self._memory.moves or (self.part and self.part.busy()))

    def _date_arrivals(self, now: float) -> None:
        """Set when first tokens are due; a request may have waited since the last look."""
        since = self._looked_at if self._looked_at and not self.pace.idle else now
        for sequence in self._undated:
            target = self._with_target[sequence.order[0]].ttft_s
            sequence.due_s = math.inf if target is None else since + target
        self._undated.clear()
        self._now = self._looked_at = now

    def _in_predictions(self, seconds: float) -> float:
        """Seconds as the cost model counts them, with the margin taken off."""
        return seconds * (1 - self.targets.margin) / self.pace.correction

    def _limit_s(self) -> float:
        """Seconds that the next step may take.

        With no latency-sensitive sequence here, one may arrive at any time and wait for two steps
        (the launched one and the next): half of the tightest first-token target is left for them.
        """
        if present := self._present():
            return self._tpot_of(present)
        asked = self.targets.idle_step_s
        idle = min(self._tightest_ttft_s / 4, math.inf if asked is None else asked)
        return self._tightest_s if math.isinf(idle) else max(self._tightest_s, idle)

    def _catch_up(self, limit_s: float, begin: float) -> float:
        """Less than the limit, where a sequence has had longer steps than its target allows.

        Its next token is due so many times the target after its first one. Down to half of the
        limit, so that prompts that wait for their first token go on.
        """
        least = limit_s / 2
        for priority, target in enumerate(self._with_target):
            if target.tpot_s is None:
                continue
            for sequence in self.running_of(priority):
                if sequence.prefilled_ns and sequence.known - sequence.planned == 1:
                    tokens = sequence.known - sequence.num_prompt
                    due = sequence.prefilled_ns * 1e-9 + tokens * target.tpot_s
                    limit_s = min(limit_s, (due - begin) / self.pace.correction)
        return max(limit_s, least)

    def _present(self) -> set[int]:
        """Ranks of latency-sensitive classes that have sequences."""
        priorities = {priority for priority in range(self._num_urgent) if self.running_of(priority)}
        waiting = self._sequences.waiting.priorities()
        return priorities | {priority for priority in waiting if 0 <= priority < self._num_urgent}

    def _tpot_of(self, priorities: set[int]) -> float:
        """The tightest target between tokens of these priorities; of all, if they have none."""
        tpots = [self._with_target[priority].tpot_s for priority in priorities]
        return min([tpot for tpot in tpots if tpot is not None], default=self._tightest_s)

    def _plan_urgent_decodes(self, step: TimedBatch, begin: float) -> list[list[Sequence]]:
        """Add latency-sensitive sequences that decode; return, by priority, those that do not."""
        rest = []
        for priority, target in enumerate(self._with_target):
            running = self.running_of(priority)
            if step.rows and running and self._can_skip(step, running, target, begin):
                rest.append([s for s in running if s.known - s.planned > 1])
                continue
            rest.append(self._filler.single_tokens(step, running))
            if step.limit_s != math.inf:  # else nothing is skipped for want of time
                self._token_at[priority] = begin + step.seconds() * self.pace.correction
        return rest

    def _can_skip(
        self, step: TimedBatch, running: list[Sequence], target: ServiceClass, begin: float
    ) -> bool:
        """Whether a class would make the step too long, and may well decode in the next one."""
        if target.tpot_s is None or target.tpot_s < 2 * self._tightest_s:
            return False
        contexts = [s.planned for s in running if s.known - s.planned == 1]
        if step.decodes_that_fit(contexts) == len(contexts):
            return False
        next_token_at = begin + 2 * step.limit_s * self.pace.correction
        kept = target.tpot_s * (1 - self.targets.margin)
        return next_token_at - self._token_at[target.priority] <= kept

    def _plan_urgent_prompts(
        self, step: TimedBatch, running: list[list[Sequence]]
    ) -> tuple[float, bool]:
        """Add chunks of latency-sensitive prompts; return when the first of them is due.

        Also whether no latency-sensitive prompt is left after this step.
        """
        first, admitted = len(step.sequences), len(step.adds)
        for priority, sequences in enumerate(running):
            self._filler.chunks(step, sequences)
            self._admission.admit(step, priority)
        wanted = sum(map(len, running)) + len(step.adds) - admitted
        waits = any(
            0 <= priority < self._num_urgent for priority in self._sequences.waiting.priorities()
        )
        due = min((sequence.due_s for sequence in step.sequences[first:]), default=math.inf)
        return due, not waits and sum(step.samples[first:]) == wanted

    def _plan_best_effort(self, step: TimedBatch, now: float, *, prompts: bool) -> None:
        """Add best-effort prompts, if they may, and decodes, one class after the other."""
        for priority in self.best_effort:
            before, running = len(step.rows), self.running_of(priority)
            decodes = [s for s in running if s.known - s.planned == 1]
            contexts = [s.planned for s in decodes]
            if prompts:
                may_begin = self._may_begin(step, contexts)
                self._filler.chunks(step, [s for s in running if s.known - s.planned > 1])
                if may_begin:
                    self._admission.admit(step, priority)
            self._filler.single_tokens(step, decodes[: step.decodes_that_fit(contexts)])
            if len(step.rows) > before or not (
                running or priority in self._sequences.waiting.priorities()
            ):
                self._served_at[priority] = now

    def _may_begin(self, step: TimedBatch, contexts: list[int]) -> bool:
        """Whether best-effort prompts may begin, given the decodes of those that have.

        Not while the step cannot even hold these: they would take memory and give no token.
        """
        fits = step.decodes_that_fit(contexts) == len(contexts)
        return fits if self.part is None else self.part.may_begin(fits)

    # -- best effort that has waited for too long ---------------------------------------------

    def _choose_aged(self, now: float) -> None:
        if self._aged is not None and self._sequences.find(self._aged.id) is None:
            self._aged = None
        if self._aged is not None:
            return
        for priority in self.best_effort:
            if now - self._served_at.setdefault(priority, now) <= self.targets.patience_s:
                continue
            waiting = self._sequences.waiting.of_priority(priority)
            first = next(iter([*self.running_of(priority), *waiting]), None)
            if first is not None:
                self._served_at[priority] = now
                self._aged = first
                self._sequences.reorder(first, AGED)
                return

    def _plan_aged(self, step: TimedBatch) -> None:
        """Advance the aged sequence by a piece, before others take its memory.

        Without targets to keep at present, by as much as fits.
        """
        if self._aged is None:
            return
        limit, budget, tokens = step.limit_s, step.budget, step.work.tokens
        if self.pace.urgent or step.room(self._aged.planned, LEAST_PIECE) < LEAST_PIECE:
            step.limit_s = math.inf
            step.budget = max(1, min(LEAST_PIECE, budget // 2))
        running = self.running_of(AGED)
        self._filler.chunks(step, self._filler.single_tokens(step, running))
        self._admission.admit(step, AGED)
        if running and not step.rows:
            step.admission_blocked = bool(self._sequences.closing)  # what comes back is for it
        step.limit_s, step.budget = limit, budget - (step.work.tokens - tokens)
        waits = self._sequences.waiting.priorities()[:1] == [AGED]
        if waits and self.part is not None and self.part.blocks_come_back():
            step.admission_blocked = True  # what the device gets back is for it

    # -- committing ---------------------------------------------------------------------------

    def collected(self, now: float, *, leased: bool = False) -> None:
        """The oldest launched step has ended; ``now`` is 0 if the time is unknown."""
        self._looked_at = max(self._looked_at, self.pace.collected(now, leased=leased))
        self._now = max(self._now, now)

    def check(self) -> None:
        """Raise InvariantError if more than one sequence is served out of its turn."""
        aged = [*self.running_of(AGED), *self._sequences.waiting.of_priority(AGED)]
        if len(aged) > 1 or any(sequence is not self._aged for sequence in aged):
            raise InvariantError("more than one best-effort sequence is served out of its turn")


def make_policy(given: Resources) -> Policy:
    """Made of what a scheduler has."""
    return SLOPolicy(given.known_cost, given.classes, given.targets)
