"""Copies blocks between arrays of the host, all arrays in one native call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft.kernels.arrays import Array, address, strides
from weft.kernels.cpu import _native


class BlockArrays:
    """Contiguous arrays [num_blocks, ...] of one shape and type, whose blocks are copied together.

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
        self.num_blocks = shape[0]
        self.block_bytes = arrays[0].nbytes // max(1, shape[0])
        self.addresses = np.array([address(array) for array in arrays], np.int64)
        self._kept = tuple(arrays)


def copy_blocks(
    sources: BlockArrays,
    targets: BlockArrays,
    source_blocks: Sequence[int],
    target_blocks: Sequence[int],
) -> None:
    """Copy block ``source_blocks[i]`` of each source to ``target_blocks[i]`` of its target.

    The two must not share memory. Runs on the threads of the native kernels, without the
    interpreter lock.

    Raises:
        ValueError: blocks or arrays differ in size or number, a block lies outside, or one is
            written twice; nothing has been copied then.
    """
    if sources.block_bytes != targets.block_bytes:
        raise ValueError(
            f"blocks of {sources.block_bytes} bytes do not fit those of {targets.block_bytes}"
        )
    _native.copy_blocks(
        sources.addresses,
        sources.num_blocks,
        targets.addresses,
        targets.num_blocks,
        sources.block_bytes,
        np.array(source_blocks, np.int64),
        np.array(target_blocks, np.int64),
    )
