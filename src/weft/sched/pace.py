"""How long steps really take beside what was predicted, and when the launched ones will end."""

from __future__ import annotations

from collections import deque

MEMORY = 0.95  # weight of the past at each step: about the last 20 steps count
OUTLIER = 3.0  # a step that takes longer than so many times its prediction counts as this


class Pace:
    """Corrects predictions by the steps of the recent past.

    Attributes:
        correction: seconds that pass for each second that was predicted.

    Args:
        prior_s: predicted seconds that count as exact at the start, so that the first steps, which
            may be slow, do not decide alone.
    """

    def __init__(self, prior_s: float) -> None:
        self.correction = 1.0
        self._predicted_s = self._real_s = prior_s
        self._launched: deque[tuple[float, float]] = deque()  # launch, prediction
        self._collected_at = 0.0

    @property
    def idle(self) -> bool:
        """Whether no launched step is open."""
        return not self._launched

    def launched(self, predicted_s: float, now: float) -> None:
        """A step starts now, or when those that were launched before it have ended."""
        self._launched.append((now, predicted_s))

    def collected(self, now: float) -> None:
        """The oldest launched step has ended; ``now`` 0 leaves it undated, so nothing is learnt."""
        launched, predicted = self._launched.popleft()
        if not now:
            return
        real = now - max(launched, self._collected_at)
        self._collected_at = now
        expected = predicted * self.correction
        self._predicted_s = self._predicted_s * MEMORY + predicted
        self._real_s = self._real_s * MEMORY + min(real, OUTLIER * expected)
        self.correction = self._real_s / self._predicted_s

    def ends_at(self, now: float) -> float:
        """When the launched steps will have ended, at ``now`` if there are none."""
        at = self._collected_at
        for launched, predicted in self._launched:
            at = max(at, launched) + predicted * self.correction
        return max(at, now)
