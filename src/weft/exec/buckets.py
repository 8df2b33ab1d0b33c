"""Sizes of steps that are captured: a step is padded to the next one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Seq

# As many as rvLLM captures (section 3), spread over four times as many tokens: decode steps lose
# little to padding, and chunks of prompts beside them replay a graph too.
SIZES = (1, 2, 4, *range(8, 129, 8), *range(144, 257, 16), *range(288, 513, 32))
STRIDE = 64  # beyond the largest size, so that few shapes meet the kernels


def padded_size(count: int, sizes: Seq[int] = SIZES) -> int:
    """Return the size that ``count`` tokens or samples are padded to.

    Args:
        sizes: ascending; larger counts are padded to a multiple of ``STRIDE``.
    """
    index = bisect_left(sizes, count)
    return sizes[index] if index < len(sizes) else -(-count // STRIDE) * STRIDE


def captured_sizes(most: int, sizes: Seq[int] = SIZES) -> tuple[int, ...]:
    """Return the sizes that steps of up to ``most`` tokens need, ascending."""
    return tuple(size for size in sizes if size <= padded_size(most, sizes))


def larger_sizes(most: int, captured: int) -> tuple[int, ...]:
    """Return ``most`` and its halves that are larger than the largest captured size, descending."""
    sizes = []
    while most > captured:
        sizes.append(most)
        most = most // 2 // STRIDE * STRIDE
    return tuple(sizes)
