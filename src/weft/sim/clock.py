"""A clock that only moves when it is told to."""

from __future__ import annotations


class VirtualClock:
    """Seconds that advance by ``advance`` alone."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError("time does not go back")
        self._now += seconds
