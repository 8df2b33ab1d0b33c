"""Copies blocks between arrays of the host, all arrays in one native call."""

from __future__ import annotations

from collections.abc import Sequence

from weft.kernels.block_arrays import BlockArrays, block_pairs
from weft.kernels.cpu import _native


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
        ValueError: see ``block_pairs``; nothing has been copied then.
    """
    pairs = block_pairs(sources, targets, source_blocks, target_blocks)
    _native.copy_blocks(sources.addresses, targets.addresses, sources.block_bytes, *pairs)
