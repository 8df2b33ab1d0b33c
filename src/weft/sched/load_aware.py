"""Load-aware scheduling over two tiers: the host's memory and cores enlarge the batch (NEO).

A step is what FCFS would compute on the device, and what the host can add to it (NEO section 3.2):

1. an empty step of two sub-batches;
2. device decodes into batch 0; the newest leave for the host before memory runs short, and the
   oldest come back while there is ample room;
3. prompts into batch 0, their KV to the device if it fits there, else to the host, in chunks;
4. host decodes into batch 1 or 0, as many as the device's work hides;
5. of the prompts for the host no more than covers batch 1 or costs nothing;
6. all that only if it is worth its time by prediction (``Balance``), in one or two sub-batches.

Beyond the paper: the oldest sequence on the host is never left out for more than ``PATIENCE``
steps; prompts go to the host only while it can keep up with the decodes that follow; a chunk for
the host leaves layer by layer, so that it needs no room on the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from weft.core.plan import Commit, KVMove, RowExtend, StepPlan, StepResult, Tier
from weft.core.types import DEFAULT_CLASSES, Sequence, SequenceState, ServiceClass
from weft.cost.model import CostModel
from weft.kv.tiers import Lease, TieredCache
from weft.sched.balance import Balance, Choice, HostWork
from weft.sched.planner import Limits, Planner
from weft.sched.preempt import choose_victim
from weft.sched.step import OpenStep
from weft.sched.timed import TimedStep

PATIENCE = 16  # steps for which the oldest sequence on the host may be left out
SOON = 2  # steps ahead for which the device's decodes must find room
SPARE = 20  # a swap-in leaves one in so many blocks free, as NEO's own code does
NEWCOMERS = 16  # waiting prompts that one step considers for the host at most


@dataclass(slots=True, kw_only=True)
class TieredStep(TimedStep):
    """An open step over two tiers; rows of the device come first, then those of the host.

    Attributes:
        on_device: rows whose KV lies on the device.
        in_first: rows of batch 0.
        kept: sequences that move, or have got blocks and get a place: nobody preempts them now.
        left: sequences whose KV leaves for the host layer by layer, after this step.
    """

    moves: list[KVMove] = field(default_factory=list)
    leases: list[Lease] = field(default_factory=list)
    kept: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    on_device: int = 0
    in_first: int = 0

    def room(self, start: int, most: int) -> int:
        """As many as the budget allows: the time of a step is not limited."""
        return OpenStep.room(self, start, most)


class LoadAwareScheduler(Planner):
    """See the module docstring; implements ``weft.core.ports.Scheduler``.

    Args:
        cost: what step times are predicted with.
        host_only: all KV lies with the host, so that all decode attention is computed there: the
            baseline that NEO calls FastDecode+ (section 5.1).
    """

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
        self.tiers = cache
        self.host = cache.host
        self._cost = cost
        self._balance = Balance(cost, limits.max_num_batched_tokens)
        self._host_only = host_only
        self._leases: deque[list[Lease]] = deque()
        self._coming = [0] * len(cache.groups)  # device blocks that launched moves will free
        self._hosted: set[int] = set()  # whose KV lies with the host, while a plan is made
        self._left_out = 0  # steps since the oldest sequence on the host was computed
        self._step_s = 0.0  # predicted time of a step, averaged over the recent ones

    # -- planning -----------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """Return the next step, or None if nothing can be computed at present."""
        self._open_plan(now)
        self._hosted = set(self.host.sequences())
        step = TieredStep(self.limits.max_num_batched_tokens, cost=self._cost, limit_s=float("inf"))
        self._swap_out_ahead(step)
        self._swap_in(step)
        for rank in [] if self._host_only else self._ranks_present():
            rest = self._plan_single_tokens(step, self._on_device(self._running_of(rank)))
            self._plan_chunks(step, rest)
            if self._first_comes_to_device(rank):
                self._admit(step, rank)
        step.on_device = step.in_first = len(step.rows)
        self._join_host(step)
        return self._launch(step) if step.rows or step.moves else None

    def _on_device(self, sequences: Seq[Sequence]) -> list[Sequence]:
        hosted = self._hosted
        return [sequence for sequence in sequences if sequence.id not in hosted]

    def _on_host(self) -> list[Sequence]:
        hosted = self._hosted
        return [sequence for sequence in self.running if sequence.id in hosted] if hosted else []

    def _first_comes_to_device(self, rank: int) -> bool:
        """Whether the next waiting sequence of the rank goes before all that the host has."""
        first = next(self.waiting.of_rank(rank), None)
        on_host = next(iter(self._on_host()), None) if first is not None else None
        return first is not None and (on_host is None or first.order < on_host.order)

    # -- between the tiers (step 2) -----------------------------------------------------------

    def _swap_out_ahead(self, step: TieredStep) -> None:
        """Send the newest away so that the others find room in this step and the next ones."""
        device = self._on_device(self.running)
        if not device:
            return
        need = self._needed_soon(device)
        while any(
            pool.available + coming < blocks
            for pool, coming, blocks in zip(self.cache.pools, self._coming, need, strict=True)
        ):
            victim = choose_victim(self._movable(step), device[0].order)
            if victim is None or self.live.closing:
                return
            self._send_away(step, victim)

    def _movable(self, step: TieredStep) -> list[Sequence]:
        """Sequences on the device that do not come or go already."""
        return [s for s in self._on_device(self.running) if s.id not in step.kept]

    def _needed_soon(self, device: Seq[Sequence]) -> list[int]:
        """Blocks of each group that sequences on the device will ask for."""
        need = [0] * len(self.cache.groups)
        for sequence in device:
            if sequence.capacity - sequence.planned < SOON or sequence.known > sequence.planned + 1:
                upto = min(sequence.known + SOON - 1, sequence.end)
                for group, blocks in enumerate(self.cache.needs(sequence.id, upto, SOON)):
                    need[group] += blocks
        return need

    def _send_away(self, step: TieredStep, victim: Sequence) -> bool:
        """Move a sequence to the host, or preempt it if it cannot; whether it was preempted.

        One that is in the step already leaves layer by layer as it is computed.
        """
        can_move = victim.end <= self.host.max_tokens() and not self.tiers.moving(victim.id)
        guessed = victim.drafter is not None and victim.pending > 0  # its KV goes beyond planned
        if can_move and not guessed and victim.planned > 0:
            in_step = any(victim is sequence for sequence in step.sequences)
            held = self.cache.held(victim.id)
            if self._move(step, victim, after_layer=in_step):
                self._coming = [a + b for a, b in zip(self._coming, held, strict=True)]
                if in_step:
                    step.left.add(victim.id)
                return False
        self.live.preempt(victim)
        return True

    def _move(self, step: TieredStep, sequence: Sequence, *, after_layer: bool = False) -> bool:
        """Move a sequence to the other tier, if there is room."""
        done = self.tiers.move(sequence.id, sequence.row, sequence.planned, after_layer=after_layer)
        if done is None:
            return False
        step.kept.add(sequence.id)
        step.moves.append(done[0])
        step.leases.append(done[1])
        if done[0].to is Tier.HOST:
            step.work.out_tokens += sequence.planned
            self._hosted.add(sequence.id)
        else:
            step.work.in_tokens += sequence.planned
            self._hosted.discard(sequence.id)
        sequence.capacity = 0  # whoever plans it looks at its blocks first
        return True

    def _swap_in(self, step: TieredStep) -> None:
        """Bring the oldest back while there is ample room, as many as the link takes in a step."""
        on_host = self._on_host()
        if not on_host or self._host_only or any(self._coming) or step.moves:
            return
        device = self._on_device(self.running)
        ranks = self.waiting.ranks()
        spare = self._needed_soon(device)
        if device:
            spare = [
                need + group.num_blocks // SPARE
                for need, group in zip(spare, self.cache.groups, strict=True)
            ]
        tokens = 0
        for sequence in on_host:
            tokens += sequence.planned
            late = step.moves and self._balance.move_seconds(tokens) > self._step_s
            if late or self.tiers.moving(sequence.id) or (ranks and ranks[0] < sequence.order[0]):
                return
            if not self._fits_device(sequence, spare) or not self._move(step, sequence):
                return

    def _fits_device(self, sequence: Sequence, spare: Seq[int]) -> bool:
        """Whether a sequence of the host finds room on the device and leaves so many blocks."""
        held = self.host.needs(sequence.id, sequence.known, SOON)
        needs = [a + b for a, b in zip(self.host.held(sequence.id), held, strict=True)]
        return all(
            need + rest <= pool.available
            for need, rest, pool in zip(needs, spare, self.cache.pools, strict=True)
        )

    # -- hooks of the planner -----------------------------------------------------------------

    def _go_on(self, step: OpenStep, sequence: Sequence, lockstep: list[Sequence]) -> bool:
        """Not for a sequence that was sent away in this very step."""
        return sequence.id not in self._hosted and super()._go_on(step, sequence, lockstep)

    def _plannable(self, sequence: Sequence) -> bool:
        return super()._plannable(sequence) and sequence.id not in self._hosted

    def _make_room(self, step: OpenStep, after: tuple[int, int]) -> bool:
        """Send away one sequence that comes after ``after``; whether its blocks are free now."""
        assert isinstance(step, TieredStep)
        if self.live.closing or any(self._coming):
            return False  # blocks will come back when the launched steps are committed
        victim = choose_victim(self._movable(step), after)
        if victim is None:
            return False
        return self._send_away(step, victim) and victim.state is SequenceState.PAUSED

    def _find_row(self, step: OpenStep, sequence: Sequence) -> bool:
        """Whether a row is free, preempting a lower class of either tier if need be."""
        assert isinstance(step, TieredStep)
        if not self.live.free_rows and not self.live.closing:
            rest = [running for running in self.running if running.id not in step.kept]
            victim = choose_victim(rest, self._below(sequence))
            if victim is not None:
                self._preempt(victim)
        return bool(self.live.free_rows)

    def _preempt(self, victim: Sequence) -> None:
        """Preempt a sequence of either tier; it may be resumed in the other one."""
        self.live.preempt(victim)
        self._hosted.discard(victim.id)

    def _make_fit(self, step: OpenStep, sequence: Sequence) -> bool:
        """Send lower classes away until the sequence fits, if that is enough; it waits for that."""
        assert isinstance(step, TieredStep)
        known, chunk = len(sequence.tokens), self.limits.max_num_batched_tokens
        after = self._below(sequence)
        needs = self.cache.needs(sequence.id, known, chunk)
        device = self._on_device(self.running)
        spare = [pool.available for pool in self.cache.pools]
        for victim in device:
            if victim.order > after:
                spare = [a + b for a, b in zip(spare, self.cache.held(victim.id), strict=True)]
        if any(need > most for need, most in zip(needs, spare, strict=True)):
            return False
        while not self.cache.fits(sequence.id, known, chunk):
            if not self._make_room(step, after):
                step.held_back = any(self._coming)
                return False
        return True

    # -- what the host adds (steps 3 to 6) ------------------------------------------------------

    def _join_host(self, step: TieredStep) -> None:
        on_host = self._on_host()
        decodes = [s for s in on_host if s.id not in step.left and self._decodes(s)]
        pieces = [
            (s, s.known - s.planned)
            for s in on_host
            if s.id not in step.left and s.known - s.planned > 1
        ]
        newcomers = self._newcomers(step, on_host) if step.budget > 0 else []
        if not decodes and not pieces and not newcomers:
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
        self._pass_by(step, choice.seconds, on_host)

    def _decodes(self, sequence: Sequence) -> bool:
        """Whether the sequence needs one token and may have it now."""
        if sequence.known - sequence.planned != 1 or sequence.known >= sequence.end:
            return False
        return sequence.known <= sequence.lockstep_at or len(sequence.tokens) == sequence.known

    def _choose(self, step: TieredStep, work: HostWork, on_host: Seq[Sequence]) -> Choice:
        if self._host_only:
            return self._balance.choose_all(work)
        least = (0, 0)
        if on_host and (self._left_out >= PATIENCE or not step.rows):
            waits_for_chunk = on_host[0].known - on_host[0].planned > 1
            least = (0, 1) if waits_for_chunk else (1, 0)
        elif not step.rows:
            least = (0, 1)
        return self._balance.choose(step.work, work, least)

    def _pass_by(self, step: TieredStep, seconds: float, on_host: Seq[Sequence] = ()) -> None:
        """Note how long the step takes and whether the oldest on the host was left out."""
        self._step_s += (seconds - self._step_s) / 16 if self._step_s else seconds
        if on_host and not any(on_host[0] is s for s in step.sequences[step.on_device :]):
            self._left_out += 1
        else:
            self._left_out = 0

    def _newcomers(self, step: TieredStep, on_host: Seq[Sequence]) -> list[Sequence]:
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
        self, step: TieredStep, on_host: Seq[Sequence], decodes: set[int], chunk: int
    ) -> tuple[int, set[int]]:
        """Reserve blocks of the host, the oldest first, and put its prompts into the step.

        So a newcomer never takes what a decode needs. Returns what is left of the chunk, and which
        of the decodes have got room.
        """
        ready: set[int] = set()
        for sequence in on_host:
            count = min(chunk, sequence.known - sequence.planned)
            if sequence.state is not SequenceState.RUNNING or sequence.id in step.left:
                continue
            if sequence.id in decodes:
                if sequence.planned < sequence.capacity or self._grow_on_host(
                    step, sequence, sequence.known
                ):
                    ready.add(sequence.id)
                    step.kept.add(sequence.id)
            elif count > 0 and sequence.known - sequence.planned > 1:
                start = sequence.planned
                if not self._grow_on_host(step, sequence, start + count):
                    count = min(count, self.host.growable(sequence.id) - start)
                    if count <= 0 or not self._grow_on_host(step, sequence, start + count):
                        continue
                step.kept.add(sequence.id)
                step.put(sequence, count)
                chunk -= count
        return chunk, ready

    def _put_newcomers(self, step: TieredStep, newcomers: Seq[Sequence], chunk: int) -> None:
        """Start prompts on the host in order, until one does not fit."""
        for sequence in newcomers:
            if chunk <= 0 or not self._find_row(step, sequence):
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

    def _grow_on_host(self, step: TieredStep, sequence: Sequence, upto: int) -> bool:
        """Reserve host blocks for the first ``upto`` tokens, preempting later ones of the host."""
        while (grown := self.host.extend(sequence.id, upto)) is None:
            rest = [other for other in self._on_host() if other.id not in step.kept]
            victim = None if self.live.closing else choose_victim(rest, sequence.order)
            if victim is None:
                return False
            self._preempt(victim)
            if victim.state is not SequenceState.PAUSED:
                return False
        step.extends += [RowExtend(sequence.row, group, blocks) for group, blocks in grown]
        sequence.capacity = min(self.host.capacity(sequence.id), sequence.lockstep_at)
        return True

    # -- launching and committing ---------------------------------------------------------------

    def _launch(self, step: OpenStep) -> StepPlan:
        assert isinstance(step, TieredStep)
        self._leases.append(step.leases)
        on_host = step.in_first - step.on_device
        tiers = (Tier.DEVICE,) * step.on_device + (Tier.HOST,) * on_host if on_host else ()
        batches = [self._batch(step, 0, step.in_first, tiers)]
        rows = len(step.rows)
        if rows > step.in_first:
            tiers = (Tier.HOST,) * (rows - step.in_first)
            batches.append(self._batch(step, step.in_first, rows, tiers))
        return replace(
            super()._launch(step),
            batches=tuple(batches if step.in_first else batches[-1:]),
            moves=tuple(step.moves),
            zero_host=self.host.take_zero(),
        )

    def commit(self, result: StepResult, now: float = 0.0) -> Commit:
        """Take in the oldest launched step and return what is new."""
        news = super().commit(result, now)
        for lease in self._leases.popleft():
            self.tiers.settle(lease)
            sequence = self.live.find(lease.sequence_id)
            if sequence is not None and sequence.state is SequenceState.RUNNING:
                self._committer.seal([sequence])  # what had to wait for the move
        self._coming = self.tiers.coming()
        return news
