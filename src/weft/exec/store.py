"""KV tensors of one tier: for each group and layer, keys and values by block."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from weft.kernels.kv_storage import row_size
from weft.models.spec import KVGroup


class KVStore:
    """Memory for the KV blocks of every group.

    ``keys[group][i]`` and ``values[group][i]`` are [num_blocks, Hkv, block_size, D] tensors of the
    group's i-th layer; of 8-bit types [num_blocks, Hkv, block_size, D + 4], a block's scales
    included (``kernels.kv_storage``).
    """

    def __init__(
        self,
        groups: Seq[KVGroup],
        num_blocks: Seq[int],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.keys: list[list[Tensor]] = []
        self.values: list[list[Tensor]] = []
        for group, blocks in zip(groups, num_blocks, strict=True):
            row = row_size(dtype, group.head_dim)
            shape = (blocks, group.num_kv_heads, block_size, row)
            for tensors in (self.keys, self.values):
                tensors.append([_zeros(shape, dtype, device) for _ in group.layers])

    def zero(self, group: int, block: int) -> None:
        """Overwrite one block in every layer of the group."""
        for tensor in (*self.keys[group], *self.values[group]):
            tensor[block].zero_()


def _zeros(shape: Seq[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the host their pages are taken when they are first written, large ones if possible.

    Writing zeros to all of the memory took most of the start.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(
        -1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    with contextlib.suppress(OSError):  # a kernel without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
