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
from dataclasses import dataclass, replace

from weft.core.errors import ConfigError, InvariantError, TargetError
from weft.core.plan import Commit, StepPlan, StepResult
from weft.core.types import DEFAULT_CLASSES, Sequence, ServiceClass
from weft.cost.model import CostModel, step_time
from weft.cost.work import Work
from weft.kv.tiers import AnyCache
from weft.sched.admission import first_token_s
from weft.sched.pace import Pace
from weft.sched.planner import Limits, Planner
from weft.sched.timed import TimedStep

AGED = -1  # rank of the best-effort sequence that has waited for too long
LEAST_PIECE = 16  # tokens that cost hardly more than one (OmniServe section 3.3.1, flat region)
LONGEST_RETRY_S = 60
PRIOR_STEPS = 3  # steps at the tightest target that predictions count as exact for, at the start


@dataclass(frozen=True, slots=True)
class Policy:
    """How targets are kept.

    Attributes:
        admission: what becomes of a request that would miss its target for the first token, as is
            predicted: "demote" serves it as best effort, "reject" refuses it with the time after
            which it may come again, "off" takes it and lets it be late.
        margin: share of the target between tokens that predictions leave unused.
        patience_s: seconds without progress after which a best-effort class is helped.
    """

    admission: str = "demote"
    margin: float = 0.1
    patience_s: float = 30.0


DEFAULT_POLICY = Policy()


def rank_by_target(classes: Seq[ServiceClass]) -> list[ServiceClass]:
    """The table with new ranks: first the classes with targets, each with a rank of its own."""
    urgent = [row for row in classes if row.ttft_s is not None or row.tpot_s is not None]
    others = [row for row in classes if row not in urgent]
    urgent.sort(key=lambda row: (row.rank, row.tpot_s or math.inf, row.ttft_s or math.inf))
    levels = sorted({row.rank for row in others})
    return [replace(row, rank=rank) for rank, row in enumerate(urgent)] + [
        replace(row, rank=len(urgent) + levels.index(row.rank)) for row in others
    ]


def check_targets(classes: Seq[ServiceClass], cost: CostModel, policy: Policy) -> None:
    """Raise ConfigError if a target would be missed by a server that has nothing else to do."""
    if not any(row.ttft_s or row.tpot_s for row in classes):
        raise ConfigError(
            "No service class has a target, so scheduler slo has nothing to keep; give one a "
            "ttft_s or tpot_s, or take scheduler fcfs.",
            param="classes",
        )
    decode = Work()
    decode.add(1, 1)
    takes = step_time(cost, [decode])
    least = takes / (1 - policy.margin)
    for row in classes:
        for name, target in (("tpot_s", row.tpot_s), ("ttft_s", row.ttft_s)):
            if target is not None and target < least:
                raise ConfigError(
                    f"Class '{row.name}' has {name} {target:g}, but a step with a single token "
                    f"takes {takes:.4g} s as predicted, and a margin of {policy.margin:.0%} is "
                    f"kept: no load can meet it. Raise it to {least:.4g} at least.",
                    param="classes",
                )


class SLOScheduler(Planner):
    """See the module docstring; implements ``weft.core.ports.Scheduler``."""

    def __init__(
        self,
        cache: AnyCache,
        limits: Limits,
        cost: CostModel,
        classes: Seq[ServiceClass] = DEFAULT_CLASSES,
        policy: Policy = DEFAULT_POLICY,
    ) -> None:
        """Raises ConfigError if no class has a target, or no load can meet one."""
        table = rank_by_target(classes)
        super().__init__(cache, limits, table)
        self.cost = cost
        self.policy = policy
        check_targets(table, cost, self.policy)
        self._targets = [row for row in table if row.ttft_s is not None or row.tpot_s is not None]
        self._num_urgent = len(self._targets)
        top = max([row.rank for row in table[self._num_urgent :]], default=self._num_urgent)
        self._best_effort = range(self._num_urgent, top + 1)
        tpots = [row.tpot_s for row in self._targets if row.tpot_s is not None]
        self._tightest_s = min(tpots, default=math.inf)
        ttfts = [row.ttft_s for row in self._targets if row.ttft_s is not None]
        self._tightest_ttft_s = min(ttfts, default=math.inf)
        steady = min(self._tightest_s, self._tightest_ttft_s)
        self.pace = Pace(prior_s=PRIOR_STEPS * steady)
        self._now = self._looked_at = 0.0
        self._undated: list[Sequence] = []
        self._aged: Sequence | None = None
        self._served_at: dict[int, float] = {}
        self._token_at = [0.0] * self._num_urgent

    # -- arrivals -----------------------------------------------------------------------------

    def _consider(self, sequence: Sequence) -> None:
        """Refuse or demote a request whose first token would come too late.

        Raises:
            TargetError: it would, and ``Policy.admission`` is "reject".
        """
        rank = sequence.order[0]
        if rank >= self._num_urgent:
            return
        target = self._targets[rank].ttft_s
        request = sequence.request
        known = request.output or request.crashes or request.memory_kills  # it was promised before
        if target is not None and self.policy.admission != "off" and not known:
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
        for rank in range(self._num_urgent):
            for other in self._running_of(rank):
                tokens, count = tokens + self._known_soon(other), count + 1
                if other.known - other.planned <= 1:
                    decodes.add(other.known, 1)
                elif other.order < sequence.order:
                    prompts.append((other.planned, other.known - other.planned))
            for other in self.waiting.of_rank(rank):
                tokens, count = tokens + self._known_soon(other), count + 1
                if other.order < sequence.order:
                    prompts.append((other.reused, other.known - other.reused))
        if count > self.limits.max_num_seqs or tokens > self.cache.max_tokens():
            return math.inf  # it waits for the end of others, and nobody knows when that is
        prompts.append((sequence.reused, sequence.known - sequence.reused))
        waits = self.pace.ends_at(self._now) - self._looked_at
        seconds = first_token_s(
            self.cost,
            prompts,
            decodes,
            limit_s=self._in_predictions(self._tpot_of(self._present() | {sequence.order[0]})),
            budget=self.limits.max_num_batched_tokens,
            patience_s=target / self.pace.correction,
        )
        return waits + seconds * self.pace.correction

    def _known_soon(self, sequence: Sequence) -> int:
        """Tokens for which admission leaves room to a sequence."""
        return min(sequence.known + self.ahead_tokens, sequence.end)

    def _growing(self) -> Iterable[Sequence]:
        """Not the aged one: it advances by a least piece a step, however long it still is."""
        return (sequence for sequence in super()._growing() if sequence.order[0] != AGED)

    def _cached_tokens(self, sequence: Sequence) -> int:
        if sequence.request.sampling.prompt_logprobs is not None:
            return 0
        self.cache.register(sequence.id, sequence.request.cache_salt)
        hit = self.cache.find_prefix(sequence.id, sequence.tokens)
        self.cache.forget(sequence.id)
        return hit

    def _turn_away(self, sequence: Sequence, seconds: float, target: float) -> None:
        if self.policy.admission == "demote":
            self.totals.demoted += 1
            sequence.order = (self._best_effort[0], sequence.order[1])
            return
        self.totals.refused += 1
        name = sequence.request.service_class
        alone = [(sequence.reused, sequence.known - sequence.reused)]
        least = self.pace.correction * first_token_s(
            self.cost,
            alone,
            Work(),
            limit_s=self._in_predictions(self._tpot_of({sequence.order[0]})),
            budget=self.limits.max_num_batched_tokens,
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

    def plan(self, now: float) -> StepPlan | None:
        """Return the next step, or None if nothing can be computed at present."""
        self._open_plan(now)
        self._date_arrivals(now)
        begin = self.pace.ends_at(now)
        self.pace.urgent = bool(self._present())
        step = self._fill(begin, self._catch_up(self._in_predictions(self._limit_s()), begin), now)
        if self._is_empty(step) and self.pace.idle:
            # Not even one token keeps the limit, so it is kept as well as it can be.
            step = self._fill(begin, math.inf, now, LEAST_PIECE)
        if self._is_empty(step):
            return None
        self.pace.launched(step.seconds(), now)
        return self._launch(step)

    def _fill(self, begin: float, limit_s: float, now: float, most: int = 2**31) -> TimedStep:
        budget = min(most, self.limits.max_num_batched_tokens)
        step = self._new_step(budget, limit_s)
        self._choose_aged(now)
        self._plan_aged(step)
        prompts = self._plan_urgent_decodes(step, begin)
        due, done = self._plan_urgent_prompts(step, prompts)
        step.limit_s = min(step.limit_s, (due - begin) / self.pace.correction)
        self._plan_best_effort(step, now, prompts=done)
        return step

    def _new_step(self, budget: int, limit_s: float) -> TimedStep:
        return TimedStep(budget, cost=self.cost, limit_s=limit_s)

    def _is_empty(self, step: TimedStep) -> bool:
        return not step.rows

    def _date_arrivals(self, now: float) -> None:
        """Set when first tokens are due; a request may have waited since the last look."""
        since = self._looked_at if self._looked_at and not self.pace.idle else now
        for sequence in self._undated:
            target = self._targets[sequence.order[0]].ttft_s
            sequence.due_s = math.inf if target is None else since + target
        self._undated.clear()
        self._now = self._looked_at = now

    def _in_predictions(self, seconds: float) -> float:
        """Seconds as the cost model counts them, with the margin taken off."""
        return seconds * (1 - self.policy.margin) / self.pace.correction

    def _limit_s(self) -> float:
        """Seconds that the next step may take.

        With no latency-sensitive sequence here, one may arrive at any time and wait for two steps
        (the launched one and the next): half of the tightest first-token target is left for them.
        """
        if present := self._present():
            return self._tpot_of(present)
        idle = self._tightest_ttft_s / 4
        return self._tightest_s if math.isinf(idle) else max(self._tightest_s, idle)

    def _catch_up(self, limit_s: float, begin: float) -> float:
        """Less than the limit, where a sequence has had longer steps than its target allows.

        Its next token is due so many times the target after its first one. Down to half of the
        limit, so that prompts that wait for their first token go on.
        """
        least = limit_s / 2
        for rank, target in enumerate(self._targets):
            if target.tpot_s is None:
                continue
            for sequence in self._running_of(rank):
                if sequence.prefilled_ns and sequence.known - sequence.planned == 1:
                    tokens = sequence.known - sequence.num_prompt
                    due = sequence.prefilled_ns * 1e-9 + tokens * target.tpot_s
                    limit_s = min(limit_s, (due - begin) / self.pace.correction)
        return max(limit_s, least)

    def _present(self) -> set[int]:
        """Ranks of latency-sensitive classes that have sequences."""
        ranks = {rank for rank in range(self._num_urgent) if self._running_of(rank)}
        return ranks | {rank for rank in self.waiting.ranks() if 0 <= rank < self._num_urgent}

    def _tpot_of(self, ranks: set[int]) -> float:
        """The tightest target between tokens of these ranks; of all, if they have none."""
        tpots = [self._targets[rank].tpot_s for rank in ranks]
        return min([tpot for tpot in tpots if tpot is not None], default=self._tightest_s)

    def _plan_urgent_decodes(self, step: TimedStep, begin: float) -> list[list[Sequence]]:
        """Add latency-sensitive sequences that decode; return, by rank, those that do not."""
        rest = []
        for rank, target in enumerate(self._targets):
            running = self._running_of(rank)
            if step.rows and running and self._can_skip(step, running, target, begin):
                rest.append([s for s in running if s.known - s.planned > 1])
                continue
            rest.append(self._plan_single_tokens(step, running))
            self._token_at[rank] = begin + step.seconds() * self.pace.correction
        return rest

    def _can_skip(
        self, step: TimedStep, running: list[Sequence], target: ServiceClass, begin: float
    ) -> bool:
        """Whether a class would make the step too long, and may well decode in the next one."""
        if target.tpot_s is None or target.tpot_s < 2 * self._tightest_s:
            return False
        contexts = [s.planned for s in running if s.known - s.planned == 1]
        if step.decodes_that_fit(contexts) == len(contexts):
            return False
        next_token_at = begin + 2 * step.limit_s * self.pace.correction
        kept = target.tpot_s * (1 - self.policy.margin)
        return next_token_at - self._token_at[target.rank] <= kept

    def _plan_urgent_prompts(
        self, step: TimedStep, running: list[list[Sequence]]
    ) -> tuple[float, bool]:
        """Add chunks of latency-sensitive prompts; return when the first of them is due.

        Also whether no latency-sensitive prompt is left after this step.
        """
        first, admitted = len(step.sequences), len(step.adds)
        for rank, sequences in enumerate(running):
            self._plan_chunks(step, sequences)
            self._admit(step, rank)
        wanted = sum(map(len, running)) + len(step.adds) - admitted
        waits = any(0 <= rank < self._num_urgent for rank in self.waiting.ranks())
        due = min((sequence.due_s for sequence in step.sequences[first:]), default=math.inf)
        return due, not waits and sum(step.samples[first:]) == wanted

    def _plan_best_effort(self, step: TimedStep, now: float, *, prompts: bool) -> None:
        """Add best-effort prompts, if they may, and decodes, one class after the other."""
        for rank in self._best_effort:
            before, running = len(step.rows), self._running_of(rank)
            decodes = [s for s in running if s.known - s.planned == 1]
            contexts = [s.planned for s in decodes]
            if prompts:
                may_begin = self._may_begin(step, contexts)
                self._plan_chunks(step, [s for s in running if s.known - s.planned > 1])
                if may_begin:
                    self._admit(step, rank)
            self._plan_single_tokens(step, decodes[: step.decodes_that_fit(contexts)])
            if len(step.rows) > before or not (running or rank in self.waiting.ranks()):
                self._served_at[rank] = now

    def _may_begin(self, step: TimedStep, contexts: list[int]) -> bool:
        """Whether best-effort prompts may begin, given the decodes of those that have.

        Not while the step cannot even hold these: they would take memory and give no token.
        """
        return step.decodes_that_fit(contexts) == len(contexts)

    # -- best effort that has waited for too long ---------------------------------------------

    def _choose_aged(self, now: float) -> None:
        if self._aged is not None and self.live.find(self._aged.id) is None:
            self._aged = None
        if self._aged is not None:
            return
        for rank in self._best_effort:
            if now - self._served_at.setdefault(rank, now) <= self.policy.patience_s:
                continue
            first = next(iter([*self._running_of(rank), *self.waiting.of_rank(rank)]), None)
            if first is not None:
                self._served_at[rank] = now
                self._aged = first
                self.live.reorder(first, AGED)
                return

    def _plan_aged(self, step: TimedStep) -> None:
        """Advance the aged sequence by a piece, before others take its memory.

        Without targets to keep at present, by as much as fits.
        """
        if self._aged is None:
            return
        limit, budget, tokens = step.limit_s, step.budget, step.work.tokens
        if self.pace.urgent or step.room(self._aged.planned, LEAST_PIECE) < LEAST_PIECE:
            step.limit_s = math.inf
            step.budget = max(1, min(LEAST_PIECE, budget // 2))
        running = self._running_of(AGED)
        self._plan_chunks(step, self._plan_single_tokens(step, running))
        self._admit(step, AGED)
        if running and not step.rows:
            step.held_back = bool(self.live.closing)  # what comes back is for it
        step.limit_s, step.budget = limit, budget - (step.work.tokens - tokens)

    # -- committing ---------------------------------------------------------------------------

    def commit(self, result: StepResult, now: float = 0.0) -> Commit:
        """Take in the oldest launched step and return what is new."""
        self.pace.collected(now)
        self._now = max(self._now, now)
        return Planner.commit(self, result, now)

    def check(self) -> None:
        """Raise InvariantError if sequences, rows, queue or blocks do not agree."""
        Planner.check(self)
        aged = [*self._running_of(AGED), *self.waiting.of_rank(AGED)]
        if len(aged) > 1 or any(sequence is not self._aged for sequence in aged):
            raise InvariantError("more than one best-effort sequence is served out of its turn")
