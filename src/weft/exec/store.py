"""KV tensors of one tier: for each group and layer, keys and values by block."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from weft.exec.memory import host_zeros
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

    def tensors(self, group: int) -> tuple[Tensor, ...]:
        """Keys and values of every layer of the group."""
        return (*self.keys[group], *self.values[group])

    def zero(self, group: int, block: int) -> None:
        """Overwrite one block in every layer of the group."""
        for tensor in self.tensors(group):
            tensor[block].zero_()

    def like(
        self, num_blocks: Seq[int], memory: Callable[[Seq[int], torch.dtype], Tensor]
    ) -> KVStore:
        """Return a store of the same groups and layers with other memory, which starts as zeros."""
        other = KVStore((), (), self.block_size, torch.float32, torch.device("cpu"))
        for mine, theirs in ((self.keys, other.keys), (self.values, other.values)):
            for tensors, count in zip(mine, num_blocks, strict=True):
                theirs.append([memory((count, *t.shape[1:]), t.dtype) for t in tensors])
        return other


def _zeros(shape: Seq[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return host_zeros(math.prod(shape) * dtype.itemsize).view(dtype).view(tuple(shape))
