"""Copies blocks between arrays of a GPU and pinned ones of the host, all in one launch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.block_arrays import BlockArrays, BlockPairs

_BLOCK = 1024
_WORD_BYTES = 8


@triton.jit(do_not_specialize=["arrays", "blocks"])
def _copy_blocks(
    table, arrays, blocks, SIZE: tl.constexpr, WORD: tl.constexpr, BLOCK: tl.constexpr
):
    block, array = tl.program_id(0), tl.program_id(1)
    source = tl.load(table + array).to(tl.pointer_type(WORD))
    target = tl.load(table + arrays + array).to(tl.pointer_type(WORD))
    first = tl.load(table + 2 * arrays + block) * SIZE
    to = tl.load(table + 2 * arrays + blocks + block) * SIZE
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(source + first + at, mask=at < SIZE)
    tl.store(target + to + at, words, mask=at < SIZE)


def copy_blocks(
    sources: BlockArrays,
    targets: BlockArrays,
    pairs: BlockPairs,
    send: Callable[[Tensor], Tensor],
) -> None:
    """Order a copy of blocks [2, n] from each source to its target on the current stream.

    The GPU reads and writes pinned memory itself, so one launch takes all arrays and blocks
    wherever they lie.

    Args:
        send: copies a tensor of the host to the GPU, in the order of the stream.
    """
    arrays, blocks = len(sources.arrays), pairs.shape[1]
    if blocks == 0:
        return
    numbers = np.concatenate((sources.addresses, targets.addresses, pairs.reshape(-1)))
    whole = sources.block_bytes % _WORD_BYTES == 0
    word, size = (
        (tl.int64, sources.block_bytes // _WORD_BYTES) if whole else (tl.int8, sources.block_bytes)
    )
    _copy_blocks[(blocks, arrays, triton.cdiv(size, _BLOCK))](
        send(torch.from_numpy(numbers)), arrays, blocks, SIZE=size, WORD=word, BLOCK=_BLOCK,
        num_warps=4, num_stages=1,
    )  # fmt: skip
