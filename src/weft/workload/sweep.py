"""Sweeps over several rates: the saturation point and the serviceable load."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

FEWEST_RATES = 4  # a line has two parameters, a bend three
ATTAINED = 0.95  # the share of requests within their SLOs at a serviceable load
FLAT = 0.5  # a second segment steeper than this share of the first is no saturation


@dataclass(frozen=True, slots=True)
class Fit:
    """Two segments: ``slope * offered`` up to ``knee``, then on with ``slope_after``.

    Attributes:
        knee: the offered load at which the server saturates.
        plateau: what it gives there.
        error: root mean square of what the fit misses.
    """

    knee: float
    plateau: float
    slope: float
    slope_after: float
    error: float


def fit_saturation(offered: Seq[float], given: Seq[float]) -> Fit | None:
    """Fit two joined segments by least squares; None if the load never bends.

    The knee is searched over the whole range in fine steps; for each knee the best slopes follow
    from a linear system.
    """
    x, y = np.asarray(offered, float), np.asarray(given, float)
    if len(set(x.tolist())) < FEWEST_RATES:
        return None
    order = np.sort(np.unique(x))
    # each segment keeps two points at least, else it fits whatever noise there is
    candidates = np.linspace(order[1], order[-2], 2001)
    best: Fit | None = None
    for knee in candidates:
        basis = np.stack([np.minimum(x, knee), np.maximum(x - knee, 0)], axis=1)
        (slope, after), *_ = np.linalg.lstsq(basis, y, rcond=None)
        error = float(np.sqrt(np.mean((basis @ (slope, after) - y) ** 2)))
        if best is None or error < best.error - 1e-12:
            best = Fit(float(knee), float(slope * knee), float(slope), float(after), error)
    return best if best is not None and best.slope_after <= FLAT * best.slope else None


def serviceable(runs: Seq[Mapping[str, Any]]) -> float | None:
    """The highest load up to which every run kept its SLOs, None if not even the lowest did."""
    found = None
    for run in sorted(runs, key=lambda run: float(run["load"])):
        if run["attainment"] < ATTAINED:
            break
        found = float(run["load"])
    return found
