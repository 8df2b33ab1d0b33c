"""Curves through measured points: piecewise linear (measured adaptively) and bilinear."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from weft.core.errors import ProfileError


def divide(
    measure: Callable[[int], float], low: int, high: int, step: int = 16
) -> dict[int, float]:
    """Measure a curve with spikes where it bends: algorithm 1 of OmniServe (section 3.3.1).

    Where the ends of an interval differ by less than a threshold, all between them is interpolated;
    otherwise both halves are looked at. The threshold is what ``step`` more tokens cost at the
    start of the curve, as in the paper (its latency at 16 minus that at 1), but at least 5 % of the
    larger end, since what repeated measurements differ by is no spike. Intervals of up to ``step``
    are not divided.

    Returns:
        Measured seconds by tokens, both ends included.
    """
    known: dict[int, float] = {}

    def at(tokens: int) -> float:
        if tokens not in known:
            known[tokens] = measure(tokens)
        return known[tokens]

    threshold = abs(at(min(low + step - 1, high)) - at(low))
    intervals = [(low, high)]
    while intervals:
        left, right = intervals.pop()
        flat = abs(at(right) - at(left)) < max(threshold, 0.05 * max(at(left), at(right)))
        if flat or right - left <= step:
            continue
        middle = (left + right) // 2
        intervals += [(middle, right), (left, middle)]
    return dict(sorted(known.items()))


@dataclass(frozen=True)
class Curve:
    """Seconds by tokens, linear between knots; extrapolated beyond the last one."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    _table: list[float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.tokens, self.tokens[1:], strict=False))
        if len(self.tokens) != len(self.seconds) or len(self.tokens) < 2 or not rising:
            raise ProfileError("a curve needs at least two knots of rising tokens")
        object.__setattr__(self, "_table", self._at_each())

    def at(self, tokens: int) -> float:
        """Seconds for so many tokens."""
        return self._table[tokens] if tokens < len(self._table) else self._between(tokens)

    def weights(self, tokens: int) -> list[tuple[int, float]]:
        """The knots between which ``tokens`` lies, with their shares in its seconds."""
        left = min(max(bisect_right(self.tokens, tokens) - 1, 0), len(self.tokens) - 2)
        low, high = self.tokens[left], self.tokens[left + 1]
        share = (tokens - low) / (high - low)
        return [(left, 1 - share), (left + 1, share)]

    def _between(self, tokens: int) -> float:
        return sum(share * self.seconds[knot] for knot, share in self.weights(tokens))

    def _at_each(self) -> list[float]:
        """Seconds of each number of tokens up to the last knot, as `_between` has them."""
        table: list[float] = []
        ends = [*self.tokens[1:-1], self.tokens[-1] + 1]
        for left, end in enumerate(ends):
            low, width = self.tokens[left], self.tokens[left + 1] - self.tokens[left]
            a, b = self.seconds[left], self.seconds[left + 1]
            shares = [(tokens - low) / width for tokens in range(len(table), end)]
            table += [(1 - share) * a + share * b for share in shares]
        return table


@dataclass(frozen=True)
class Grid:
    """Seconds of CPU attention by decodes and their mean context, bilinear between grid points.

    Outside the grid the nearest cell goes on, never below 0.

    Attributes:
        decodes, contexts: rising.
        seconds: a row for each of ``decodes``, with an entry for each of ``contexts``.
    """

    decodes: tuple[int, ...]
    contexts: tuple[float, ...]
    seconds: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        shape = {len(row) for row in self.seconds} == {len(self.contexts)}
        enough = len(self.decodes) > 1 and len(self.contexts) > 1
        if not (shape and enough and len(self.seconds) == len(self.decodes)):
            raise ProfileError("a table of CPU attention needs a full grid of at least 2 x 2")

    @classmethod
    def of(cls, measured: Mapping[tuple[int, int], float]) -> Grid:
        """From seconds by (decodes, context).

        Raises:
            ProfileError: a point of the grid is missing.
        """
        decodes = tuple(sorted({n for n, _ in measured}))
        contexts = tuple(sorted({context for _, context in measured}))
        missing = [(n, c) for n in decodes for c in contexts if (n, c) not in measured]
        if missing:
            raise ProfileError(f"the table of CPU attention lacks {missing[0]}")
        rows = tuple(tuple(measured[n, c] for c in contexts) for n in decodes)
        return cls(decodes, contexts, rows)

    def at(self, decodes: int, context: float) -> float:
        """Seconds for so many decodes whose contexts sum up to ``context`` tokens."""
        low, x = _cell(self.decodes, decodes)
        left, y = _cell(self.contexts, context / decodes)
        top, bottom = self.seconds[low], self.seconds[low + 1]
        one = top[left] + (top[left + 1] - top[left]) * y
        two = bottom[left] + (bottom[left + 1] - bottom[left]) * y
        return max(0.0, one + (two - one) * x)


def _cell(edges: Seq[float], value: float) -> tuple[int, float]:
    """The cell that a value lies in, and how far along it lies."""
    left = min(max(bisect_right(edges, value) - 1, 0), len(edges) - 2)
    return left, (value - edges[left]) / (edges[left + 1] - edges[left])
