"""What every scheduler shares: arrivals, chunks, growth, preemption, admission, launch and commit.

A scheduler is a ``Planner`` with a ``plan``: which sequences come first, and how much of them goes
into a step, which the step itself says (``OpenStep.room``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from weft.core.errors import ParameterError
from weft.core.plan import (
    Commit,
    RowAdd,
    RowExtend,
    StepPlan,
    StepResult,
    SubBatch,
    Tier,
    Update,
)
from weft.core.types import (
    DEFAULT_CLASSES,
    FinishReason,
    Request,
    Sequence,
    SequenceState,
    ServiceClass,
)
from weft.kv.cache import KVCache
from weft.kv.tiers import AnyCache, TieredCache
from weft.sched.arrive import sequence_of
from weft.sched.commit import Committer
from weft.sched.invariants import check_drafts
from weft.sched.lifecycle import Lifecycle, by_order
from weft.sched.preempt import choose_victim, covers
from weft.sched.step import Launched, OpenStep, end_after, news_of

Grown = list[tuple[int, tuple[int, ...]]]  # (group, new blocks)
LOOK_UPS_A_STEP = 64  # waiting prompts that one step hashes and looks up at most


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one step and one sequence.

    Attributes:
        max_num_seqs: executor rows, so sequences that run at once.
        max_num_batched_tokens: tokens in one step, at least ``max_num_seqs``.
        max_model_len: tokens in one sequence, prompt and output.
        speculation: tokens of the longest draft of a request that does not say; 0 for none.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    speculation: int = 0


class Planner(ABC):
    """Implements all of ``weft.core.ports.Scheduler`` but ``plan``.

    Attributes:
        cache: the KV of the device.
        ahead_tokens: admission leaves blocks free for so many more tokens of each sequence that
            runs, so that newcomers do not make those before them give way soon.
    """

    ahead_tokens = 32

    def __init__(
        self,
        cache: AnyCache,
        limits: Limits,
        classes: Seq[ServiceClass] = DEFAULT_CLASSES,
    ) -> None:
        self.cache = cache.device if isinstance(cache, TieredCache) else cache
        self.limits = limits
        self.live = Lifecycle(cache, limits.max_num_seqs)
        self.totals = self.live.totals
        self.waiting = self.live.waiting
        self.running = self.live.running
        self._committer = Committer(self.live)
        self._ranks = {row.name: row.rank for row in classes}
        self._launched: deque[Launched] = deque()
        self._arrivals = 0
        self._planned_ns = 0

    # -- arrivals and cancellations -----------------------------------------------------------

    def add(self, request: Request) -> list[Update]:
        """Queue a request; return its end if the output that it brings along is complete.

        Raises:
            ParameterError: duplicate id, unknown class, empty or over-long prompt.
            OutOfMemoryError: the sequence could never fit into the KV memory.
        """
        if request.id in self.live.sequences:
            raise ParameterError(f"Request id {request.id} is in use already.", param="id")
        if request.service_class not in self._ranks:
            raise ParameterError(
                f"Unknown service class '{request.service_class}'; "
                f"known: {', '.join(self._ranks)}.",
                param="service_class",
            )
        order = (self._ranks[request.service_class], self._arrivals + 1)
        sequence = sequence_of(
            request,
            order,
            max_model_len=self.limits.max_model_len,
            kv_tokens=self.cache.max_tokens(),
            speculation=self.limits.speculation,
        )
        self._arrivals += 1
        if request.output and (end := end_after(sequence, request.output[-1])) is not None:
            sequence.finish = end
            return [news_of(sequence)]
        self._consider(sequence)
        self.live.arrive(sequence)
        return []

    def _consider(self, sequence: Sequence) -> None:  # noqa: B027 - most schedulers take all
        """Look at a sequence before it is queued; a typed error refuses it."""

    def cancel(self, sequence_id: int, reason: FinishReason) -> list[Update]:
        """End a sequence; unknown or ended ones are ignored, since they may just have finished."""
        sequence = self.live.find(sequence_id)
        if sequence is None:
            return []
        self.live.finish(sequence, reason)
        self.live.close()
        return [news_of(sequence)]

    @property
    def idle(self) -> bool:
        return not self.live.sequences

    # -- planning -----------------------------------------------------------------------------

    @abstractmethod
    def plan(self, now: float) -> StepPlan | None:
        """Return the next step, or None if nothing can be computed at present."""

    def _open_plan(self, now: float) -> None:
        """Begin a plan: date it, and take back what committed steps have given free."""
        self._planned_ns = int(now * 1e9)
        self.live.close()

    def _plan_in_order(self, step: OpenStep) -> None:
        """Fill the step, one class after the other: single tokens, chunks, then new sequences."""
        for rank in self._ranks_present():
            rest = self._plan_single_tokens(step, self._running_of(rank))
            self._plan_chunks(step, rest)
            self._admit(step, rank)

    def _ranks_present(self) -> list[int]:
        """Ranks that have running or waiting sequences, the best one first."""
        ranks = set(self.waiting.ranks())
        if self.running:
            ranks.update(range(self.running[0].order[0], self.running[-1].order[0] + 1))
        return sorted(ranks)

    def _running_of(self, rank: int) -> list[Sequence]:
        low = bisect_left(self.running, (rank, 0), key=by_order)
        high = bisect_left(self.running, (rank + 1, 0), key=by_order)
        return self.running[low:high]

    def _plan_single_tokens(self, step: OpenStep, sequences: list[Sequence]) -> list[Sequence]:
        """Add running sequences that need one token; return those that need more care.

        This loop and ``_advance`` are the cost of a step, so they touch as little as they can: in
        steady state every sequence passes through here once a token.
        """
        more: list[Sequence] = []
        lockstep: list[Sequence] = []
        chosen: list[Sequence] = []
        starts: list[int] = []
        running = SequenceState.RUNNING
        add, start_at = chosen.append, starts.append
        for sequence in sequences[: step.budget]:
            known, start = sequence.known, sequence.planned
            if known - start != 1:
                if known > start:
                    more.append(sequence)
                continue
            if known >= sequence.end or sequence.state is not running:
                continue
            if start >= sequence.capacity and not self._go_on(step, sequence, lockstep):
                continue
            add(sequence)
            start_at(start)
            sequence.planned = known
            sequence.known = known + 1
        step.put_single(chosen, starts)
        if lockstep:
            self._plan_lockstep(step, lockstep)
        return more

    def _go_on(self, step: OpenStep, sequence: Sequence, lockstep: list[Sequence]) -> bool:
        """Whether a sequence that has come to its capacity may compute one token more.

        One in lockstep is put aside, to be planned where time matters less; if the result of its
        last step is not on the host yet, it is not planned at all.
        """
        if sequence.planned < sequence.lockstep_at:
            return self._grow(step, sequence, sequence.known)
        drafter = sequence.drafter
        if drafter is not None and not drafter.promising(sequence.tokens):
            sequence.lockstep_at = sequence.known + drafter.searched_in_vain()
            return self._grow(step, sequence, sequence.known)
        if len(sequence.tokens) == sequence.known:
            lockstep.append(sequence)
        return False

    def _plan_lockstep(self, step: OpenStep, sequences: list[Sequence]) -> None:
        """Add sequences whose last token is on the host, with drafts where there are some."""
        spare = step.budget - len(sequences)
        for sequence in sequences:
            if not self._plannable(sequence):
                continue
            draft = self._draft(step, sequence, spare)
            if not draft and not self._grow(step, sequence, sequence.known):
                continue
            step.put(sequence, 1)
            if draft:
                step.guess(sequence, draft)
                spare -= len(draft)

    def _draft(self, step: OpenStep, sequence: Sequence, spare: int) -> tuple[int, ...]:
        """Guess tokens and reserve their blocks, unless that would be at the cost of others."""
        if sequence.drafter is None:
            return ()
        most = step.room(sequence.known, min(spare, sequence.end - sequence.known - 1))
        draft = sequence.drafter.propose(sequence.tokens, most) if most > 0 else ()
        if not draft:
            sequence.lockstep_at = sequence.known + sequence.drafter.searched_in_vain()
            return ()
        grown = self.cache.extend(sequence.id, sequence.known + len(draft))
        if grown is None:
            return ()
        self._extend(step, sequence, grown)
        return draft

    def _plannable(self, sequence: Sequence) -> bool:
        """Whether the sequence did not have to give way since this plan began."""
        return sequence.state is SequenceState.RUNNING

    def _plan_chunks(self, step: OpenStep, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            start = sequence.planned
            count = step.room(start, sequence.known - start)
            if count <= 0 or not self._plannable(sequence):
                continue
            if not self._grow(step, sequence, start + count):
                count = min(count, self.cache.growable(sequence.id) - start)
                if count <= 0 or not self._grow(step, sequence, start + count):
                    continue
            step.put(sequence, count)

    def _grow(self, step: OpenStep, sequence: Sequence, upto: int) -> bool:
        """Reserve blocks for the sequence's first ``upto`` tokens, preempting later ones."""
        while (grown := self.cache.extend(sequence.id, upto)) is None:
            if not self._make_room(step, sequence.order):
                return False
        self._extend(step, sequence, grown)
        return True

    def _extend(self, step: OpenStep, sequence: Sequence, grown: Grown) -> None:
        for group, blocks in grown:
            step.extends.append(RowExtend(sequence.row, group, blocks))
        sequence.capacity = min(self.cache.capacity(sequence.id), sequence.lockstep_at)

    def _victims(self) -> Seq[Sequence]:
        """Running sequences whose memory others may get."""
        return self.running

    def _growing(self) -> Iterable[Sequence]:
        """Running sequences for which admission leaves blocks."""
        return self._victims()

    def _make_room(self, step: OpenStep, after: tuple[int, int]) -> bool:  # noqa: ARG002
        """Preempt one sequence that comes after ``after``; whether its blocks are free now."""
        if self.live.closing:
            return False  # blocks will come back when the launched steps are committed
        victim = choose_victim(self._victims(), after)
        if victim is None:
            return False
        self.live.preempt(victim)
        return victim.state is SequenceState.PAUSED

    def _admit(self, step: OpenStep, rank: int) -> None:
        """Start waiting sequences of the rank in order, until one does not fit.

        While blocks come back for that one, lower classes start nothing: they would take the blocks
        and be preempted for it in turn, for ever.
        """
        if step.held_back:
            return
        admitted = []
        looked_up = 0
        for sequence in self.waiting.of_rank(rank):
            if step.room(0, 1) <= 0 or looked_up == LOOK_UPS_A_STEP or not self._is_next(sequence):
                break
            if sequence.waiting_on and self.live.shared.in_progress(sequence.waiting_on):
                continue
            hit = self._find_hit(sequence)
            looked_up += 1
            if sequence.waiting_on:
                continue
            if not self._may_have_row(sequence) or not self._open(step, sequence, hit):
                step.held_back = self._blocks_come_back()
                break
            admitted.append(sequence)
        for sequence in admitted:
            self.waiting.remove(sequence)

    def _blocks_come_back(self) -> bool:
        """Whether launched steps give up blocks when they are committed."""
        return bool(self.live.closing)

    def _is_next(self, sequence: Sequence) -> bool:  # noqa: ARG002
        """Whether nobody goes before a waiting sequence that is the first of its class."""
        return True

    def _may_have_row(self, sequence: Sequence) -> bool:
        """Whether ``_find_row`` may find one; nobody is preempted."""
        return bool(self.live.free_rows) or self._row_victim(sequence) is not None

    def _find_row(self, sequence: Sequence) -> bool:
        """Whether a row is free, taking one from a lower class if need be."""
        if not self.live.free_rows:
            victim = self._row_victim(sequence)
            if victim is not None:
                self._preempt(victim)
        return bool(self.live.free_rows)

    def _row_victim(self, sequence: Sequence) -> Sequence | None:
        """Whose row a sequence may take; None while launched steps give rows back anyway."""
        if self.live.closing:
            return None
        return choose_victim(self._row_victims(), self._below(sequence))

    def _row_victims(self) -> Seq[Sequence]:
        """Running sequences whose rows others may get."""
        return self._victims()

    def _preempt(self, victim: Sequence) -> None:
        self.live.preempt(victim)

    def _below(self, sequence: Sequence) -> tuple[int, int]:
        """The order after which only lower classes come."""
        return (sequence.order[0], self._arrivals)

    def _find_hit(self, sequence: Sequence) -> int:
        """Look up the prefix cache; sets ``waiting_on`` if someone computes more of the prefix."""
        sequence.waiting_on = b""
        if not self.cache.prefix_caching or sequence.request.sampling.prompt_logprobs is not None:
            return 0
        hit = self.cache.find_prefix(sequence.id, sequence.tokens)
        digests = self.cache.prompt_digests(sequence.id, sequence.tokens)
        sequence.waiting_on = self.live.shared.awaited(sequence.order[0], digests, hit)
        return hit

    def _open(self, step: OpenStep, sequence: Sequence, hit: int) -> bool:
        """Give the sequence a row and blocks for its first chunk, if all its tokens fit now."""
        self.cache.open(sequence.id, hit)
        upto = 0
        count = step.room(hit, len(sequence.tokens) - hit)
        if count > 0 and self._make_fit(step, sequence) and self._find_row(sequence):
            upto = min(hit + count, self.cache.growable(sequence.id))
        if upto <= hit or self.cache.extend(sequence.id, upto) is None:
            self.cache.release(sequence.id)
            return False
        self._start(step, sequence, hit)
        step.put(sequence, upto - hit)
        rank, own = sequence.order[0], self._needed_soon([sequence])
        step.reserves[rank] = [a + b for a, b in zip(step.reserves[rank], own, strict=True)]
        return True

    def _make_fit(self, step: OpenStep, sequence: Sequence) -> bool:
        """Preempt lower classes until the sequence fits, but nobody if that would not be enough.

        It fits if there is room for all its tokens beside what the sequences that run, and need not
        give way to it, will ask for soon: else they would have to give way to each other.
        """
        rank, after = sequence.order[0], self._below(sequence)
        if rank not in step.reserves:
            stay = (running for running in self._growing() if running.order <= after)
            step.reserves[rank] = self._needed_soon(stay)
        known, chunk = len(sequence.tokens), self.limits.max_num_batched_tokens
        own = self.cache.needs(sequence.id, known, chunk)
        needs = [a + b for a, b in zip(own, step.reserves[rank], strict=True)]
        spare = self.cache.available()
        if covers(spare, needs):
            return True
        victims = [victim.id for victim in self._victims() if victim.order > after]
        freed = self.cache.freed(victims) if victims else [0] * len(spare)
        if not covers([a + b for a, b in zip(spare, freed, strict=True)], needs):
            return False
        while not covers(self.cache.available(), needs):
            if not self._make_room(step, after):
                return False
        return True

    def _needed_soon(
        self, sequences: Iterable[Sequence], ahead: int | None = None, chunk: int | None = None
    ) -> list[int]:
        """Blocks of each group that sequences ask for until each has ``ahead`` tokens more.

        Args:
            ahead: ``ahead_tokens``, if not given.
            chunk: tokens that each computes at once; all that a step may have, if not given.
        """
        ahead = self.ahead_tokens if ahead is None else ahead
        ends = ((s.id, min(s.known + ahead, s.end)) for s in sequences)
        return self.cache.needs_of_all(ends, chunk or self.limits.max_num_batched_tokens)

    def _start(
        self,
        step: OpenStep,
        sequence: Sequence,
        hit: int,
        cache: KVCache | None = None,
        tier: Tier = Tier.DEVICE,
    ) -> None:
        """Give a row to a sequence that has its blocks in the cache of a tier."""
        cache = cache or self.cache
        self.live.start(sequence, hit, self._planned_ns)
        sequence.capacity = min(cache.capacity(sequence.id), sequence.lockstep_at)
        step.adds.append(
            RowAdd(
                row=sequence.row,
                sequence_id=sequence.id,
                tokens=tuple(sequence.tokens),
                num_prompt=sequence.num_prompt,
                sampling=sequence.request.sampling,
                stop_ids=sequence.stop_ids,
                tables=cache.tables(sequence.id),
                embed=sequence.request.embed,
                tier=tier,
            )
        )

    def _launch(self, step: OpenStep) -> StepPlan:
        """Remember the step and return its plan, with all rows in one sub-batch on the device.

        A step that only moves KV has no sub-batch, so that nothing is computed for it.
        """
        step_id = self.totals.steps = self.totals.steps + 1
        self._launched.append(
            Launched(step_id, step.sequences, step.counts, step.samples, step.drafts)
        )
        return StepPlan(
            step_id,
            (self._batch(step, 0, len(step.rows)),) if step.rows else (),
            drop=self.live.take_dropped(),
            add=tuple(step.adds),
            extend=tuple(step.extends),
            zero=self.cache.take_zero(),
        )

    @staticmethod
    def _batch(step: OpenStep, first: int, end: int, tiers: tuple[Tier, ...] = ()) -> SubBatch:
        """Rows [first, end) of a step; those with drafts are in the first sub-batch."""
        return SubBatch(
            tuple(step.rows[first:end]),
            tuple(step.starts[first:end]),
            tuple(step.counts[first:end]),
            tuple(step.samples[first:end]),
            tiers,
            {} if first else {sequence.row: draft for sequence, draft in step.drafts},
        )

    # -- committing ---------------------------------------------------------------------------

    def commit(self, result: StepResult, now: float = 0.0) -> Commit:
        """Take in the oldest launched step and return what is new."""
        return self._committer.commit(self._launched.popleft(), result, int(now * 1e9))

    def check(self) -> None:
        """Raise InvariantError if sequences, rows, queue or blocks do not agree."""
        self.live.check()
        for launched in self._launched:
            check_drafts(launched.drafts, self.live.cache)
