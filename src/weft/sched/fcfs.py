"""First come, first served, without phases, within class ranks.

Every step, for one class after the other: running sequences that need one token first (so that no
long prompt of their class stalls them), then running ones with more to compute in chunks, then new
ones, all within one token budget (chunked prefill). When rows or blocks run out, a sequence that
comes later is preempted and computed again on resume.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from weft.core.errors import InvariantError, OutOfMemoryError, ParameterError, WeftError
from weft.core.plan import (
    Commit,
    PromptLogprobs,
    RowAdd,
    RowExtend,
    StepPlan,
    StepResult,
    SubBatch,
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
from weft.sched.invariants import check_rows
from weft.sched.preempt import choose_victim
from weft.sched.queues import WaitingQueue
from weft.sched.sharing import SharedPrefixes
from weft.sched.step import Draft, Launched, Totals, news_of, spread

LOOK_UPS_A_STEP = 64  # waiting prompts that one step hashes and looks up at most


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one step and one sequence.

    Attributes:
        max_num_seqs: executor rows, so sequences that run at once.
        max_num_batched_tokens: tokens in one step, at least ``max_num_seqs``.
        max_model_len: tokens in one sequence, prompt and output.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order


class FCFSScheduler:
    """See the module docstring; implements ``weft.core.ports.Scheduler``."""

    def __init__(
        self,
        cache: KVCache,
        limits: Limits,
        classes: Seq[ServiceClass] = DEFAULT_CLASSES,
    ) -> None:
        self.cache = cache
        self.limits = limits
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.sequences: dict[int, Sequence] = {}
        self.totals = Totals()
        self._ranks = {row.name: row.rank for row in classes}
        self._shared = SharedPrefixes(cache.groups[0].block_size)
        self._closing: list[Sequence] = []
        self._launched: deque[Launched] = deque()
        self._free_rows = list(range(limits.max_num_seqs - 1, -1, -1))
        self._dropped: list[int] = []
        self._arrivals = 0
        self._planned_ns = 0

    # -- arrivals and cancellations -----------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ParameterError: duplicate id, unknown class, empty or over-long prompt.
            OutOfMemoryError: the sequence could never fit into the KV memory.
        """
        if request.id in self.sequences:
            raise ParameterError(f"Request id {request.id} is in use already.", param="id")
        if request.service_class not in self._ranks:
            raise ParameterError(
                f"Unknown service class '{request.service_class}'; "
                f"known: {', '.join(self._ranks)}.",
                param="service_class",
            )
        sequence = self._sequence(request)
        self.cache.register(request.id, request.cache_salt)
        self.totals.requests += 1
        self.sequences[request.id] = sequence
        self.waiting.add(sequence)

    def _sequence(self, request: Request) -> Sequence:
        prompt, limit = len(request.prompt), self.limits.max_model_len
        if not 0 < prompt < limit:
            raise ParameterError(
                f"The prompt has {prompt} tokens; the context takes 1 to {limit - 1} and at least "
                "one more for the output.",
                param="prompt",
            )
        wanted = request.sampling.max_tokens
        end = limit if wanted is None else min(limit, prompt + wanted)
        if end > self.cache.max_tokens():
            raise OutOfMemoryError(
                f"The request may grow to {end} tokens, but the KV memory holds "
                f"{self.cache.max_tokens()}; lower max_tokens or raise kv_memory."
            )
        self._arrivals += 1
        order = (self._ranks[request.service_class], self._arrivals)
        return Sequence(
            request, request.id, list(request.prompt), end, order, request.stop_ids(), prompt
        )

    def cancel(self, sequence_id: int, reason: FinishReason) -> list[Update]:
        """End a sequence; unknown or ended ones are ignored, since they may just have finished."""
        sequence = self.sequences.get(sequence_id)
        if sequence is None or sequence.state is SequenceState.FINISHED:
            return []
        self._finish(sequence, reason)
        self._close()
        return [news_of(sequence)]

    @property
    def idle(self) -> bool:
        return not self.sequences

    # -- planning -----------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """Return the next step, or None if nothing can be computed at present."""
        self._planned_ns = int(now * 1e9)
        self._close()
        draft = Draft(self.limits.max_num_batched_tokens)
        for rank in self._ranks_present():
            unfinished_prompts = self._plan_single_tokens(draft, rank)
            self._plan_chunks(draft, unfinished_prompts)
            self._admit(draft, rank)
        return self._launch(draft) if draft.rows else None

    def _ranks_present(self) -> list[int]:
        """Ranks that have running or waiting sequences, the best one first."""
        ranks = set(self.waiting.ranks())
        if self.running:
            ranks.update(range(self.running[0].order[0], self.running[-1].order[0] + 1))
        return sorted(ranks)

    def _running_of(self, rank: int) -> list[Sequence]:
        low = bisect_left(self.running, (rank, 0), key=_order)
        high = bisect_left(self.running, (rank + 1, 0), key=_order)
        return self.running[low:high]

    def _plan_single_tokens(self, draft: Draft, rank: int) -> list[Sequence]:
        """Add running sequences that need one token; return those that need more.

        This loop and ``_advance`` are the cost of a step, so they touch as little as they can: in
        steady state every sequence passes through here once a token.
        """
        more = []
        chosen: list[Sequence] = []
        starts: list[int] = []
        running = SequenceState.RUNNING
        add, start_at = chosen.append, starts.append
        for sequence in self._running_of(rank)[: draft.budget]:
            known, start = sequence.known, sequence.planned
            if known - start != 1:
                if known > start:
                    more.append(sequence)
                continue
            if known >= sequence.end or sequence.state is not running:
                continue
            if start >= sequence.capacity and not self._grow(draft, sequence, known):
                continue
            add(sequence)
            start_at(start)
            sequence.planned = known
            sequence.known = known + 1
        draft.put_single(chosen, starts)
        return more

    def _plan_chunks(self, draft: Draft, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            start = sequence.planned
            count = min(sequence.known - start, draft.budget)
            if count <= 0 or sequence.state is not SequenceState.RUNNING:
                continue
            if not self._grow(draft, sequence, start + count):
                count = min(count, self.cache.growable(sequence.id) - start)
                if count <= 0 or not self._grow(draft, sequence, start + count):
                    continue
            draft.put(sequence, count)

    def _grow(self, draft: Draft, sequence: Sequence, upto: int) -> bool:
        """Reserve blocks for the sequence's first ``upto`` tokens, preempting later ones."""
        while (grown := self.cache.extend(sequence.id, upto)) is None:
            if not self._make_room(sequence.order):
                return False
        for group, blocks in grown:
            draft.extends.append(RowExtend(sequence.row, group, blocks))
        sequence.capacity = self.cache.capacity(sequence.id)
        return True

    def _make_room(self, after: tuple[int, int]) -> bool:
        """Preempt one sequence that comes after ``after``; whether its blocks are free now."""
        if self._closing:
            return False  # blocks will come back when the launched steps are committed
        victim = choose_victim(self.running, after)
        if victim is None:
            return False
        self._preempt(victim)
        return victim.state is SequenceState.PAUSED

    def _admit(self, draft: Draft, rank: int) -> None:
        admitted = []
        looked_up = 0
        for sequence in self.waiting.of_rank(rank):
            if draft.budget <= 0 or looked_up == LOOK_UPS_A_STEP:
                break
            if sequence.waiting_on and self._shared.in_progress(sequence.waiting_on):
                continue
            hit = self._find_hit(sequence)
            looked_up += 1
            if sequence.waiting_on:
                continue
            if not self._find_row(sequence) or not self._open(draft, sequence, hit):
                break
            admitted.append(sequence)
        for sequence in admitted:
            self.waiting.remove(sequence)

    def _find_row(self, sequence: Sequence) -> bool:
        """Whether a row is free, taking one from a lower class if need be."""
        return bool(self._free_rows) or (
            self._make_room(self._below(sequence)) and bool(self._free_rows)
        )

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
        sequence.waiting_on = self._shared.awaited(sequence.order[0], digests, hit)
        return hit

    def _open(self, draft: Draft, sequence: Sequence, hit: int) -> bool:
        """Give the sequence a row and blocks for its first chunk, if all its tokens fit now."""
        self.cache.open(sequence.id, hit)
        upto = 0
        if self._make_fit(sequence):
            known = len(sequence.tokens)
            upto = min(known, hit + draft.budget, self.cache.growable(sequence.id))
        if upto <= hit or self.cache.extend(sequence.id, upto) is None:
            self.cache.release(sequence.id)
            return False
        self._start(draft, sequence, hit)
        draft.put(sequence, upto - hit)
        return True

    def _make_fit(self, sequence: Sequence) -> bool:
        """Preempt lower classes until the sequence fits, but nobody if that would not be enough."""
        known, chunk = len(sequence.tokens), self.limits.max_num_batched_tokens
        after = self._below(sequence)
        needs = self.cache.needs(sequence.id, known, chunk)
        spare = [pool.available for pool in self.cache.pools]
        for victim in self.running:
            if victim.order > after:
                spare = [a + b for a, b in zip(spare, self.cache.held(victim.id), strict=True)]
        if any(need > most for need, most in zip(needs, spare, strict=True)):
            return False
        while not self.cache.fits(sequence.id, known, chunk):
            if not self._make_room(after):
                return False
        return True

    def _start(self, draft: Draft, sequence: Sequence, hit: int) -> None:
        sequence.move_to(SequenceState.RUNNING)
        sequence.row = self._free_rows.pop()
        sequence.computed = sequence.planned = sequence.reused = hit
        sequence.seal_at = hit + 1
        sequence.capacity = self.cache.capacity(sequence.id)
        if sequence.cached < 0:
            sequence.cached = hit
            self.totals.cached_tokens += hit
            self.totals.prompt_tokens += sequence.num_prompt
            sequence.scheduled_ns = self._planned_ns
        if self.cache.prefix_caching:
            digests = self.cache.prompt_digests(sequence.id, sequence.tokens)
            self._shared.lead(sequence.id, sequence.order[0], digests, hit)
        insort(self.running, sequence, key=_order)
        draft.adds.append(
            RowAdd(
                row=sequence.row,
                sequence_id=sequence.id,
                tokens=tuple(sequence.tokens),
                num_prompt=sequence.num_prompt,
                sampling=sequence.request.sampling,
                stop_ids=sequence.stop_ids,
                tables=self.cache.tables(sequence.id),
            )
        )

    def _launch(self, draft: Draft) -> StepPlan:
        step_id = self.totals.steps = self.totals.steps + 1
        self._launched.append(Launched(step_id, draft.sequences, draft.counts, draft.samples))
        batch = SubBatch(
            tuple(draft.rows), tuple(draft.starts), tuple(draft.counts), tuple(draft.samples)
        )
        drop, self._dropped = tuple(self._dropped), []
        return StepPlan(
            step_id,
            (batch,),
            drop=drop,
            add=tuple(draft.adds),
            extend=tuple(draft.extends),
            zero=self.cache.take_zero(),
        )

    # -- committing ---------------------------------------------------------------------------

    def commit(self, result: StepResult, now: float = 0.0) -> Commit:
        """Take in the oldest launched step and return what is new."""
        step = self._launched.popleft()
        if step.step_id != result.step_id:
            raise InvariantError(f"step {result.step_id} committed, {step.step_id} expected")
        updates = [self._fault(i, error) for i, error in result.faults.items() if self._live(i)]
        self._deliver_prompt_logprobs(result, updates)
        tokens, due = self._advance(step, result, updates, int(now * 1e9))
        self.totals.output_tokens += len(result.tokens)
        self._seal(due)
        self._close()
        return Commit(tokens, updates)

    def _advance(
        self, step: Launched, result: StepResult, updates: list[Update], now_ns: int
    ) -> tuple[list[tuple[int, int]], list[Sequence]]:
        """Count what was computed and append the sampled tokens.

        Returns the tokens about which there is nothing else to say, and the sequences in which
        blocks became full. Like ``_plan_single_tokens`` this loop is the cost of a step.
        """
        due: list[Sequence] = []
        special: set[int] = set()
        logprobs = result.logprobs
        for sequence, count, sequence_id, token in zip(
            step.sequences, step.counts, *spread(step.samples, result), strict=True
        ):
            computed = sequence.computed = sequence.computed + count
            if computed >= sequence.seal_at:
                due.append(sequence)
                if not sequence.prefilled_ns and computed >= sequence.num_prompt:
                    sequence.prefilled_ns = now_ns
            if token < 0:
                continue
            if sequence_id != sequence.id:
                raise InvariantError(f"a token of sequence {sequence_id} came out of order")
            if sequence.finish is not None:
                special.add(sequence_id)
                continue
            tokens = sequence.tokens
            tokens.append(token)
            if token in sequence.stop_ids or len(tokens) >= sequence.end:
                stopped = token in sequence.stop_ids
                self._finish(sequence, FinishReason.STOP if stopped else FinishReason.LENGTH)
            elif not logprobs or sequence_id not in logprobs:
                continue
            special.add(sequence_id)
            updates.append(news_of(sequence, token, logprobs.get(sequence_id)))
        plain = list(zip(result.sequence_ids, result.tokens, strict=True))
        if special:
            plain = [pair for pair in plain if pair[0] not in special]
        return plain, due

    def _live(self, sequence_id: int) -> bool:
        sequence = self.sequences.get(sequence_id)
        return sequence is not None and sequence.state is not SequenceState.FINISHED

    def _fault(self, sequence_id: int, error: WeftError) -> Update:
        """End one sequence with its own error; nothing that it computed is shared from now on."""
        sequence = self.sequences[sequence_id]
        sequence.error = error
        self._finish(sequence, FinishReason.ERROR)
        return news_of(sequence)

    def _deliver_prompt_logprobs(self, result: StepResult, updates: list[Update]) -> None:
        for sequence_id, scores in result.prompt_logprobs.items():
            if not self._live(sequence_id):
                continue
            sequence = self.sequences[sequence_id]
            end = scores.start + len(scores.entries)
            if end > sequence.prompt_scored:
                # A preempted prompt is scored again from its start: pass on what is new.
                start = max(scores.start, sequence.prompt_scored)
                new = PromptLogprobs(start, scores.entries[start - scores.start :])
                sequence.prompt_scored = end
                updates.append(Update(sequence_id, None, prompt_logprobs=new))

    def _seal(self, due: list[Sequence]) -> None:
        for sequence in due:
            if sequence.error is not None:
                continue
            full_at = self.cache.commit(sequence.id, sequence.tokens, sequence.computed)
            prompt = sequence.num_prompt  # its end is looked at as well, to be dated
            sequence.seal_at = full_at if sequence.computed >= prompt else min(full_at, prompt)
            self._shared.advance(sequence.id, sequence.computed)

    # -- endings ------------------------------------------------------------------------------

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence for its client; its memory follows when no launched step touches it."""
        queued = sequence.state in (SequenceState.WAITING, SequenceState.PAUSED)
        if queued:
            self.waiting.remove(sequence)
        elif sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
        pausing = sequence.state is SequenceState.PAUSING
        sequence.move_to(SequenceState.FINISHED)
        sequence.finish = reason
        self.totals.count_end(reason)
        self._shared.abandon(sequence.id)
        if queued:
            self._forget(sequence)
        elif not pausing:
            self._closing.append(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.totals.preemptions += 1
        sequence.preemptions += 1
        self._shared.abandon(sequence.id)
        sequence.move_to(SequenceState.PAUSING)
        self._closing.append(sequence)
        self._close()

    def _close(self) -> None:
        """Take rows and blocks back from ended and preempted sequences with nothing in flight."""
        if not self._closing:
            return
        ready = [sequence for sequence in self._closing if sequence.pending == 0]
        self._closing = [sequence for sequence in self._closing if sequence.pending]
        for sequence in ready:
            self._dropped.append(sequence.row)
            self._free_rows.append(sequence.row)
            faulty_from = sequence.reused if sequence.error is not None else None
            self.cache.release(sequence.id, faulty_from=faulty_from)
            sequence.row, sequence.capacity = -1, 0
            sequence.computed = sequence.planned = 0
            if sequence.state is SequenceState.PAUSING:
                sequence.move_to(SequenceState.PAUSED)
                self.waiting.resume(sequence)
            else:
                self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        self.cache.forget(sequence.id)
        del self.sequences[sequence.id]

    def check(self) -> None:
        """Raise InvariantError if sequences, rows, queue or blocks do not agree."""
        self.cache.check()
        self.waiting.check()
        check_rows(self.running, self._closing, self._free_rows, self.limits.max_num_seqs)
        if len(self.running) + len(self._closing) + len(self.waiting) != len(self.sequences):
            raise InvariantError("a sequence is lost or listed twice")
        if not self.sequences and not self._shared.empty():
            raise InvariantError("a shared prefix is announced by nobody")
