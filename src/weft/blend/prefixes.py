"""Hashes of the beginnings of prompts: what begins alike, without a tree and in any batch."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.blend.density import Ints

LEVELS = tuple(16 * 2**k for k in range(10))  # tokens of the beginnings that are hashed
RUN = 64  # neighbours that stay together when runs are shuffled

Hashes = NDArray[np.uint64]


def prefix_hashes(tokens: Any, scope: bytes = b"") -> list[int]:
    """The hash of each beginning of ``LEVELS`` that is shorter than the prompt.

    Args:
        tokens: ids, or any numbers below 2**32 that are equal where prompts are.
        scope: prompts of different scopes have nothing in common.
    """
    data = np.asarray(tokens[: LEVELS[-1]], np.uint32).tobytes()
    digest, found, start = blake2b(scope, digest_size=8), [], 0
    for level in LEVELS:
        if level >= len(tokens):
            break
        digest.update(data[start : 4 * level])
        start = 4 * level
        found.append(int.from_bytes(digest.digest(), "little") or 1)
    return found


def by_prefix(rows: Hashes) -> Ints:
    """(n,) numbers of prompts, those that begin alike one after the other.

    Args:
        rows: (n, levels) their hashes; 0 where one is too short.
    """
    return np.lexsort((np.arange(len(rows)), *rows.T[::-1])).astype(np.int64)


def in_shuffled_runs(numbers: Ints, seed: int = 0) -> Ints:
    """The same numbers, so that any part of them is a mix of all; neighbours mostly stay so."""
    starts = np.random.default_rng(seed).permutation(np.arange(0, len(numbers), RUN))
    runs = [numbers[start : start + RUN] for start in starts.tolist()]
    return np.concatenate(runs) if runs else numbers
