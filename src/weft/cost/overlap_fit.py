"""Fits what steps of overlapped sub-batches take beside their parts."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from weft.core.errors import ProfileError
from weft.cost.fit import Fitted
from weft.cost.host_costs import OverlapCost
from weft.cost.host_fit import LEAST_ERROR
from weft.cost.model import step_time
from weft.cost.work import Work

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ROUNDS = 40
MOVED = 1e-7  # by which each cost is changed to see what it does to predictions


class OverlapPoint(NamedTuple):
    """A step of one or two sub-batches, and the seconds that it took."""

    works: list[Work]
    seconds: float


def predicted_s(fitted: Fitted, cost: OverlapCost, works: Seq[Work]) -> float:
    """Seconds of a step by costs that are planned with, but for those of overlapping."""
    assert fitted.host is not None, "a host tier is planned with"
    return step_time(fitted.planned_with(replace(fitted.host, overlap=cost)), works)


def fit_overlap(fitted: Fitted, points: Seq[OverlapPoint]) -> OverlapCost:
    """What makes predictions of ``step_time`` fit to the steps.

    Which side of an overlap is the longer one depends on these costs, so that they are improved in
    rounds (Gauss-Newton). The sum of the errors, relative to the steps, is least, as in
    ``fit_carry``. Nothing that makes predictions worse is taken; no wait and no drag is below 0.

    Args:
        fitted: with a host tier that is planned with.

    Raises:
        ProfileError: fewer than two points, or a step that took no time.
    """
    import numpy as np

    if len(points) < 2:
        raise ProfileError("overlapped steps need at least two points to be fitted to")
    taken = np.array([point.seconds for point in points])
    if (taken <= 0).any():
        raise ProfileError("a measured step took no time")

    def off(cost: OverlapCost) -> NDArray[np.float64]:
        guesses = np.array([predicted_s(fitted, cost, point.works) for point in points])
        return np.asarray(guesses / taken - 1, np.float64)

    best = OverlapCost()
    errors, step = off(best), 1.0
    for _ in range(ROUNDS):
        slopes = [(off(_moved(best, name)) - errors) / MOVED for name in OverlapCost._fields]
        columns = np.stack(slopes, 1)
        weights = 1 / np.sqrt(np.maximum(np.abs(errors), LEAST_ERROR))
        scale = np.maximum(np.abs(columns).max(0), 1e-30)
        change, *_ = np.linalg.lstsq(
            columns / scale * weights[:, None], -errors * weights, rcond=1e-6
        )
        tried = OverlapCost(*(np.array(best) + step * change / scale).tolist())
        tried = tried._replace(wait_s=max(0.0, tried.wait_s), drag=max(0.0, tried.drag))
        again = off(tried)
        if np.abs(again).sum() < np.abs(errors).sum():
            best, errors, step = tried, again, min(1.0, 2 * step)
        else:
            step /= 2
    return best


def _moved(cost: OverlapCost, name: str) -> OverlapCost:
    return cost._replace(**{name: getattr(cost, name) + MOVED})
