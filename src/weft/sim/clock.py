"""A virtual clock that moves only when set."""

from __future__ import annotations


class VirtualClock:
    """A virtual clock in seconds, moved only by ``advance`` and ``reach``."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError("time does not go back")
        self._now += seconds

    def reach(self, at_s: float) -> None:
        """Advance to a time, unless it is past already."""
        self._now = max(self._now, at_s)
