"""Selects the sequence to preempt when memory runs out."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from weft.core.types import Sequence


def choose_victim(running: Iterable[Sequence], after: tuple[int, int]) -> Sequence | None:
    """Return the sequence that loses least work when it is computed again later.

    Only sequences that come after ``after`` in (priority, arrival) may be chosen, so that the first
    sequence always advances and none is preempted for ever. The lowest class is preempted first;
    within it the sequence with the fewest computed tokens, the newest on a tie.
    """
    candidates = [sequence for sequence in running if sequence.order > after]
    if not candidates:
        return None
    lowest = max(sequence.order[0] for sequence in candidates)
    return min(
        (sequence for sequence in candidates if sequence.order[0] == lowest),
        key=lambda sequence: (sequence.planned, -sequence.order[1]),
    )


def covers(spare: Seq[int], needs: Seq[int]) -> bool:
    """Whether each group has as many blocks to spare as are needed of it."""
    return all(most >= need for most, need in zip(spare, needs, strict=True))
