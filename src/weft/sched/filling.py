"""Fills a step with running sequences: decode tokens, prefill chunks, drafts, and their blocks."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from weft.core.images import uncut
from weft.core.plan import RowExtend
from weft.core.types import Sequence, SequenceState
from weft.sched.batch import BatchBuilder
from weft.sched.sequences import schedule_single_tokens

if TYPE_CHECKING:
    from weft.sched.memory_device import DeviceMemory

Grown = Seq[tuple[int, tuple[int, ...]]]  # (group, new blocks)


class Filler:
    """Fills steps from running sequences; the memory finds blocks where they run out.

    Args:
        share: of a pipeline, how many sequences may decode in the next step; None for any number.
    """

    def __init__(self, memory: DeviceMemory, share: Callable[[], int] | None = None) -> None:
        self._memory = memory
        self._cache = memory.cache
        self._share = share

    def single_tokens(self, step: BatchBuilder, sequences: list[Sequence]) -> list[Sequence]:
        """Add running sequences that need one token; return those that need more care."""
        synchronous: list[Sequence] = []
        chosen, starts, more = schedule_single_tokens(
            sequences[: step.budget], lambda sequence: self._go_on(step, sequence, synchronous)
        )
        step.put_single(chosen, starts)
        if synchronous:
            self._schedule_synchronous(step, synchronous)
        return more

    def _go_on(self, step: BatchBuilder, sequence: Sequence, synchronous: list[Sequence]) -> bool:
        """Whether a sequence that has come to its capacity may compute one token more.

        A synchronous one is put aside, to be planned where time matters less; if the result of its
        last step is not on the host yet, it is not planned at all.
        """
        if not self._memory.may_plan(sequence):
            return False
        if sequence.planned < sequence.synchronous_from:
            return self.grow(step, sequence, sequence.known)
        drafter = sequence.drafter
        waits = self._share is not None or drafter is None or drafter.promising(sequence.tokens)
        if drafter is not None and not waits:
            sequence.synchronous_from = sequence.known + drafter.searched_in_vain()
            return self.grow(step, sequence, sequence.known)
        if len(sequence.tokens) == sequence.known:
            synchronous.append(sequence)
        return False

    def _schedule_synchronous(self, step: BatchBuilder, sequences: list[Sequence]) -> None:
        """Add sequences whose last token is on the host, with drafts where there are some.

        Of a pipeline no more than a share of all, so that others fill the steps beside this one.
        """
        if self._share is not None:
            sequences = sequences[: max(0, self._share() - step.counts.count(1))]
        spare = step.budget - len(sequences)
        for sequence in sequences:
            if not self._plannable(sequence):
                continue
            draft = self._draft(step, sequence, spare)
            if not draft and not self.grow(step, sequence, sequence.known):
                continue
            step.put(sequence, 1)
            if draft:
                step.guess(sequence, draft)
                spare -= len(draft)

    def _draft(self, step: BatchBuilder, sequence: Sequence, spare: int) -> tuple[int, ...]:
        """Guess tokens and reserve their blocks, unless that would be at the cost of others."""
        if sequence.drafter is None:
            return ()
        most = step.room(sequence.known, min(spare, sequence.end - sequence.known - 1))
        draft = sequence.drafter.propose(sequence.tokens, most) if most > 0 else ()
        if not draft and self._share is None:
            sequence.synchronous_from = sequence.known + sequence.drafter.searched_in_vain()
        if not draft:
            return ()
        grown = self._cache.extend(sequence.id, sequence.known + len(draft), drafts=True)
        if grown is None:
            return ()
        self._extend(step, sequence, grown)
        return draft

    def _plannable(self, sequence: Sequence) -> bool:
        """Whether the sequence was not preempted since this plan began."""
        return sequence.state is SequenceState.RUNNING and self._memory.may_plan(sequence)

    def chunks(self, step: BatchBuilder, sequences: list[Sequence]) -> None:
        """Add as much as fits of running sequences that need more than one token."""
        for sequence in sequences:
            start, images = sequence.planned, sequence.request.images
            count = step.room(start, sequence.known - start)
            count = uncut(images, start, count, step.image_room) if images else count
            if count <= 0 or not self._plannable(sequence):
                continue
            if not self.grow(step, sequence, start + count):
                count = min(count, self._cache.growable(sequence.id) - start)
                count = uncut(images, start, count, count)
                if step.whole or count <= 0 or not self.grow(step, sequence, start + count):
                    continue
            step.put(sequence, count)

    def grow(self, step: BatchBuilder, sequence: Sequence, upto: int) -> bool:
        """Reserve blocks for the first ``upto`` tokens, if need be those of later sequences."""
        while (grown := self._cache.extend(sequence.id, upto)) is None:
            if not self._memory.make_room(step, sequence.order):
                return False
        self._extend(step, sequence, grown)
        return True

    def _extend(self, step: BatchBuilder, sequence: Sequence, grown: Grown) -> None:
        for group, blocks in grown:
            step.extends.append(RowExtend(sequence.row, group, blocks))
        sequence.cover(self._cache.capacity(sequence.id))
