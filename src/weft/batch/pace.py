"""How fast batches were answered lately, and what that says of the next one.

While more lines wait than can be open, the batch process notes every few seconds how much work has
ended, as `Demand` estimates it. These rows outlive it, by the identity of the model. A fit gives
the seconds of a prompt token and of an output token; where all work was of one mix, they are equal.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.batch.demand import Demand

if TYPE_CHECKING:
    from weft.batch.pool import Pool

ROW_S = 10.0  # that a row is about; the last one of a batch may be shorter
SHORTEST_S = 1.0
MOST_ROWS = 360  # of a model that are kept, the newest: an hour
OBSERVED_S = 10.0  # of all rows together; less says nothing
RIDGE = 0.01  # how far the mixes of work have to differ before they are told apart


@dataclass(frozen=True, slots=True)
class Observed:
    """Work that was done in some seconds."""

    seconds: float
    demand: Demand


@dataclass(frozen=True, slots=True)
class TokenPace:
    """Seconds of each token that is asked for, with everything else that the server did meanwhile.

    Attributes:
        output_s: None if there were no outputs.
    """

    input_s: float
    output_s: float | None

    def seconds(self, demand: Demand) -> float | None:
        """Time for some work; None if nothing like it was seen."""
        if self.output_s is None:
            return None if demand.output_tokens else self.input_s * demand.input_tokens
        return self.input_s * demand.input_tokens + self.output_s * demand.output_tokens


def fit_pace(rows: Iterable[Observed]) -> TokenPace | None:
    """The pace of what was observed; None if that is too little.

    Least squares, weighed by time, that leans towards the same price for each token, and scaled so
    that all rows together take the time that they took.
    """
    xx = xy = yy = seconds = inputs = outputs = 0.0
    for row in rows:
        x, y, s = row.demand.input_tokens, row.demand.output_tokens, row.seconds
        xx, xy, yy = xx + x * x / s, xy + x * y / s, yy + y * y / s
        seconds, inputs, outputs = seconds + s, inputs + x, outputs + y
    if seconds < OBSERVED_S or inputs + outputs <= 0:
        return None
    even = seconds / (inputs + outputs)
    if not outputs:
        return TokenPace(even, None)
    if not inputs:
        return TokenPace(0.0, even)
    a, d = xx * (1 + RIDGE), yy * (1 + RIDGE)
    e, f = inputs + RIDGE * xx * even, outputs + RIDGE * yy * even
    determinant = a * d - xy * xy
    input_s = max(0.0, (e * d - f * xy) / determinant)
    output_s = max(0.0, (a * f - xy * e) / determinant)
    scale = seconds / (input_s * inputs + output_s * outputs)
    return TokenPace(input_s * scale, output_s * scale)


class PaceMeter:
    """Measures how fast the lines of a pool end while others wait for their turn.

    Lines that are open at first have just begun: it starts once as many have ended.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._warm_at: float | None = None  # ended lines; None while no line waits
        self._since: tuple[float, Demand] | None = None

    def look(self, now: float) -> Observed | None:
        """Look at the pool, about once a second; what is to be kept, if it is time for that.

        Args:
            now: seconds on a clock that does not go back.
        """
        done = self._pool.done
        if not self._pool.waiting:
            found = self._take(now, done, SHORTEST_S)
            self._warm_at = self._since = None
            return found
        if self._warm_at is None:
            if not self._pool.num_open:  # those that wait are not in order yet
                return None
            self._warm_at = done.lines + self._pool.num_open
        if self._since is None:
            if done.lines >= self._warm_at:
                self._since = now, done
            return None
        found = self._take(now, done, ROW_S)
        if found is not None:
            self._since = now, done
        return found

    def _take(self, now: float, done: Demand, shortest_s: float) -> Observed | None:
        if self._since is None:
            return None
        began, before = self._since
        ended = done + before * -1
        enough = now - began >= shortest_s and ended.lines > 0
        return Observed(now - began, ended) if enough else None


class PaceTable:
    """Rows of what was observed, in the data base of a `BatchStore`.

    Args:
        writing: begins a transaction.
    """

    def __init__(
        self, base: sqlite3.Connection, writing: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._base = base
        self._writing = writing

    def add(self, served: str, row: Observed) -> None:
        """Keep a row of a model, and forget old ones."""
        work = row.demand
        values = (served, row.seconds, work.lines, work.input_tokens, work.output_tokens)
        with self._writing():
            self._base.execute(f"INSERT INTO paces ({_COLUMNS}) VALUES (?, ?, ?, ?, ?)", values)
            self._base.execute(
                "DELETE FROM paces WHERE served = ? AND place <= (SELECT place FROM paces "
                "WHERE served = ? ORDER BY place DESC LIMIT 1 OFFSET ?)",
                (served, served, MOST_ROWS),
            )

    def pace(self, served: str) -> TokenPace | None:
        """The pace of a model, as far as it is known."""
        rows = self._base.execute(f"SELECT {_COLUMNS} FROM paces WHERE served = ?", (served,))
        return fit_pace(Observed(seconds, Demand(*work)) for _, seconds, *work in rows)


_COLUMNS = "served, seconds, lines, input_tokens, output_tokens"
