"""The waiting queue: sequences in the order of admission."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from weft.core.errors import InvariantError
from weft.core.types import Sequence, SequenceState


class WaitingQueue:
    """By class priority, then preempted sequences, then new ones by arrival."""

    def __init__(self) -> None:
        self._resumed: dict[int, list[Sequence]] = {}
        self._fresh: dict[int, dict[int, Sequence]] = {}
        self._priorities: list[int] = []

    def __len__(self) -> int:
        resumed = sum(len(sequences) for sequences in self._resumed.values())
        return resumed + sum(len(sequences) for sequences in self._fresh.values())

    def __iter__(self) -> Iterator[Sequence]:
        """Yield in order; the queue must not change meanwhile."""
        for priority in self._priorities:
            yield from self.of_priority(priority)

    def of_priority(self, priority: int) -> Iterator[Sequence]:
        """Yield the sequences of one priority in order; what is resumed meanwhile is left out."""
        yield from tuple(self._resumed.get(priority, ()))
        yield from self._fresh.get(priority, {}).values()

    def priorities(self) -> list[int]:
        """Ranks that have sequences."""
        return [
            priority
            for priority in self._priorities
            if self._resumed[priority] or self._fresh[priority]
        ]

    def add(self, sequence: Sequence) -> None:
        """Append a sequence that has never run."""
        self._rank(sequence)
        self._fresh[sequence.order[0]][sequence.id] = sequence

    def resume(self, sequence: Sequence) -> None:
        """Put back a sequence that was preempted, ahead of those that have never run."""
        self._rank(sequence)
        insort(self._resumed[sequence.order[0]], sequence, key=lambda s: s.order)

    def remove(self, sequence: Sequence) -> None:
        priority = sequence.order[0]
        if self._fresh[priority].pop(sequence.id, None) is None:
            self._resumed[priority].remove(sequence)

    def check(self) -> None:
        """Raise InvariantError if the queue holds a sequence that does not wait."""
        waiting = {SequenceState.WAITING, SequenceState.PAUSED}
        for sequence in self:
            if sequence.state not in waiting:
                raise InvariantError(f"sequence {sequence.id} is queued and {sequence.state.name}")
            if sequence.row != -1 or sequence.pending or sequence.computed:
                raise InvariantError(f"queued sequence {sequence.id} holds a row or has work")

    def _rank(self, sequence: Sequence) -> None:
        priority = sequence.order[0]
        if priority not in self._fresh:
            self._fresh[priority] = {}
            self._resumed[priority] = []
            insort(self._priorities, priority)
