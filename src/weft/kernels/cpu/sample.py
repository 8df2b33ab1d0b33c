"""Sampling on the CPU: a thin wrapper around the native module ``_native``."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weft.kernels.arrays import Array, address, dtype_name, on_cpu, strides, to_numpy
from weft.kernels.cpu import _native
from weft.kernels.sampling import PENALTIES, SETTINGS, PenalisedRows

if (_native.SETTINGS, _native.PENALTIES) != (SETTINGS, PENALTIES):
    raise ImportError("weft.kernels.cpu._native was built from another version; build it again")


def sample(
    logits: Array,
    settings: Array,
    seeds: Array,
    counters: Array,
    tokens: Array,
    finite: Array,
) -> None:
    """Choose a token for each row; see ``interface.Sample``.

    Raises:
        ValueError: shapes or types do not fit.
    """
    draws = uniform(to_numpy(seeds), to_numpy(counters))
    _sample(logits, to_numpy(settings), draws, to_numpy(tokens), to_numpy(finite))


def penalise(logits: Array, asked: PenalisedRows) -> None:
    """Apply penalties in place; see ``sampling.Penalise``.

    Raises:
        ValueError: shapes or types do not fit.
        IndexError: a row has a token that the logits lack.
    """
    _check(logits)
    at = asked.at
    if len(at) and not 0 <= at.min() <= at.max() < len(logits):
        raise ValueError(f"there are {len(logits)} rows of logits, and not those of {at}")
    _native.penalise(
        address(logits), logits.shape[1], at, asked.tokens, asked.rows, asked.lengths,
        asked.num_prompt, asked.penalties,
    )  # fmt: skip


def sample_rows(
    logits: Array, settings: NDArray[np.float64], draws: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return a token for each row, and whether its logits are finite; see
    ``reference_sampling.sample_rows``.

    Raises:
        ValueError: shapes or types do not fit.
    """
    rows = len(logits)
    tokens, finite = np.empty(rows, np.int64), np.empty(rows, np.bool_)
    _sample(logits, settings, draws, tokens, finite)
    return tokens, finite


def _sample(
    logits: Array,
    settings: NDArray[np.float64],
    draws: NDArray[np.float64],
    tokens: NDArray[np.int64],
    finite: NDArray[np.bool_],
) -> None:
    _check(logits)
    _native.sample(address(logits), logits.shape[1], settings, draws, tokens, finite)


def _check(logits: Array) -> None:
    size = logits.shape[1]
    dense = len(logits) < 2 or strides(logits) == (size, 1)
    if dtype_name(logits.dtype) != "float32" or not dense or not on_cpu(logits) or not size:
        raise ValueError(f"cannot choose from {list(logits.shape)} of {logits.dtype}")


def uniform(seeds: NDArray[np.int64], counters: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return one number in [0, 1) for each (seed, counter): those of ``philox.uniform``."""
    numbers = np.empty(len(seeds), np.float64)
    _native.uniform(seeds, counters, numbers)
    return numbers
