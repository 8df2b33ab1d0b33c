"""Compares measured step times with predictions, and predicts the end of launched steps."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

MEMORY = 0.95  # weight of the past at each step: about the last 20 steps count
FORGOTTEN = 0.02  # share of a surplus that is not believed after a step without, to try it again
LEAST_FORGOTTEN = FORGOTTEN / 64  # where it was as slow each time that it was tried again
NOISE = 1.05  # steps that take up to so many times as long as others are not slower
TRIED_AGAIN = 0.9  # belief below which a step counts as a trial
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

    def weaken(self, share: float) -> None:
        """Let what was learned count for this share of what it counted."""
        self._predicted_s *= share
        self._real_s *= share


class Surplus:
    """Seconds that steps which carry piggybacked rows take beyond what is predicted without them.

    What a profile says of these rows may leave out most of it: where the host's cores are busy with
    more than attention, the step that waits for them or shares them is slower.
    """

    def __init__(self) -> None:
        self._mean_s = self._weight = 0.0
        self._belief = 1.0

    @property
    def value(self) -> float:
        """Seconds that a step takes longer, as far as they are believed."""
        return self._mean_s * self._belief

    def learn(self, surplus_s: float) -> None:
        """Record a step that carries rows."""
        self._weight = self._weight * MEMORY * self._belief + 1
        self._mean_s += (surplus_s - self._mean_s) / self._weight
        self._belief = 1.0

    def fade(self) -> None:
        """Believe it less with a step without: it may have been slowness of another kind."""
        self._belief *= 1 - FORGOTTEN


class HostSlowdown:
    """How much longer steps with decodes of the host take than predicted, beside those without.

    Where a profile had the host's cores to itself and a server shares them, or where the link is
    busy, these steps alone are slower than their prediction.

    Args:
        prior_s: as of ``Ratio``.
    """

    def __init__(self, prior_s: float) -> None:
        self._joined, self._alone = Ratio(prior_s), Ratio(prior_s)
        self._belief, self._forgotten = 1.0, FORGOTTEN
        self._launched: deque[tuple[float, float, bool, bool]] = deque()
        self._collected_at = 0.0

    @property
    def value(self) -> float:
        """The seconds for each that is predicted; 1 where it is not slower by more than noise."""
        ratio = self._joined.value / self._alone.value
        return 1 + (ratio - 1) * self._belief if ratio > NOISE else 1.0

    def launched(self, predicted_s: float, now: float, *, joined: bool, moves: bool) -> None:
        """A step starts now, or when those that were launched before it have ended.

        Args:
            predicted_s: of all that it does, without this slowdown.
            joined: whether it has decodes of the host.
            moves: whether it moves KV, so that nothing is learned from it.
        """
        self._launched.append((now, predicted_s, joined, moves))

    def collected(self, now: float) -> None:
        """The oldest launched step has ended; at ``now`` 0 its time is unknown and not recorded."""
        at, predicted_s, joined, moves = self._launched.popleft()
        if not now:
            return
        real_s = now - max(at, self._collected_at)
        self._collected_at = now
        if not joined:
            self._belief *= 1 - self._forgotten
        if moves or predicted_s <= 0:
            return
        if not joined:
            self._alone.learn(predicted_s, real_s)
            return
        if self._belief < TRIED_AGAIN:
            slower = real_s / predicted_s / self._alone.value > self.value
            self._forgotten = max(self._forgotten / 2, LEAST_FORGOTTEN) if slower else FORGOTTEN
        self._joined.weaken(self._belief)
        self._joined.learn(predicted_s, real_s)
        self._belief = 1.0


class LaunchedStep(NamedTuple):
    """A launched step; times on the monotonic clock."""

    at: float
    predicted_s: float
    beside_s: float
    urgent: bool
    computes: bool
    carries: bool
    moves: bool


class Pace:
    """Corrects predictions by the steps of the recent past.

    Steps with a target between tokens are short and others long, and what a profile does not know,
    such as the time to publish tokens, weighs more in short ones. So each kind has its own ratio.
    Neither learns of rows that are piggybacked or of KV that moves, which have costs of their own.

    Attributes:
        urgent: of which kind the steps are that are planned now.
        surplus: what steps take longer that carry piggybacked rows.
    """

    def __init__(self, prior_s: float) -> None:
        self.urgent = False
        self.surplus = Surplus()
        self._ratios = {True: Ratio(prior_s), False: Ratio(prior_s)}
        self._launched: deque[LaunchedStep] = deque()
        self._collected_at = 0.0

    @property
    def idle(self) -> bool:
        """Whether no launched step is open."""
        return not self._launched

    @property
    def device_idle(self) -> bool:
        """Whether no launched step computes rows of the device."""
        return not any(step.computes for step in self._launched)

    @property
    def drift(self) -> float:
        """How far predictions are off, of the kind of steps that is off farther."""
        return max((r.value for r in self._ratios.values()), key=lambda v: abs(math.log(v)))

    @property
    def correction(self) -> float:
        """Seconds that pass for each second that is predicted now."""
        return self._ratios[self.urgent].value

    def launched(
        self,
        predicted_s: float,
        now: float,
        *,
        computes: bool = True,
        carries: bool = False,
        moves: bool = False,
        beside_s: float = 0.0,
    ) -> float:
        """A step starts now, or when those that were launched before it have ended.

        Args:
            predicted_s: of all that it does.
            computes: False for one that may only wait for something else, as for the host.
            carries: whether it carries piggybacked rows.
            moves: whether it moves KV.
            beside_s: of the prediction, the part that is of piggybacked rows.

        Returns:
            Seconds that it will take, as far as recent steps tell.
        """
        self._launched.append(
            LaunchedStep(now, predicted_s, beside_s, self.urgent, computes, carries, moves)
        )
        return predicted_s * self.correction

    def collected(self, now: float, *, leased: bool = False) -> float:
        """The oldest launched step has ended; at ``now`` 0 its time is unknown and not recorded.

        Args:
            leased: whether others followed it under its lease: such steps are faster, and tell
                nothing of those that are planned.

        Returns:
            When the last step of a lease began, as predicted: whatever ended it came after that. 0
            without a lease.
        """
        step = self._launched.popleft()
        if not now:
            return 0.0
        real_s = now - max(step.at, self._collected_at)
        self._collected_at = now
        if leased:
            return now - step.predicted_s * self._ratios[step.urgent].value
        if step.computes and not step.moves:
            self._learn(step, real_s)
        return 0.0

    def _learn(self, step: LaunchedStep, real_s: float) -> None:
        own_s, ratio = step.predicted_s - step.beside_s, self._ratios[step.urgent]
        surplus_s = real_s - own_s * ratio.value
        if step.carries:
            self.surplus.learn(max(0.0, surplus_s))
        else:
            self.surplus.fade()
        if not step.carries or surplus_s < 0:
            ratio.learn(own_s, real_s)

    def ends_at(self, now: float) -> float:
        """The predicted end of the launched steps; ``now`` if there are none."""
        at = self._collected_at
        for step in self._launched:
            at = max(at, step.at) + step.predicted_s * self._ratios[step.urgent].value
        return max(at, now)
