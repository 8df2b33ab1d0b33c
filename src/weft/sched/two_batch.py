"""Load-aware scheduling over two tiers: host memory and cores enlarge the batch (NEO).

A step is what FCFS would compute on the device, and what the host can add to it (NEO section 3.2):

1. an empty step of two sub-batches;
2. device decodes into batch 0; the newest leave for the host before memory runs short, and the
   oldest come back while there is ample room;
3. prompts into batch 0, their KV to the device if it fits there, else to the host, in chunks;
4. host decodes into batch 1 or 0, as many as the device's work hides;
5. of the prompts for the host no more than covers batch 1 or costs nothing;
6. all that only if it is worth its time by prediction (``Balance``), in one or two sub-batches.

Beyond the paper: the oldest sequence on the host is computed after ``PATIENCE`` steps without it,
as soon as what it adds is ``HELP`` of their time and a step leaves room; prompts go to the host
only while it can keep up with the decodes that follow; a chunk for the host leaves layer by layer,
so that it needs no room on the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace

from weft.core.plan import StepOutputs, StepPlan, StepResult, Tier
from weft.core.types import Sequence, SequenceState
from weft.cost.model import step_time
from weft.cost.work import Work
from weft.sched.balance import Balance, HostShare, HostWork
from weft.sched.batch import BatchBuilder, TimedBatch
from weft.sched.memory_host import SwapMemory
from weft.sched.pace import HostSlowdown
from weft.sched.preempt import choose_victim
from weft.sched.scheduler import Scheduler, Slower, sub_batch

PATIENCE = 16  # steps that the oldest sequence on the host is left out of
HELP = 0.01  # of the time that it has waited, which is what a step may take longer for its sake
PRIOR_STEPS = 5  # decodes of one token, whose time predictions count as exact for at the start
NEWCOMERS = 16  # waiting prompts that one step considers for the host at most


class TwoBatch:
    """See the module docstring; implements ``weft.sched.scheduler.Part``.

    Args:
        balance: chooses what the host adds to a step.
        host_only: all KV lies with the host, so that all decode attention is computed there: the
            baseline that NEO calls FastDecode+ (section 5.1).
    """

    def __init__(self, memory: SwapMemory, balance: Balance, *, host_only: bool = False) -> None:
        self._memory = memory
        memory.takes_too_long = self._takes_too_long
        self._balance = balance
        self._host = memory.host
        self._host_only = host_only
        self._scheduler: Scheduler
        self._on_device = self._in_first = 0  # rows of the step: of the device, of batch 0
        self._decoding: deque[list[int]] = deque()  # ids that the host attends for
        self._left_out = 0  # steps since the oldest sequence on the host was computed
        self._waited_s = 0.0  # what these took by prediction
        self._step_s = 0.0  # predicted time of a step, averaged over the recent ones
        one = Work(tokens=1, sampled=1, decodes=1, decode_context=1)
        self._slowdown = HostSlowdown(PRIOR_STEPS * step_time(balance.cost, [one]))
        self._predicted_s = 0.0  # of the step that is being planned

    @property
    def slower(self) -> Slower:
        """Steps with decodes of the host are this much slower than predicted."""
        return Slower(ratio=self._slowdown.value)

    def attach(self, scheduler: Scheduler) -> None:
        """Attach to this scheduler."""
        self._scheduler = scheduler
        self._chunk = scheduler.limits.max_num_batched_tokens

    def _takes_too_long(self, tokens: int) -> bool:
        """Whether the KV of so many tokens is more than one step should bring back."""
        return self._balance.move_seconds(tokens) > self._step_s

    def filled(self, step: BatchBuilder) -> None:
        """Add what the host can to a step that is filled for the device."""
        assert isinstance(step, TimedBatch)
        self._on_device = self._in_first = len(step.rows)
        self._predicted_s = step.seconds()
        self._join_host(step)

    def commit(self, result: StepResult, outputs: StepOutputs, now: float) -> None:  # noqa: ARG002
        """Results of the host are results of the step; they are counted, and the step is timed."""
        self._slowdown.collected(now)
        self._balance.slowdown = self._slowdown.value
        ended = [number not in result.faults for number in self._decoding.popleft()]
        self._scheduler.totals.host_tokens += sum(ended)

    def check(self) -> None:
        """Nothing is remembered that could be untrue."""

    # -- what the host adds (steps 3 to 6) ------------------------------------------------------

    def _join_host(self, step: TimedBatch) -> None:
        on_host = self._memory.on_host()
        decodes = [s for s in on_host if s.id not in self._memory.moving.left and self._decodes(s)]
        pieces = [
            (s, s.known - s.planned)
            for s in on_host
            if s.id not in self._memory.moving.left and s.known - s.planned > 1
        ]
        newcomers = self._newcomers(step, on_host) if step.budget > 0 else []
        if not decodes and not pieces and not newcomers:
            if step.rows:
                self._pass_by(step, self._predicted_s)
            return
        work = HostWork(
            [s.planned + 1 for s in decodes],
            [
                *((s.planned, count) for s, count in pieces),
                *((0, len(s.tokens)) for s in newcomers),
            ],
            step.budget,
        )
        choice = self._choose(step, work, on_host)
        first, second = ([decodes[i] for i in chosen] for chosen in (choice.first, choice.second))
        wanted = {sequence.id for sequence in (*second, *first)}
        left, ready = self._reserve(step, on_host, wanted, choice.chunk)
        self._put_newcomers(step, newcomers, left)
        for sequence in first:
            if sequence.id in ready:
                step.put(sequence, 1)
        self._in_first = len(step.rows)
        for sequence in second:
            if sequence.id in ready:
                step.put(sequence, 1)
        if step.rows:
            self._predicted_s = choice.seconds
            self._pass_by(step, choice.seconds, on_host)

    def _decodes(self, sequence: Sequence) -> bool:
        """Whether the sequence needs one token and may have it now."""
        if sequence.known - sequence.planned != 1 or sequence.known >= sequence.end:
            return False
        return sequence.known <= sequence.synchronous_from or len(sequence.tokens) == sequence.known

    def _choose(self, step: TimedBatch, work: HostWork, on_host: Seq[Sequence]) -> HostShare:
        if self._host_only:
            return self._balance.choose_all(work)
        free = self._balance.choose(step.work, work)
        if not step.rows:
            # Launched steps and moves give the device something to do again.
            soon = bool(self._scheduler.launched or self._memory.moving.moves)
            if soon and self._takes(free) > self._step_s:
                return HostShare(0, (), (), 0.0, 0.0)
        elif not on_host or self._left_out < PATIENCE:
            return free
        waits_for_chunk = not on_host or on_host[0].known - on_host[0].planned > 1
        helped = self._balance.choose(step.work, work, (0, 1) if waits_for_chunk else (1, 0))
        affordable = self._takes(helped) - self._takes(free) <= HELP * self._waited_s
        return helped if affordable or not step.rows else free

    def _takes(self, share: HostShare) -> float:
        """Seconds of a step, with the slowdown of those that decode on the host."""
        decodes = share.first or share.second
        return share.seconds * (self._balance.slowdown if decodes else 1.0)

    def _pass_by(self, step: TimedBatch, seconds: float, on_host: Seq[Sequence] = ()) -> None:
        """Record the step's time and whether the oldest host sequence was left out."""
        self._step_s += (seconds - self._step_s) / 16 if self._step_s else seconds
        if on_host and not any(on_host[0] is s for s in step.sequences[self._on_device :]):
            self._left_out += 1
            self._waited_s += seconds
        else:
            self._left_out, self._waited_s = 0, 0.0

    def _newcomers(self, step: TimedBatch, on_host: Seq[Sequence]) -> list[Sequence]:
        """Waiting sequences, in order, whose prompts may go to the host.

        As many as the host can keep up with if all that it has decode in every step.
        """
        passed_over = bool(on_host) and self._left_out and self._balance.slowdown > 1
        if step.admission_blocked or passed_over:
            return []
        contexts = [sequence.known for sequence in on_host]
        seconds = max(self._step_s, step.seconds())
        found: list[Sequence] = []
        for sequence in self._next_waiting():
            contexts.append(len(sequence.tokens))
            busy = not self._host_only and self._balance.cpu_seconds(contexts) > seconds
            if (busy and seconds > 0) or len(found) == NEWCOMERS:
                break
            if sequence.end > self._host.max_tokens():
                break
            found.append(sequence)
        return found

    def _next_waiting(self) -> Iterator[Sequence]:
        for priority in self._scheduler.sequences.waiting.priorities():
            for sequence in self._scheduler.sequences.waiting.of_priority(priority):
                shared = sequence.waiting_on
                if not (shared and self._scheduler.sequences.prefix_wait.in_progress(shared)):
                    yield sequence

    def _reserve(
        self, step: TimedBatch, on_host: Seq[Sequence], decodes: set[int], chunk: int
    ) -> tuple[int, set[int]]:
        """Reserve blocks of the host, the oldest first, and put its prompts into the step.

        So a newcomer never takes what a decode needs. Returns what is left of the chunk, and which
        of the decodes have got room.
        """
        ready: set[int] = set()
        for sequence in on_host:
            count = min(chunk, sequence.known - sequence.planned)
            if (
                sequence.state is not SequenceState.RUNNING
                or sequence.id in self._memory.moving.left
            ):
                continue
            if sequence.id in decodes:
                if sequence.planned < sequence.capacity or self._grow_on_host(
                    step, sequence, sequence.known
                ):
                    ready.add(sequence.id)
                    self._memory.moving.kept.add(sequence.id)
            elif count > 0 and sequence.known - sequence.planned > 1:
                start = sequence.planned
                if not self._grow_on_host(step, sequence, start + count):
                    count = min(count, self._host.growable(sequence.id) - start)
                    if count <= 0 or not self._grow_on_host(step, sequence, start + count):
                        continue
                self._memory.moving.kept.add(sequence.id)
                step.put(sequence, count)
                chunk -= count
        return chunk, ready

    def _put_newcomers(self, step: TimedBatch, newcomers: Seq[Sequence], chunk: int) -> None:
        """Start prompts on the host in order, until one does not fit."""
        for sequence in newcomers:
            if chunk <= 0 or not self._scheduler.admission.find_row(sequence):
                break
            hit = 0
            if self._host.prefix_caching and sequence.request.sampling.prompt_logprobs is None:
                hit = self._host.find_prefix(sequence.id, sequence.tokens)
            known = len(sequence.tokens)
            self._host.open(sequence.id, hit)
            upto = min(known, hit + chunk, self._host.growable(sequence.id))
            if (
                upto <= hit
                or not self._host.fits(sequence.id, known, self._chunk)
                or self._host.extend(sequence.id, upto) is None
            ):
                self._host.release(sequence.id)
                break
            self._scheduler.sequences.waiting.remove(sequence)
            self._scheduler.admission.start(step, sequence, hit, self._host, Tier.HOST)
            self._memory.hosted.add(sequence.id)
            step.put(sequence, upto - hit)
            chunk -= upto - hit

    def _grow_on_host(self, step: TimedBatch, sequence: Sequence, upto: int) -> bool:
        """Reserve host blocks for the first ``upto`` tokens, preempting later ones of the host."""

        def newest() -> Sequence | None:
            kept = self._memory.moving.kept
            rest = [other for other in self._memory.on_host() if other.id not in kept]
            return choose_victim(rest, sequence.order)

        return self._memory.grow_on_host(step, sequence, upto, newest)

    # -- launching ------------------------------------------------------------------------------

    def launch(self, step: BatchBuilder, plan: StepPlan) -> StepPlan:
        """Split the rows of a plan into its sub-batches."""
        on_host = self._in_first - self._on_device
        tiers = (Tier.DEVICE,) * self._on_device + (Tier.HOST,) * on_host if on_host else ()
        batches = [sub_batch(step, 0, self._in_first, tiers)]
        rows = len(step.rows)
        if rows > self._in_first:
            tiers = (Tier.HOST,) * (rows - self._in_first)
            batches.append(sub_batch(step, self._in_first, rows, tiers))
        host = slice(self._on_device, rows)
        parts = zip(step.sequences[host], step.samples[host], step.counts[host], strict=True)
        decoding = [s.id for s, samples, count in parts if samples and count == 1]
        self._decoding.append(decoding)
        now = self._scheduler.admission.planned_ns / 1e9
        moves = self._memory.moves
        self._slowdown.launched(self._predicted_s, now, joined=bool(decoding), moves=moves)
        return replace(plan, batches=tuple(batch for batch in batches if batch.rows))
