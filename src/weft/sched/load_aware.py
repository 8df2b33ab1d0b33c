"""Load-aware scheduling over two tiers: the host's memory and cores enlarge the batch (NEO).

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

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from weft.core.plan import RowExtend, StepPlan, Tier
from weft.core.types import DEFAULT_CLASSES, Sequence, SequenceState, ServiceClass
from weft.cost.model import CostModel
from weft.kv.tiers import TieredCache
from weft.sched.balance import Balance, Choice, HostWork
from weft.sched.planner import Limits
from weft.sched.preempt import choose_victim
from weft.sched.step import OpenStep
from weft.sched.tiered import TieredPlanner
from weft.sched.timed import TimedStep

PATIENCE = 16  # steps that the oldest sequence on the host is left out of
HELP = 0.01  # of the time that it has waited, which is what a step may take longer for its sake
NEWCOMERS = 16  # waiting prompts that one step considers for the host at most


@dataclass(slots=True, kw_only=True)
class LoadAwareStep(TimedStep):
    """An open step over two tiers; rows of the device come first, then those of the host.

    Attributes:
        on_device: rows whose KV lies on the device.
        in_first: rows of batch 0.
    """

    on_device: int = 0
    in_first: int = 0

    def room(self, start: int, most: int) -> int:
        """As many as the budget allows: the time of a step is not limited."""
        return OpenStep.room(self, start, most)


class LoadAwareScheduler(TieredPlanner):
    """See the module docstring; implements ``weft.core.ports.Scheduler``.

    Args:
        cost: what step times are predicted with.
        host_only: all KV lies with the host, so that all decode attention is computed there: the
            baseline that NEO calls FastDecode+ (section 5.1).
    """

    ahead_tokens = 0  # who gives way is computed on the host: that is how it fills

    def __init__(
        self,
        cache: TieredCache,
        limits: Limits,
        cost: CostModel,
        classes: Seq[ServiceClass] = DEFAULT_CLASSES,
        *,
        host_only: bool = False,
    ) -> None:
        super().__init__(cache, limits, classes)
        self._cost = cost
        self._balance = Balance(cost, limits.max_num_batched_tokens)
        self._host_only = host_only
        self._left_out = 0  # steps since the oldest sequence on the host was computed
        self._waited_s = 0.0  # what these took by prediction
        self._step_s = 0.0  # predicted time of a step, averaged over the recent ones

    # -- planning -----------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """Return the next step, or None if nothing can be computed at present."""
        self._open_plan(now)
        step = LoadAwareStep(
            self.limits.max_num_batched_tokens, cost=self._cost, limit_s=float("inf")
        )
        self._swap_out_ahead(step)
        if not self._host_only:
            self._swap_in(step)
            self._plan_in_order(step)
        step.on_device = step.in_first = len(step.rows)
        self._join_host(step)
        return self._launch(step) if step.rows or self._moving.moves else None

    # -- hooks ----------------------------------------------------------------------------------

    def _move(self, step: OpenStep, sequence: Sequence, *, after_layer: bool = False) -> bool:
        assert isinstance(step, LoadAwareStep)
        moved = super()._move(step, sequence, after_layer=after_layer)
        if moved and sequence.id in self._hosted:
            step.work.out_tokens += sequence.planned
        elif moved:
            step.work.in_tokens += sequence.planned
        return moved

    def _takes_too_long(self, tokens: int) -> bool:
        return self._balance.move_seconds(tokens) > self._step_s

    # -- what the host adds (steps 3 to 6) ------------------------------------------------------

    def _join_host(self, step: LoadAwareStep) -> None:
        on_host = self._on_host()
        decodes = [s for s in on_host if s.id not in self._moving.left and self._decodes(s)]
        pieces = [
            (s, s.known - s.planned)
            for s in on_host
            if s.id not in self._moving.left and s.known - s.planned > 1
        ]
        newcomers = self._newcomers(step, on_host) if step.budget > 0 else []
        if not decodes and not pieces and not newcomers:
            if step.rows:
                self._pass_by(step, step.seconds())
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
        second, first = decodes[: choice.second], decodes[choice.second :][: choice.first]
        wanted = {sequence.id for sequence in (*second, *first)}
        left, ready = self._reserve(step, on_host, wanted, choice.chunk)
        self._put_newcomers(step, newcomers, left)
        for sequence in first:
            if sequence.id in ready:
                step.put(sequence, 1)
        step.in_first = len(step.rows)
        for sequence in second:
            if sequence.id in ready:
                step.put(sequence, 1)
        if step.rows:
            self._pass_by(step, choice.seconds, on_host)

    def _decodes(self, sequence: Sequence) -> bool:
        """Whether the sequence needs one token and may have it now."""
        if sequence.known - sequence.planned != 1 or sequence.known >= sequence.end:
            return False
        return sequence.known <= sequence.lockstep_at or len(sequence.tokens) == sequence.known

    def _choose(self, step: LoadAwareStep, work: HostWork, on_host: Seq[Sequence]) -> Choice:
        if self._host_only:
            return self._balance.choose_all(work)
        free = self._balance.choose(step.work, work)
        if not step.rows:
            # Launched steps and moves give the device something to do again.
            soon = bool(self._launched or self._moving.moves)
            if soon and free.seconds > self._step_s:
                return Choice(0, 0, 0, 0.0, 0.0)
        elif not on_host or self._left_out < PATIENCE:
            return free
        waits_for_chunk = not on_host or on_host[0].known - on_host[0].planned > 1
        helped = self._balance.choose(step.work, work, (0, 1) if waits_for_chunk else (1, 0))
        affordable = helped.seconds - free.seconds <= HELP * self._waited_s
        return helped if affordable or not step.rows else free

    def _pass_by(self, step: LoadAwareStep, seconds: float, on_host: Seq[Sequence] = ()) -> None:
        """Note how long the step takes and whether the oldest on the host was left out."""
        self._step_s += (seconds - self._step_s) / 16 if self._step_s else seconds
        if on_host and not any(on_host[0] is s for s in step.sequences[step.on_device :]):
            self._left_out += 1
            self._waited_s += seconds
        else:
            self._left_out, self._waited_s = 0, 0.0

    def _newcomers(self, step: LoadAwareStep, on_host: Seq[Sequence]) -> list[Sequence]:
        """Waiting sequences, in order, whose prompts may go to the host.

        As many as the host can keep up with if all that it has decode in every step.
        """
        if step.held_back:
            return []
        contexts = [sequence.known for sequence in on_host]
        seconds = max(self._step_s, step.seconds())
        found: list[Sequence] = []
        for sequence in self._next_waiting():
            contexts.append(len(sequence.tokens))
            busy = not self._host_only and self._balance.cpu_seconds(contexts) > seconds
            if (busy and seconds > 0) or len(found) == NEWCOMERS:
                break
            if sequence.end > self.host.max_tokens():
                break
            found.append(sequence)
        return found

    def _next_waiting(self) -> Iterator[Sequence]:
        for rank in self.waiting.ranks():
            for sequence in self.waiting.of_rank(rank):
                shared = sequence.waiting_on
                if not (shared and self.live.shared.in_progress(shared)):
                    yield sequence

    def _reserve(
        self, step: LoadAwareStep, on_host: Seq[Sequence], decodes: set[int], chunk: int
    ) -> tuple[int, set[int]]:
        """Reserve blocks of the host, the oldest first, and put its prompts into the step.

        So a newcomer never takes what a decode needs. Returns what is left of the chunk, and which
        of the decodes have got room.
        """
        ready: set[int] = set()
        for sequence in on_host:
            count = min(chunk, sequence.known - sequence.planned)
            if sequence.state is not SequenceState.RUNNING or sequence.id in self._moving.left:
                continue
            if sequence.id in decodes:
                if sequence.planned < sequence.capacity or self._grow_on_host(
                    step, sequence, sequence.known
                ):
                    ready.add(sequence.id)
                    self._moving.kept.add(sequence.id)
            elif count > 0 and sequence.known - sequence.planned > 1:
                start = sequence.planned
                if not self._grow_on_host(step, sequence, start + count):
                    count = min(count, self.host.growable(sequence.id) - start)
                    if count <= 0 or not self._grow_on_host(step, sequence, start + count):
                        continue
                self._moving.kept.add(sequence.id)
                step.put(sequence, count)
                chunk -= count
        return chunk, ready

    def _put_newcomers(self, step: LoadAwareStep, newcomers: Seq[Sequence], chunk: int) -> None:
        """Start prompts on the host in order, until one does not fit."""
        for sequence in newcomers:
            if chunk <= 0 or not self._find_row(sequence):
                break
            hit = 0
            if self.host.prefix_caching and sequence.request.sampling.prompt_logprobs is None:
                hit = self.host.find_prefix(sequence.id, sequence.tokens)
            known = len(sequence.tokens)
            self.host.open(sequence.id, hit)
            upto = min(known, hit + chunk, self.host.growable(sequence.id))
            if (
                upto <= hit
                or not self.host.fits(sequence.id, known, self.limits.max_num_batched_tokens)
                or self.host.extend(sequence.id, upto) is None
            ):
                self.host.release(sequence.id)
                break
            self.waiting.remove(sequence)
            self._start(step, sequence, hit, self.host, Tier.HOST)
            self._hosted.add(sequence.id)
            step.put(sequence, upto - hit)
            chunk -= upto - hit

    def _grow_on_host(self, step: LoadAwareStep, sequence: Sequence, upto: int) -> bool:
        """Reserve host blocks for the first ``upto`` tokens, preempting later ones of the host."""
        while (grown := self.host.extend(sequence.id, upto)) is None:
            rest = [other for other in self._on_host() if other.id not in self._moving.kept]
            victim = None if self.live.closing else choose_victim(rest, sequence.order)
            if victim is None:
                return False
            self._preempt(victim)
            if victim.state is not SequenceState.PAUSED:
                return False
        step.extends += [RowExtend(sequence.row, group, blocks) for group, blocks in grown]
        sequence.capacity = min(self.host.capacity(sequence.id), sequence.lockstep_at)
        return True

    # -- launching ------------------------------------------------------------------------------

    def _launch(self, step: OpenStep) -> StepPlan:
        assert isinstance(step, LoadAwareStep)
        on_host = step.in_first - step.on_device
        tiers = (Tier.DEVICE,) * step.on_device + (Tier.HOST,) * on_host if on_host else ()
        batches = [self._batch(step, 0, step.in_first, tiers)]
        rows = len(step.rows)
        if rows > step.in_first:
            tiers = (Tier.HOST,) * (rows - step.in_first)
            batches.append(self._batch(step, step.in_first, rows, tiers))
        return replace(
            super()._launch(step), batches=tuple(batch for batch in batches if batch.rows)
        )
