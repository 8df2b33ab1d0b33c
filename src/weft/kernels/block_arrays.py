"""Arrays of blocks that are copied together, and which of them a copy takes where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from weft.kernels.arrays import Array, address, strides

BlockPairs: TypeAlias = NDArray[np.int64]  # [2, n]: blocks of the sources, and of the targets


class BlockArrays:
    """Contiguous arrays [num_blocks, ...] of one shape and type, whose blocks are copied together.

    Attributes:
        addresses: [A] int64, where each array begins.

    Raises:
        ValueError: there is none, or they differ, or their blocks do not lie one behind the other.
    """

    def __init__(self, arrays: Sequence[Array]) -> None:
        kinds = {(tuple(array.shape), array.dtype, strides(array)) for array in arrays}
        if len(kinds) != 1:
            raise ValueError(f"{len(arrays)} arrays of {len(kinds)} kinds have no common blocks")
        shape, _, steps = next(iter(kinds))
        dense = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
        if steps != dense:
            raise ValueError(f"blocks of {list(shape)} with strides {list(steps)} have gaps")
        self.arrays = tuple(arrays)
        self.num_blocks = shape[0]
        self.block_bytes = arrays[0].nbytes // max(1, shape[0])
        self.addresses = np.array([address(array) for array in arrays], np.int64)


def block_pairs(
    sources: BlockArrays,
    targets: BlockArrays,
    source_blocks: Sequence[int],
    target_blocks: Sequence[int],
) -> BlockPairs:
    """Return the blocks of a copy from each source to the target in the same place.

    Raises:
        ValueError: blocks or arrays differ in size or number, a block lies outside, or one would be
            written twice.
    """
    if sources.block_bytes != targets.block_bytes:
        raise ValueError(
            f"blocks of {sources.block_bytes} bytes do not fit those of {targets.block_bytes}"
        )
    if len(sources.arrays) != len(targets.arrays) or len(source_blocks) != len(target_blocks):
        raise ValueError("sources and targets differ in number")
    pairs = np.array((source_blocks, target_blocks), np.int64)
    for name, of, blocks in zip(("sources", "targets"), (sources, targets), pairs, strict=True):
        outside = blocks[(blocks < 0) | (blocks >= of.num_blocks)]
        if len(outside):
            raise ValueError(f"block {outside[0]} of the {name} is outside its {of.num_blocks}")
    if len(np.unique(pairs[1])) < len(pairs[1]):
        raise ValueError("a block of the targets is written twice")
    return pairs
