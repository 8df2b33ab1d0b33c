"""The last minutes: targets that were kept, and how long sequences took."""

from __future__ import annotations

import time
from collections import Counter, deque

WINDOW_S = 300.0
SAMPLE_EVERY_S = 10.0


class Attainment:
    """Compares counts of sequences with those of some minutes ago."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, Counter[str]]] = deque()

    @property
    def due(self) -> bool:
        """Whether it is time for a sample."""
        return not self._samples or time.monotonic() - self._samples[-1][0] >= SAMPLE_EVERY_S

    def sample(self, counts: Counter[str]) -> None:
        """Remember the counts of this moment; they only grow."""
        now = time.monotonic()
        self._samples.append((now, Counter(counts)))
        while len(self._samples) > 1 and self._samples[1][0] <= now - WINDOW_S:
            self._samples.popleft()

    def share(self, counts: Counter[str], kept: str, missed: str) -> float | None:
        """Of what has been counted within the window, the share of ``kept``; None for nothing.

        Args:
            counts: of this moment.
            kept, missed: names of the two counts.
        """
        before = self._before()
        good, bad = (counts[name] - before[name] for name in (kept, missed))
        return good / (good + bad) if good + bad > 0 else None

    def recent(self, counts: Counter[str]) -> Counter[str]:
        """Of these counts, what has been counted within the window."""
        before = self._before()
        return Counter({name: count - before[name] for name, count in counts.items()})

    def _before(self) -> Counter[str]:
        return self._samples[0][1] if self._samples else Counter()
