"""Philox4x32-10 in plain numpy: the reference for the random numbers of sampling.

Salmon et al. 2011, "Parallel random numbers". A random number is a pure function of
(seed, counter), so a sequence draws the same numbers whatever else is in the batch, after a
preemption, and on any device.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)

Words = NDArray[np.uint64]


def philox(counter: tuple[Words, ...], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Return four arrays of 32-bit words, kept in uint64, for arrays of counters and keys."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        low = c0 * _MULTIPLIERS[0]
        high = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (high >> _SHIFT) ^ c1 ^ k0,
            high & _LOW,
            (low >> _SHIFT) ^ c3 ^ k1,
            low & _LOW,
        )
        k0 = (k0 + _WEYL[0]) & _LOW
        k1 = (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def uniform(seeds: NDArray[np.int64], counters: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return one number in [0, 1) with 53 random bits for each (seed, counter)."""
    seed, count = seeds.astype(np.uint64), counters.astype(np.uint64)
    zero = np.zeros_like(seed)
    words = philox((count & _LOW, count >> _SHIFT, zero, zero), (seed & _LOW, seed >> _SHIFT))
    mantissa = ((words[0] << np.uint64(21)) ^ (words[1] >> np.uint64(11))).astype(np.float64)
    return mantissa / float(2**53)
