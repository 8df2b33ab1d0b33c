"""Sampling on the CPU: a thin wrapper around the native module ``_native``."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.kernels.cpu import _native
from weft.kernels.reference_sampling import SETTINGS

if _native.SETTINGS != SETTINGS:
    raise ImportError("weft.kernels.cpu._native was built from another version; build it again")


def sample(
    logits: Tensor,
    settings: Tensor,
    seeds: Tensor,
    counters: Tensor,
    tokens: Tensor,
    finite: Tensor,
) -> None:
    """Choose a token for each row; see ``interface.Sample``.

    Raises:
        ValueError: shapes or types do not fit.
    """
    draws = uniform(seeds.numpy(), counters.numpy())
    _sample(logits, settings.numpy(), draws, tokens.numpy(), finite.numpy())


def sample_rows(
    logits: Tensor, settings: NDArray[np.float64], draws: NDArray[np.float64]
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
    logits: Tensor,
    settings: NDArray[np.float64],
    draws: NDArray[np.float64],
    tokens: NDArray[np.int64],
    finite: NDArray[np.bool_],
) -> None:
    size = logits.shape[1]
    if logits.dtype != torch.float32 or not logits.is_contiguous() or not logits.is_cpu or not size:
        raise ValueError(f"cannot choose from {list(logits.shape)} of {logits.dtype}")
    _native.sample(logits.data_ptr(), size, settings, draws, tokens, finite)


def uniform(seeds: NDArray[np.int64], counters: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return one number in [0, 1) for each (seed, counter): those of ``philox.uniform``."""
    numbers = np.empty(len(seeds), np.float64)
    _native.uniform(seeds, counters, numbers)
    return numbers
