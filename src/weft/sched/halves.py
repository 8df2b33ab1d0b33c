"""Splits a step in two halves whose dense layers and decode attention overlap (NanoFlow).

Only above the compute ridge, as halves read all weights twice, and only where the halves are
predicted to take less time by more than ``LEAST_GAIN``. Of a few ways to split a step the one that
is predicted to gain most is taken: decodes alone beside prompts, which hide their attention; or
prompts and decodes on both sides, each of which then has arithmetic for the weights that it reads.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from weft.cost.interference import LEAST_GAIN, Speeds
from weft.cost.model import CostModel, step_time
from weft.cost.work import Work
from weft.sched.batch import BatchBuilder

# That halves are padded to in simulations; executors have their own, which are multiples of 128,
# too (BlendServe appendix A.2).
HALF_SIZES = (128, 256, 384, 512)


@dataclass(frozen=True)
class Measured:
    """What halves are predicted with: the costs of steps, and speeds of what runs side by side."""

    cost: CostModel
    speeds: Speeds


class Halves:
    """See the module docstring.

    Args:
        sizes: tokens that a half is padded to, ascending; larger halves have no padding.
        least: tokens of a step below which nothing is split.
        measured: None splits every step that has decodes for both halves, or prompts and decodes.
    """

    def __init__(self, sizes: Seq[int], least: int, measured: Measured | None) -> None:
        self._sizes, self._least, self._measured = tuple(sizes), least, measured

    @property
    def speeds(self) -> Speeds | None:
        """What halves slow each other down to; None where nothing was measured."""
        return None if self._measured is None else self._measured.speeds

    def split(self, step: BatchBuilder) -> int:
        """Put the rows of a step in the order of its halves.

        Returns:
            how many of them are in the first half; all if the step is not split.
        """
        whole = len(step.rows)
        drafted = {sequence.row: len(draft) for sequence, draft in step.drafts}
        counts = [n + drafted.get(row, 0) for row, n in zip(step.rows, step.counts, strict=True)]
        if whole < 2 or sum(counts) < self._least:
            return whole
        decodes = [i for i in range(whole) if counts[i] == 1 and step.starts[i]]
        others = [i for i in range(whole) if counts[i] > 1 or not step.starts[i]]
        others.sort(key=lambda i: -counts[i])
        best: tuple[list[int], list[int]] | None = None
        limit_s = self._limit_s(step, counts)
        for second in self._seconds(step, counts, decodes, others):
            chosen = set(second)
            first = [i for i in range(whole) if i not in chosen]
            found_s = self._halves_s(step, counts, first, second)
            if found_s < limit_s:
                best, limit_s = (first, second), found_s
        if best is None:
            return whole
        _reorder(step, [*best[0], *best[1]])
        return len(best[0])

    def _seconds(
        self, step: BatchBuilder, counts: Seq[int], decodes: Seq[int], others: Seq[int]
    ) -> Iterator[list[int]]:
        """Rows that may be the second half.

        All decodes beside prompts; as many decodes as suit the sizes, every other one by context or
        those with the longest; or every other prompt and decode.

        Args:
            others: rows of more than one token, or of the first one; longest first.
        """
        if others and decodes:
            yield list(decodes)
        if self._measured is None and others:
            return
        tokens = sum(counts)
        sizes = [n for n in self._sizes if tokens <= 4 * n <= 3 * tokens] or [tokens // 2]
        sizes.sort(key=lambda n: abs(2 * n - tokens))
        by_context = sorted(decodes, key=lambda i: -step.starts[i])
        every_other = [*by_context[::2], *by_context[1::2]]
        for size in sizes:
            if size <= len(decodes) - (not others):
                yield sorted(every_other[:size])
                if others:
                    yield sorted(by_context[:size])
        yield from self._dealt(counts, others, every_other, sizes[0])

    def _dealt(
        self, counts: Seq[int], others: Seq[int], decodes: Seq[int], size: int
    ) -> Iterator[list[int]]:
        """Prompts to the half with fewer tokens, and decodes that fill the second one up."""
        loads, second = [0, 0], list[int]()
        for i in others:
            lighter = loads[1] < loads[0]
            loads[lighter] += counts[i]
            if lighter:
                second.append(i)
        room = size - loads[1]
        if second and 0 <= room <= len(decodes):
            yield sorted([*second, *decodes[:room]])

    def _limit_s(self, step: BatchBuilder, counts: Seq[int]) -> float:
        """Seconds that halves must stay below: those of the whole step, but for the least gain."""
        if self._measured is None:
            return 1.0
        work = _work(step, counts, range(len(counts)))
        return step_time(self._measured.cost, [work]) / LEAST_GAIN

    def _halves_s(
        self, step: BatchBuilder, counts: Seq[int], first: Seq[int], second: Seq[int]
    ) -> float:
        """Predicted seconds of halves with their padding; 0 of any where nothing was measured."""
        if self._measured is None:
            return 0.0
        works = [_work(step, counts, half) for half in (first, second)]
        for work in works:
            at = bisect_left(self._sizes, work.tokens)
            if at < len(self._sizes):
                work.tokens = self._sizes[at]
        return self._measured.speeds.halves_s(self._measured.cost, works)


def _work(step: BatchBuilder, counts: Seq[int], rows: Seq[int]) -> Work:
    """What some rows of a step compute."""
    work = Work()
    for i in rows:
        work.add(step.starts[i], counts[i], counts[i] - step.counts[i] + step.samples[i])
    return work


def _reorder(step: BatchBuilder, order: Seq[int]) -> None:
    """Put the rows of a step in another order."""
    step.sequences = [step.sequences[i] for i in order]
    step.rows = [step.rows[i] for i in order]
    step.starts = [step.starts[i] for i in order]
    step.counts = [step.counts[i] for i in order]
    step.samples = [step.samples[i] for i in order]
