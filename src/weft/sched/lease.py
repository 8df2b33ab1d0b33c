"""Leases: how many steps an executor may compute after a planned one without the scheduler.

A step may be leased if every sequence with a row decodes in it, and no waiting sequence could get a
row before one of them ends: then the next plans differ only in positions and blocks until a
sequence ends or something arrives. The blocks of all its steps are taken beforehand, at most half
of those available: a request that arrives and ends the lease finds the other half.
"""

from __future__ import annotations

from weft.core.plan import RowExtend
from weft.kv.cache import KVCache
from weft.sched.batch import BatchBuilder
from weft.sched.sequences import SequenceManager


def extend_lease(step: BatchBuilder, sequences: SequenceManager, cache: KVCache, most: int) -> int:
    """Return for how many more steps the rows of a step may be leased, and reserve their blocks.

    Args:
        most: steps.
    """
    chosen = step.sequences
    alone = len(chosen) == len(sequences.running) and not step.adds
    if not chosen or not alone or sum(step.counts) != len(chosen) or not all(step.samples):
        return 0
    if _may_join(sequences) or not all(sequence.leasable for sequence in chosen):
        return 0
    steps = min(most, *(sequence.end - sequence.known for sequence in chosen))
    if (states := cache.states) is not None:
        steps = min(steps, *(states.room(sequence.planned) for sequence in chosen))
    if steps <= 0:
        return 0
    ends = [(sequence.id, sequence.planned + steps) for sequence in chosen]
    needs = cache.needs_of_all(ends, steps + 1)
    if any(2 * need > there for need, there in zip(needs, cache.available(), strict=True)):
        return max(
            0, min(steps, *(cache.capacity(sequence.id) - sequence.planned for sequence in chosen))
        )
    for sequence, (_, end) in zip(chosen, ends, strict=True):
        if sequence.capacity >= end:
            continue
        grown = cache.extend(sequence.id, end)
        if grown is None:  # a sliding group counts blocks that it is about to give up
            steps = min(steps, cache.capacity(sequence.id) - sequence.planned)
            continue
        step.extends += [RowExtend(sequence.row, group, blocks) for group, blocks in grown]
        sequence.cover(cache.capacity(sequence.id))
    return max(steps, 0)


def _may_join(sequences: SequenceManager) -> bool:
    """Whether a waiting sequence may get a row before one of those that have one has ended."""
    waiting = sequences.waiting.priorities()
    return bool(waiting) and bool(
        sequences.free_rows or sequences.closing or waiting[0] < sequences.running[-1].order[0]
    )
