"""Scheduler memory without a host tier: preempts a sequence when blocks run out.

A preempted sequence gives up its KV, and is computed again when it is resumed.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from weft.core.plan import StepPlan
from weft.core.types import Sequence, SequenceState
from weft.kv.cache import KVCache
from weft.kv.tiers import AnyCache
from weft.sched.batch import BatchBuilder
from weft.sched.commit import Committer
from weft.sched.preempt import choose_victim
from weft.sched.sequences import SequenceManager


class DeviceMemory:
    """Device blocks: which sequences to preempt, and whether the next may begin.

    Attributes:
        cache: the KV of the device.
        kv: the KV of all tiers.
        watermark_tokens: admission leaves blocks free for so many more tokens of each sequence that
            runs, so that new sequences do not soon cause the preemption of earlier ones.
    """

    watermark_tokens = 32

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.kv: AnyCache = cache
        self.sequences: SequenceManager

    def attach(self, sequences: SequenceManager, max_num_batched_tokens: int) -> None:
        """Serve these sequences, in steps of so many tokens at most."""
        self.sequences = sequences
        self.max_num_batched_tokens = max_num_batched_tokens

    # -- hooks of a plan -------------------------------------------------------------------------

    def open_plan(self) -> None:
        """Begin a plan."""

    def make_way(self, step: BatchBuilder) -> None:
        """Move KV between the tiers before the step is filled."""

    def launch(self, plan: StepPlan) -> StepPlan:
        """Add to a plan what its step moves."""
        return plan

    def complete_moves(self, committer: Committer) -> None:
        """The step of the oldest launched plan is committed."""

    @property
    def moves(self) -> bool:
        """Whether the plan moves KV."""
        return False

    def max_tokens(self) -> int:
        """The longest sequence that can be computed here, when it has all blocks to itself."""
        return self.cache.max_tokens()

    # -- who is where -----------------------------------------------------------------------------

    def on_device(self, sequences: list[Sequence]) -> list[Sequence]:
        """Those of these sequences that the device computes."""
        return sequences

    def may_plan(self, sequence: Sequence) -> bool:  # noqa: ARG002
        """Whether the device may compute a running sequence in this step."""
        return True

    def victims(self) -> Seq[Sequence]:
        """Running sequences whose blocks others may get."""
        return self.sequences.running

    def growing(self) -> Iterable[Sequence]:
        """Running sequences for which admission leaves blocks."""
        return self.victims()

    def row_victims(self) -> Seq[Sequence]:
        """Running sequences whose rows others may get."""
        return self.victims()

    # -- preemption ------------------------------------------------------------------------------

    def make_room(self, step: BatchBuilder, after: tuple[int, int]) -> bool:  # noqa: ARG002
        """Preempt one sequence that comes after ``after``; return whether its blocks are free."""
        if self.sequences.closing:
            return False  # blocks will come back when the launched steps are committed
        victim = choose_victim(self.victims(), after)
        if victim is None:
            return False
        self.sequences.preempt(victim)
        return victim.state is SequenceState.PAUSED

    def preempt(self, victim: Sequence) -> None:
        """Preempt a sequence for its row."""
        self.sequences.preempt(victim)

    def blocks_come_back(self) -> bool:
        """Whether launched steps give up blocks when they are committed."""
        return bool(self.sequences.closing)

    def is_next(self, sequence: Sequence) -> bool:  # noqa: ARG002
        """Whether no sequence precedes this one, the first waiting of its class."""
        return True

    # -- what is needed --------------------------------------------------------------------------

    def needed_soon(
        self, sequences: Iterable[Sequence], ahead: int | None = None, chunk: int | None = None
    ) -> list[int]:
        """Blocks of each group that sequences ask for until each has ``ahead`` tokens more.

        Args:
            ahead: ``watermark_tokens``, if not given.
            chunk: tokens that each computes at once; all that a step may have, if not given.
        """
        ahead = self.watermark_tokens if ahead is None else ahead
        ends = ((s.id, min(s.known + ahead, s.end)) for s in sequences)
        return self.cache.needs_of_all(ends, chunk or self.max_num_batched_tokens)
