"""Compares measured step times with predictions, and predicts the end of launched steps."""

from __future__ import annotations

import math
from collections import deque

MEMORY = 0.95  # weight of the past at each step: about the last 20 steps count
OUTLIER = 3.0  # a step that takes longer than so many times its prediction counts as this


class Ratio:
    """Seconds that pass for each second that was predicted, over the last steps.

    Args:
        prior_s: predicted seconds that count as exact at the start, so that the first steps, which
            may be slow, do not decide alone.
    """

    def __init__(self, prior_s: float) -> None:
        self.value = 1.0
        self._predicted_s = self._real_s = prior_s

    def learn(self, predicted_s: float, real_s: float) -> None:
        """Record a step."""
        real_s = min(real_s, OUTLIER * predicted_s * self.value)
        self._predicted_s = self._predicted_s * MEMORY + predicted_s
        self._real_s = self._real_s * MEMORY + real_s
        self.value = self._real_s / self._predicted_s


class Pace:
    """Corrects predictions by the steps of the recent past.

    Steps with a target between tokens are short and others long, and what a profile does not know,
    such as the time to publish tokens, weighs more in short ones. So each kind has its own ratio.

    Attributes:
        urgent: of which kind the steps are that are planned now.
    """

    def __init__(self, prior_s: float) -> None:
        self.urgent = False
        self._ratios = {True: Ratio(prior_s), False: Ratio(prior_s)}
        # launch, prediction, kind, and whether its time says anything of predictions
        self._launched: deque[tuple[float, float, bool, bool]] = deque()
        self._collected_at = 0.0

    @property
    def idle(self) -> bool:
        """Whether no launched step is open."""
        return not self._launched

    @property
    def device_idle(self) -> bool:
        """Whether no launched step computes rows of the device."""
        return not any(teaches for *_, teaches in self._launched)

    @property
    def drift(self) -> float:
        """How far predictions are off, of the kind of steps that is off farther."""
        return max((r.value for r in self._ratios.values()), key=lambda v: abs(math.log(v)))

    @property
    def correction(self) -> float:
        """Seconds that pass for each second that is predicted now."""
        return self._ratios[self.urgent].value

    def launched(self, predicted_s: float, now: float, *, teaches: bool = True) -> None:
        """A step starts now, or when those that were launched before it have ended.

        Args:
            teaches: False for one that may wait for something else, as for the host.
        """
        self._launched.append((now, predicted_s, self.urgent, teaches))

    def collected(self, now: float) -> None:
        """The oldest launched step has ended; at ``now`` 0 its time is unknown and not recorded."""
        launched, predicted, urgent, teaches = self._launched.popleft()
        if not now:
            return
        if teaches:
            self._ratios[urgent].learn(predicted, now - max(launched, self._collected_at))
        self._collected_at = now

    def ends_at(self, now: float) -> float:
        """The predicted end of the launched steps; ``now`` if there are none."""
        at = self._collected_at
        for launched, predicted, urgent, _ in self._launched:
            at = max(at, launched) + predicted * self._ratios[urgent].value
        return max(at, now)
