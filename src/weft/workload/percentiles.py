"""Percentiles of times, of single values and of weighted values."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = Seq[float] | NDArray[Any]
PERCENTILES = (50, 90, 95, 99, 99.9)


def percentiles_ms(values_s: Values, counts: Values | None = None) -> dict[str, float] | None:
    """Mean, percentiles (linear between neighbours) and maximum in ms; None without values.

    Args:
        counts: how many equal values each one stands for; one by default.
    """
    if not len(values_s):
        return None
    values = np.asarray(values_s, float) * 1e3
    if counts is None:
        found, mean = np.percentile(values, PERCENTILES), values.mean()
    else:
        weights = np.asarray(counts, np.int64)
        found, mean = _counted(values, weights), np.average(values, weights=weights)
    named = {f"p{p:g}": float(v) for p, v in zip(PERCENTILES, found, strict=True)}
    return {"mean": float(mean), **named, "max": float(values.max())}


def _counted(values: np.ndarray[Any, Any], counts: np.ndarray[Any, Any]) -> Any:
    """``np.percentile`` of every value repeated by its count."""
    order = np.argsort(values, kind="stable")
    values, last = values[order], np.cumsum(counts[order]) - 1  # index of its last copy
    at = np.asarray(PERCENTILES) / 100 * last[-1]
    low, high = (values[np.searchsorted(last, edge(at))] for edge in (np.floor, np.ceil))
    return low + (high - low) * (at - np.floor(at))
