"""The choice of tokens on the CPU: a thin wrapper around the native module ``_native``."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.kernels.cpu import _native


def choose(
    logits: Tensor, settings: NDArray[np.float64], draws: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return a token for each row, and whether its logits are finite; see ``choice.choose``.

    Raises:
        ValueError: shapes or types do not fit.
    """
    rows, size = logits.shape
    if logits.dtype != torch.float32 or not logits.is_contiguous() or not logits.is_cpu or not size:
        raise ValueError(f"cannot choose from {list(logits.shape)} of {logits.dtype}")
    tokens, finite = np.empty(rows, np.int64), np.empty(rows, np.bool_)
    _native.choose(logits.data_ptr(), size, settings, draws, tokens, finite)
    return tokens, finite


def uniform(seeds: NDArray[np.int64], counters: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return one number in [0, 1) for each (seed, counter): those of ``philox.uniform``."""
    numbers = np.empty(len(seeds), np.float64)
    _native.uniform(seeds, counters, numbers)
    return numbers
