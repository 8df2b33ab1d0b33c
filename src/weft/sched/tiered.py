"""What schedulers over two tiers share: who leaves the device for the host, and who comes back.

A sequence whose KV lies with the host keeps its row and goes on running; whoever plans chooses
whether it is computed there. Before the device's memory runs short the newest leave, and the oldest
come back while there is ample room. One that cannot leave is preempted, as with one tier.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from weft.core.plan import Commit, KVMove, StepPlan, StepResult, Tier
from weft.core.types import DEFAULT_CLASSES, Sequence, SequenceState, ServiceClass
from weft.kv.tiers import Lease, TieredCache
from weft.sched.planner import Limits, Planner
from weft.sched.preempt import choose_victim, covers
from weft.sched.step import OpenStep

SOON = 2  # steps ahead for which the device's decodes must find room
SPARE = 20  # a swap-in leaves one in so many blocks free, as NEO's own code does


@dataclass(slots=True)
class Movements:
    """What changes the tier in a step.

    Attributes:
        kept: sequences that move, or have got blocks and get a place: nobody preempts them now.
        left: sequences whose KV leaves for the host layer by layer, after this step.
    """

    moves: list[KVMove] = field(default_factory=list)
    leases: list[Lease] = field(default_factory=list)
    kept: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)


class TieredPlanner(Planner):
    """See the module docstring; a scheduler of this kind says what is planned on the device.

    Attributes:
        tiers: the KV of both tiers.
        host: the KV of the host.
    """

    def __init__(
        self, cache: TieredCache, limits: Limits, classes: Seq[ServiceClass] = DEFAULT_CLASSES
    ) -> None:
        super().__init__(cache, limits, classes)
        self.tiers = cache
        self.host = cache.host
        self._leases: deque[list[Lease]] = deque()
        self._coming = [0] * len(cache.groups)  # device blocks that launched moves will free
        # Of the step that is being planned:
        self._hosted: set[int] = set()  # sequences whose KV lies with the host
        self._moving = Movements()

    def _open_plan(self, now: float) -> None:
        super()._open_plan(now)
        self._hosted = set(self.host.sequences())
        self._moving = Movements()

    def _on_device(self, sequences: Seq[Sequence]) -> list[Sequence]:
        hosted = self._hosted
        return [sequence for sequence in sequences if sequence.id not in hosted]

    def _on_host(self) -> list[Sequence]:
        hosted = self._hosted
        return [sequence for sequence in self.running if sequence.id in hosted] if hosted else []

    # -- between the tiers --------------------------------------------------------------------

    def _swap_out_ahead(self, step: OpenStep) -> None:
        """Send the newest away so that the others find room in this step and the next ones."""
        device = self._on_device(self.running)
        if not device:
            return
        need = self._needed_soon(device, SOON - 1, SOON)
        while not covers(self._available_soon(), need):
            victim = choose_victim(self._movable(), device[0].order)
            if victim is None or self.live.closing:
                return
            self._send_away(step, victim)

    def _available_soon(self) -> list[int]:
        """Blocks of each group that can be taken when launched moves are done."""
        return [a + b for a, b in zip(self.cache.available(), self._coming, strict=True)]

    def _movable(self) -> list[Sequence]:
        """Sequences on the device that do not come or go already."""
        return [s for s in self._on_device(self.running) if s.id not in self._moving.kept]

    def _send_away(self, step: OpenStep, victim: Sequence) -> bool:
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
                    self._moving.left.add(victim.id)
                return False
        self.live.preempt(victim)
        return True

    def _move(
        self,
        step: OpenStep,  # noqa: ARG002 - some steps count what moves
        sequence: Sequence,
        *,
        after_layer: bool = False,
    ) -> bool:
        """Move a sequence to the other tier, if there is room."""
        done = self.tiers.move(sequence.id, sequence.row, sequence.planned, after_layer=after_layer)
        if done is None:
            return False
        self._moving.kept.add(sequence.id)
        self._moving.moves.append(done[0])
        self._moving.leases.append(done[1])
        if done[0].to is Tier.HOST:
            self._hosted.add(sequence.id)
        else:
            self._hosted.discard(sequence.id)
        sequence.capacity = 0  # whoever plans it looks at its blocks first
        return True

    def _swap_in(self, step: OpenStep) -> None:
        """Bring the oldest back while there is ample room, as many as the link takes in a step."""
        on_host = self._on_host()
        if not on_host or any(self._coming) or self._moving.moves:
            return
        device = self._on_device(self.running)
        ranks = self.waiting.ranks()
        spare = self._needed_soon(device, SOON - 1, SOON)
        if device:
            spare = [
                need + group.num_blocks // SPARE
                for need, group in zip(spare, self.cache.groups, strict=True)
            ]
        tokens = 0
        for sequence in on_host:
            tokens += sequence.planned
            late = self._moving.moves and self._takes_too_long(tokens)
            if late or self.tiers.moving(sequence.id) or (ranks and ranks[0] < sequence.order[0]):
                return
            if not self._fits_device(sequence, spare) or not self._move(step, sequence):
                return

    @abstractmethod
    def _takes_too_long(self, tokens: int) -> bool:
        """Whether the KV of so many tokens is more than one step should bring back."""

    def _fits_device(self, sequence: Sequence, spare: Seq[int]) -> bool:
        """Whether a sequence of the host finds room on the device and leaves so many blocks."""
        held = self.host.needs(sequence.id, sequence.known, SOON)
        needs = [a + b for a, b in zip(self.host.held(sequence.id), held, strict=True)]
        wanted = [need + rest for need, rest in zip(needs, spare, strict=True)]
        return covers(self.cache.available(), wanted)

    # -- hooks of the planner -----------------------------------------------------------------

    def _go_on(self, step: OpenStep, sequence: Sequence, lockstep: list[Sequence]) -> bool:
        """Not for a sequence that was sent away in this very step."""
        return sequence.id not in self._hosted and super()._go_on(step, sequence, lockstep)

    def _plannable(self, sequence: Sequence) -> bool:
        return super()._plannable(sequence) and sequence.id not in self._hosted

    def _running_of(self, rank: int) -> list[Sequence]:
        """Running sequences of a rank whose KV lies on the device."""
        return self._on_device(super()._running_of(rank))

    def _is_next(self, sequence: Sequence) -> bool:
        """Whether it goes before all that the host has."""
        on_host = self._on_host()
        return not on_host or sequence.order < on_host[0].order

    def _victims(self) -> Seq[Sequence]:
        return self._movable()

    def _growing(self) -> Iterable[Sequence]:
        return self._on_device(self.running)

    def _make_room(self, step: OpenStep, after: tuple[int, int]) -> bool:
        """Send away one sequence that comes after ``after``; whether its blocks are free now."""
        if self.live.closing or any(self._coming):
            return False  # blocks will come back when the launched steps are committed
        victim = choose_victim(self._movable(), after)
        if victim is None:
            return False
        return self._send_away(step, victim) and victim.state is SequenceState.PAUSED

    def _row_victims(self) -> Seq[Sequence]:
        """Of either tier."""
        return [running for running in self.running if running.id not in self._moving.kept]

    def _preempt(self, victim: Sequence) -> None:
        """Preempt a sequence of either tier; it may be resumed in the other one."""
        self.live.preempt(victim)
        self._hosted.discard(victim.id)

    # -- launching and committing ---------------------------------------------------------------

    def _launch(self, step: OpenStep) -> StepPlan:
        self._leases.append(self._moving.leases)
        moves, zero_host = tuple(self._moving.moves), self.host.take_zero()
        return replace(super()._launch(step), moves=moves, zero_host=zero_host)

    def commit(self, result: StepResult, now: float = 0.0) -> Commit:
        """Take in the oldest launched step and return what is new."""
        news = super().commit(result, now)
        self._committer.settle(self.tiers, self._leases.popleft())
        self._coming = self.tiers.coming()
        return news
