"""Scheduler memory with a host tier: moves KV to host memory when blocks run out.

A sequence with its KV on the host keeps its row. With `SwapMemory` it waits there: before the
device's memory runs short, the newest sequences move out; the oldest move back while there is ample
room, before newer ones of their class begin. One that cannot move is preempted, as without a host.
Parts that compute on the host decide themselves what moves (``two_batch.py``, ``piggyback.py``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from weft.core.plan import KVMove, RowExtend, StepPlan, Tier
from weft.core.types import Sequence, SequenceState
from weft.kv.tiers import MovePin, TieredCache
from weft.sched.batch import BatchBuilder
from weft.sched.commit import Committer
from weft.sched.memory_device import DeviceMemory
from weft.sched.preempt import choose_victim, covers

SOON = 2  # steps ahead for which the device's decodes must find room
SPARE = 20  # a swap-in leaves one in so many blocks free, as NEO's own code does


@dataclass(slots=True)
class Movements:
    """The moves between tiers in a step.

    Attributes:
        kept: sequences that move, or that have blocks and get a place; not to be preempted now.
        left: sequences whose KV leaves for the host layer by layer, after this step.
    """

    moves: list[KVMove] = field(default_factory=list)
    pins: list[MovePin] = field(default_factory=list)
    kept: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)


class HostMemory(DeviceMemory):
    """Device and host: where each sequence is, and how it moves. Nothing moves by itself.

    Attributes:
        tiers: the KV of both tiers.
        host: the KV of the device's own host.
        hosted: ids of the sequences whose KV lies with the host, or goes there with this step.
        moving: what changes the tier in the step that is being planned.
        coming: device blocks, by group, and slots of states that launched moves will free.
    """

    def __init__(self, cache: TieredCache) -> None:
        super().__init__(cache.device)
        self.kv = self.tiers = cache
        self.host = cache.host
        self.hosted: set[int] = set()
        self.moving = Movements()
        self.coming = cache.coming()
        self._pins: deque[list[MovePin]] = deque()

    # -- hooks of a plan -------------------------------------------------------------------------

    def open_plan(self) -> None:
        """Begin a plan."""
        self.hosted = set(self.tiers.hosted())
        self.moving = Movements()

    def launch(self, plan: StepPlan) -> StepPlan:
        """Add to a plan what its step moves."""
        self._pins.append(self.moving.pins)
        pairs = zip(self.moving.moves, self.moving.pins, strict=True)
        moves = tuple(self.tiers.planned(move, pin) for move, pin in pairs)
        zero_places = self.tiers.hosts.take_zero()
        return replace(plan, moves=moves, zero_host=self.host.take_zero(), zero_places=zero_places)

    def complete_moves(self, committer: Committer) -> None:
        """The step of the oldest launched plan is committed: its moves are done."""
        committer.complete_moves(self.tiers, self._pins.popleft())
        self.coming = self.tiers.coming()
        self.sequences.close()

    @property
    def moves(self) -> bool:
        """Whether the plan moves KV."""
        return bool(self.moving.moves)

    # -- tiers of sequences ----------------------------------------------------------------------

    def on_device(self, sequences: list[Sequence]) -> list[Sequence]:
        """Those of these sequences whose KV lies on the device."""
        hosted = self.hosted
        return [s for s in sequences if s.id not in hosted] if hosted else sequences

    def on_host(self) -> list[Sequence]:
        """Running sequences whose KV lies with the host, in order."""
        hosted = self.hosted
        return [s for s in self.sequences.running if s.id in hosted] if hosted else []

    def may_plan(self, sequence: Sequence) -> bool:
        """Whether the KV of a running sequence lies on the device."""
        return sequence.id not in self.hosted

    def victims(self) -> Seq[Sequence]:
        """Running sequences whose blocks on the device others may get."""
        return self.on_device(self.sequences.running)

    def preempt(self, victim: Sequence) -> None:
        """Preempt a sequence of either tier; it may be resumed in the other one."""
        self.sequences.preempt(victim)
        self.hosted.discard(victim.id)

    # -- moving ----------------------------------------------------------------------------------

    def move(self, step: BatchBuilder, sequence: Sequence, *, after_layer: bool = False) -> bool:
        """Move a sequence to the other tier with this step, if there is room."""
        done = self.tiers.move(sequence.id, sequence.row, sequence.planned, after_layer=after_layer)
        if done is None:
            return False
        self.moving.kept.add(sequence.id)
        self.moving.moves.append(done[0])
        self.moving.pins.append(done[1])
        totals, blocks = self.sequences.totals, done[0].num_blocks
        if done[0].to is Tier.HOST:
            self.hosted.add(sequence.id)
            totals.blocks_to_host += blocks
        else:
            self.hosted.discard(sequence.id)
            totals.blocks_to_device += blocks
        step.count_move(done[0].to, sequence.planned)
        sequence.cover(0)  # its next plan checks its blocks first
        return True

    def grow_on_host(
        self,
        step: BatchBuilder,
        sequence: Sequence,
        upto: int,
        next_victim: Callable[[], Sequence | None],
    ) -> bool:
        """Reserve host blocks for the first ``upto`` tokens, if need be those of later sequences.

        Args:
            next_victim: the sequence of the same host that is preempted next, if any may be.
        """
        host = self.tiers.of(sequence.id)
        while (grown := host.extend(sequence.id, upto)) is None:
            victim = None if self.sequences.closing else next_victim()
            if victim is None:
                return False
            self.preempt(victim)
            if victim.state is not SequenceState.PAUSED:
                return False
        step.extends += [RowExtend(sequence.row, group, blocks) for group, blocks in grown]
        sequence.cover(host.capacity(sequence.id))
        return True


class SwapMemory(HostMemory):
    """See the module docstring.

    Attributes:
        takes_too_long: whether the KV of so many tokens is more than one step should bring back.

    Args:
        host_computes: a part computes sequences of the host, so that none gets stuck there.
        comes_back: whether sequences come back to the device.
        preempts_ahead: who should leave before memory runs short, and cannot, is preempted then
            already. Not where prompts are computed before older decodes: begun again each time,
            one would keep those before it from their steps for ever.
    """

    def __init__(
        self,
        cache: TieredCache,
        *,
        host_computes: bool = False,
        comes_back: bool = True,
        preempts_ahead: bool = True,
    ) -> None:
        super().__init__(cache)
        self._host_computes = host_computes
        self._comes_back = comes_back
        self._preempts_ahead = preempts_ahead
        if host_computes:
            self.watermark_tokens = 0  # sequences without room on the device decode on the host
        self.takes_too_long: Callable[[int], bool] = self._beyond_a_step

    def _beyond_a_step(self, tokens: int) -> bool:
        """More tokens than a step computes, which takes longer than to copy their KV."""
        return tokens > self.max_num_batched_tokens

    def max_tokens(self) -> int:
        """The longest sequence that can be computed here; of the host where nothing comes back."""
        most = super().max_tokens()
        return most if self._comes_back else min(most, self.host.max_tokens())

    def make_way(self, step: BatchBuilder) -> None:
        """Send the newest away before memory runs short, and bring the oldest back."""
        self._swap_out_ahead(step)
        if self._comes_back:
            self._swap_in(step)
        if not self._host_computes:
            self._give_up_one_that_is_stuck()

    def _swap_out_ahead(self, step: BatchBuilder) -> None:
        """Send the newest away so that the others find room in this step and the next ones."""
        device = self.on_device(self.sequences.running)
        if not device:
            return
        need = self.needed_soon(device, SOON - 1, SOON)
        while not covers(self._available_soon(), need):
            victim = choose_victim(self.victims(), device[0].order)
            if victim is None or self.sequences.closing:
                return
            if self._move_away(step, victim):
                continue
            if not self._preempts_ahead:
                return
            self.sequences.preempt(victim)

    def _available_soon(self) -> list[int]:
        """Blocks of each group that can be taken when launched moves are done."""
        return [a + b for a, b in zip(self.cache.available(), self.coming, strict=True)]

    def _move_away(self, step: BatchBuilder, victim: Sequence) -> bool:
        """Move a sequence to the host, if it can go now.

        One that is in the step already leaves layer by layer as it is computed.
        """
        can_move = victim.end <= self.host.max_tokens() and not self.tiers.moving(victim.id)
        guessed = victim.drafter is not None and victim.pending > 0  # its KV goes beyond planned
        if not can_move or guessed or victim.planned == 0:
            return False
        in_step = any(victim is sequence for sequence in step.sequences)
        held = self.cache.held(victim.id)
        if not self.move(step, victim, after_layer=in_step):
            return False
        self.coming = [a + b for a, b in zip(self.coming, held, strict=True)]
        if in_step:
            self.moving.left.add(victim.id)
        return True

    def _swap_in(self, step: BatchBuilder) -> None:
        """Bring the oldest back while there is ample room, as many as the link takes in a step."""
        on_host = self.on_host()
        if not on_host or any(self.coming) or self.moving.moves:
            return
        device = self.on_device(self.sequences.running)
        priorities = self.sequences.waiting.priorities()
        spare = self.needed_soon(device, SOON - 1, SOON)
        if device:
            spare = [
                need + pool.num_blocks // SPARE
                for need, pool in zip(spare, self.cache.all_pools, strict=True)
            ]
        tokens = 0
        for sequence in on_host:
            tokens += sequence.planned
            late = self.moving.moves and self.takes_too_long(tokens)
            if (
                late
                or self.tiers.moving(sequence.id)
                or (priorities and priorities[0] < sequence.order[0])
            ):
                return
            if not self._fits_device(sequence, spare) or not self.move(step, sequence):
                return

    def _fits_device(self, sequence: Sequence, spare: Seq[int]) -> bool:
        """Whether a sequence of the host finds room on the device and leaves so many blocks."""
        held = self.host.needs(sequence.id, sequence.known, SOON)
        needs = [a + b for a, b in zip(self.host.held(sequence.id), held, strict=True)]
        wanted = [need + rest for need, rest in zip(needs, spare, strict=True)]
        return covers(self.cache.available(), wanted)

    def _give_up_one_that_is_stuck(self) -> None:
        """Preempt the oldest on the host if not even an empty device takes it back as it is.

        A chunk of a sliding group needs more blocks than what it leaves behind. Begun again, a
        sequence fits by the rules of admission.
        """
        on_host = self.on_host()
        empty = len(on_host) == len(self.sequences.running) and not self.sequences.closing
        if not on_host or not empty or self.moving.moves or any(self.coming):
            return
        if not self._fits_device(on_host[0], [0] * len(self.coming)):
            self.preempt(on_host[0])

    # -- preemption ------------------------------------------------------------------------------

    def victims(self) -> Seq[Sequence]:
        """Sequences on the device that do not come or go already."""
        kept = self.moving.kept
        return [s for s in self.on_device(self.sequences.running) if s.id not in kept]

    def growing(self) -> Iterable[Sequence]:
        """Running sequences on the device."""
        return self.on_device(self.sequences.running)

    def row_victims(self) -> Seq[Sequence]:
        """Of either tier."""
        return [s for s in self.sequences.running if s.id not in self.moving.kept]

    def make_room(self, step: BatchBuilder, after: tuple[int, int]) -> bool:
        """Send away one sequence that comes after ``after``; whether its blocks are free now."""
        if self.sequences.closing or any(self.coming):
            return False  # blocks will come back when the launched steps are committed
        victim = choose_victim(self.victims(), after)
        if victim is None:
            return False
        if self._move_away(step, victim):
            return False
        self.sequences.preempt(victim)
        return victim.state is SequenceState.PAUSED

    def blocks_come_back(self) -> bool:
        """Whether launched steps give up blocks of the device when they are committed."""
        return super().blocks_come_back() or (not self._host_computes and any(self.coming))

    def is_next(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence goes before all that the host has."""
        on_host = self.on_host()
        return not on_host or sequence.order < on_host[0].order
