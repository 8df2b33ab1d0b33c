"""Invariants of the sequences that hold rows, for every policy."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from weft.core.errors import InvariantError
from weft.core.types import Sequence
from weft.kv.tiers import AnyCache


def check_drafts(drafts: Seq[tuple[Sequence, tuple[int, ...]]], cache: AnyCache) -> None:
    """Raise InvariantError unless launched drafts have blocks and stay within their sequence."""
    for sequence, draft in drafts:
        if sequence.pending == 0:
            raise InvariantError(f"sequence {sequence.id} has drafts in flight and nothing else")
        upto = sequence.planned + len(draft)
        if upto > cache.capacity(sequence.id) or upto >= sequence.end:
            raise InvariantError(f"drafts of sequence {sequence.id} go beyond its blocks or end")


def check_rows(
    running: Seq[Sequence],
    closing: Seq[Sequence],
    free_rows: Seq[int],
    num_rows: int,
    cache: AnyCache,
) -> None:
    """Raise InvariantError unless every row has one holder or none, and no count is beyond it.

    Args:
        running: sequences that are planned, in order.
        closing: ended or preempted ones whose launched steps are not committed yet.
    """
    holders = [*running, *closing]
    rows = [sequence.row for sequence in holders]
    if sorted([*rows, *free_rows]) != list(range(num_rows)):
        raise InvariantError("a row is lost or held twice")
    if list(running) != sorted(running, key=lambda sequence: sequence.order):
        raise InvariantError("the running sequences are out of order")
    for sequence in holders:
        done = sequence.planned
        if sequence.finish is None and not 0 <= sequence.computed <= done <= sequence.known:
            raise InvariantError(f"sequence {sequence.id} has computed more than it knows")
        if done > cache.capacity(sequence.id):
            raise InvariantError(f"sequence {sequence.id} has outgrown its blocks")
        unseen = sequence.known - len(sequence.tokens)
        if (
            sequence.finish is None
            and unseen > 1
            and sequence.known > sequence.synchronous_from + 1
        ):
            raise InvariantError(f"sequence {sequence.id} is planned before its last token")
