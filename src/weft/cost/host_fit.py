"""Fits of a host tier's costs to measured moves and steps that carried piggybacked rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple

from weft.core.errors import ProfileError
from weft.cost.carried import carried_s
from weft.cost.fit import Fitted
from weft.cost.host_costs import CarryCost, HostCosts, MoveCost, WakeCost
from weft.cost.host_steps import Visit
from weft.cost.model import step_time
from weft.cost.work import Work

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ROUNDS = 20
LEAST_ERROR = 1e-4  # of a step, below which errors weigh the same
FREE = HostCosts(None, MoveCost(0, 0), MoveCost(0, 0), carry=CarryCost(0, 0))


class MovePoint(NamedTuple):
    """A move of KV in one direction.

    Attributes:
        seconds: that its step took longer than one without a move.
        step_s: that its step took.
    """

    tokens: int
    seconds: float
    step_s: float


class CarryPoint(NamedTuple):
    """A step that carries rows.

    Attributes:
        base_s: predicted without what carrying adds: its own rows, and the dense part of those that
            it carries.
        row_layers: layers that piggybacked rows went through, summed over the rows.
        seconds: measured.
    """

    base_s: float
    row_layers: int
    seconds: float


class TripPoint(NamedTuple):
    """Round trips of rows of the host that attend together, summed over the layers.

    Attributes:
        seconds: in which nobody attended to them.
        trip_s: from their submission to their results.
    """

    rows: int
    seconds: float
    trip_s: float


def carry_points(fitted: Fitted, own: Work, visit: Visit, *, paced: bool) -> list[CarryPoint]:
    """The steps of a visit that carried rows beside these, as the costs of the device see them.

    Args:
        paced: their seconds are divided by what steps without rows of the host took just before, in
            terms of their prediction, so that neither the error of that nor a slow phase of the
            machine is taken for the cost of carrying.
    """
    free = fitted.planned_with(FREE)
    pace = statistics.median(visit.alone) / step_time(free, [own]) if paced else 1.0
    points = []
    for seconds, crossed, finished in zip(
        visit.seconds, visit.crossed, visit.finished, strict=True
    ):
        if not any(crossed):
            continue  # where no result is there, a step is one as without rows of the host
        work = own.copy()
        work.sampled += finished
        base_s = step_time(free, [work]) + carried_s(free, own.tokens, crossed)
        points.append(CarryPoint(base_s, sum(crossed), seconds / pace))
    return points


def took(carry: CarryCost, points: Seq[CarryPoint]) -> float:
    """Times its prediction that the median step took."""
    return statistics.median(
        point.seconds / (point.base_s + carry.seconds(point.row_layers)) for point in points
    )


def fit_move(points: Seq[MovePoint]) -> MoveCost:
    """Seconds of any move and of each token, neither below 0; errors are relative to the step.

    Raises:
        ProfileError: fewer than two sizes, or a move that took no time.
    """
    if len({point.tokens for point in points}) < 2:
        raise ProfileError("moves of KV need at least two sizes to be fitted to")
    lines = [(point.tokens, point.seconds, point.step_s) for point in points]
    return MoveCost(*_line(lines, least_slope=0.0))


def fit_carry(points: Seq[CarryPoint]) -> CarryCost:
    """What carrying adds to any step, not below 0, and for each row in a layer.

    The latter may be below 0, since it corrects the dense part of these rows: that comes from whole
    prompts, whose tokens do a little more. The sum of the errors, relative to the whole steps, is
    least: single steps that others on the machine hold up do not count by how long.

    Raises:
        ProfileError: fewer than two points, or a step that took no time.
    """
    if len(points) < 2:
        raise ProfileError("piggybacked rows need at least two points to be fitted to")
    lines = [(p.row_layers, p.seconds - p.base_s, p.seconds) for p in points]
    return CarryCost(*_line(lines, rounds=ROUNDS))


def fit_wake(points: Seq[TripPoint]) -> WakeCost:
    """What round trips take beside attention, neither part below 0; errors as in ``fit_carry``.

    Raises:
        ProfileError: fewer than two points, or a round trip that took no time.
    """
    if len(points) < 2:
        raise ProfileError("round trips need at least two points to be fitted to")
    return WakeCost(*_line(points, least_slope=0.0, rounds=ROUNDS))


def _line(
    points: Seq[tuple[float, float, float]], least_slope: float = -math.inf, rounds: int = 0
) -> tuple[float, float]:
    """A line through (x, y) with a start of 0 or more, by errors relative to a third number.

    Args:
        rounds: of weighing errors anew, after which their sum is least, and not that of squares.
    """
    import numpy as np

    x, y, scale = np.array(points, float).T
    if (scale <= 0).any():
        raise ProfileError("a measured step took no time")
    columns, wanted = np.stack([np.ones_like(x), x], 1) / scale[:, None], y / scale
    weights = np.ones_like(x)
    for _ in range(1 + rounds):
        line = _bounded(columns * weights[:, None], wanted * weights, least_slope)
        errors = np.abs(columns @ np.array(line) - wanted)
        weights = 1 / np.sqrt(np.maximum(errors, LEAST_ERROR))
    return line


def _bounded(
    columns: NDArray[np.float64], wanted: NDArray[np.float64], least_slope: float
) -> tuple[float, float]:
    """Least squares with both coefficients within their bounds; 0 where one would leave them."""
    import numpy as np

    best, least = (0.0, 0.0), float(np.square(wanted).sum())
    for which in ([0, 1], [0], [1]):
        line = np.zeros(2)
        line[which], *_ = np.linalg.lstsq(columns[:, which], wanted, rcond=None)
        error = float(np.square(columns @ line - wanted).sum())
        if line[0] >= 0 and line[1] >= least_slope and error < least:
            best, least = (float(line[0]), float(line[1])), error
    return best
