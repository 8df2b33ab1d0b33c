"""A step that takes in only what a cost model says that it finishes in time."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate

from weft.core.types import Sequence
from weft.cost.model import CostModel, step_time
from weft.cost.work import Work
from weft.sched.step import OpenStep


@dataclass(slots=True, kw_only=True)
class TimedStep(OpenStep):
    """An open step that knows how long it will take.

    Attributes:
        limit_s: seconds of ``cost`` that the step may take; ``room`` keeps it.
        work: the tally of what the step computes.
        beside_s: seconds for what the step does beside its own rows.
    """

    cost: CostModel
    limit_s: float
    work: Work = field(default_factory=Work)
    beside_s: float = 0.0

    def seconds(self) -> float:
        """Predicted seconds of what is in the step."""
        return self.beside_s + (step_time(self.cost, [self.work]) if self.work.tokens else 0.0)

    def room(self, start: int, most: int) -> int:
        """The largest number of tokens, up to ``most``, with which the step keeps its limit.

        Found by halving, since more tokens never take less time (OmniServe section 3.3.4).
        """
        most = min(most, self.budget)
        if self.limit_s <= 0:
            return 0
        if most <= 0 or self._seconds_with(start, most) <= self.limit_s:
            return most
        fits, too_many = 0, most
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if self._seconds_with(start, middle) <= self.limit_s:
                fits = middle
            else:
                too_many = middle
        return fits

    def _seconds_with(self, start: int, count: int) -> float:
        self.work.add(start, count)
        seconds = self.seconds()
        self.work.remove(start, count)
        return seconds

    def decodes_that_fit(self, contexts: Seq[int]) -> int:
        """How many of these sequences, the first ones, can compute one token each as well.

        Args:
            contexts: tokens of each sequence whose KV is there.
        """
        most = min(len(contexts), self.budget) if self.limit_s > 0 else 0
        sums = [0, *accumulate(contexts[:most])]
        if self._seconds_with_decodes(most, sums[most]) <= self.limit_s:
            return most
        fits, too_many = 0, most
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if self._seconds_with_decodes(middle, sums[middle]) <= self.limit_s:
                fits = middle
            else:
                too_many = middle
        return fits

    def _seconds_with_decodes(self, count: int, context: int) -> float:
        self._count_decodes(count, context)
        seconds = self.seconds()
        self._count_decodes(-count, -context)
        return seconds

    def _count_decodes(self, count: int, context: int) -> None:
        work = self.work
        work.tokens += count
        work.sampled += count
        work.decodes += count
        work.decode_context += context + count

    def put_single(self, sequences: list[Sequence], starts: list[int]) -> None:
        """Compute one token of each of these sequences, which count it already."""
        OpenStep.put_single(self, sequences, starts)
        self._count_decodes(len(starts), sum(starts))

    def put(self, sequence: Sequence, count: int) -> None:
        """Compute the next ``count`` tokens of the sequence in this step."""
        start = sequence.planned
        OpenStep.put(self, sequence, count)
        self.work.add(start, count, self.samples[-1])

    def guess(self, sequence: Sequence, draft: tuple[int, ...]) -> None:
        """Compute these tokens too, after the one that was put last for the sequence."""
        OpenStep.guess(self, sequence, draft)
        start = sequence.planned - 1
        self.work.remove(start, 1)
        self.work.add(start, 1 + len(draft), 1 + len(draft))
