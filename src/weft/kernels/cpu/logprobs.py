"""Log probabilities on the CPU, in numpy: few requests want them."""

from __future__ import annotations

import numpy as np

from weft.kernels.arrays import Array, from_numpy, to_numpy


def log_softmax(logits: Array) -> Array:
    """Return log probabilities [S, V]; see ``interface.LogSoftmax``."""
    numbers = to_numpy(logits)
    shifted = numbers - numbers.max(axis=-1, keepdims=True)
    total = np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float64)
    return from_numpy(logits, shifted - np.log(total).astype(np.float32))


def top_k(numbers: Array, k: int) -> tuple[Array, Array]:
    """Return the k largest numbers of each row and their places; see ``interface.TopK``.

    Of equal numbers those at lower places come first.
    """
    rows = to_numpy(numbers)
    places = np.empty((len(rows), k), np.int64)
    for row, found in zip(rows, places, strict=True):
        if k:
            least = np.partition(row, len(row) - k)[len(row) - k]
            near = np.flatnonzero(row >= least)
            found[:] = near[np.argsort(-row[near], kind="stable")[:k]]
    values = np.take_along_axis(rows, places, axis=-1)
    return from_numpy(numbers, values), from_numpy(numbers, places)
