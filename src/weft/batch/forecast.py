"""When a batch will be complete, by the lines that have ended lately."""

from __future__ import annotations

from collections import deque

WINDOW_S = 60.0  # of the past that counts
OBSERVED_S = 10.0  # less says nothing


class EndForecast:
    """Predicts the end of one batch; ``look`` at it now and then."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()  # (time, lines done), oldest first

    def look(self, now: float, done: int, total: int) -> float | None:
        """The time at which all lines will be done.

        Args:
            now: seconds on a clock that does not go back.

        Returns:
            Infinity if none has ended for a while; None if it is too early to say.
        """
        self._seen.append((now, done))
        while len(self._seen) > 2 and now - self._seen[1][0] >= WINDOW_S:
            self._seen.popleft()
        began, before = self._seen[0]
        if done >= total:
            return now
        if done == before:
            return float("inf") if now - began >= WINDOW_S else None
        if now - began < OBSERVED_S:
            return None
        return now + (total - done) * (now - began) / (done - before)
