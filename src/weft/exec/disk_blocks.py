"""Copies KV blocks between a store on the host and the prefix cache on disk."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from weft.core.plan import BlockCopy
from weft.core.ports import BlockDisk
from weft.exec.store import KVStore
from weft.kernels.arrays import Array, to_numpy


def block_sizes(store: KVStore) -> list[int]:
    """Bytes of a block of each group: keys and values of all its layers; then those of a slot."""
    return [sum(t.nbytes // len(t) for t in tensors) for tensors in _by_group(store)]


def _by_group(store: KVStore) -> list[list[Array]]:
    groups = [list(store.tensors(group)) for group in range(len(store.keys))]
    if store.states is not None:
        groups.append([array for arrays in store.states.arrays() for array in arrays])
    return groups


class DiskBlocks:
    """The blocks of a store as bytes: the keys of each layer of a group, then the values.

    Slots of recurrent state are the blocks of one more group: matrices of each layer, then inputs.
    """

    def __init__(self, store: KVStore, disk: BlockDisk) -> None:
        self._disk = disk
        self._sizes = block_sizes(store)
        self._bytes = [  # by group and tensor: [num_blocks, bytes of a block]
            [to_numpy(t).view(np.uint8).reshape(len(t), -1) for t in tensors]
            for tensors in _by_group(store)
        ]

    def save(self, copies: Iterable[BlockCopy]) -> None:
        """Hand over the content of blocks, which may be written afterwards."""
        for group, block, block_hash in copies:
            content = np.empty(self._sizes[group], np.uint8)
            parts = [tensor[block] for tensor in self._bytes[group]]
            np.concatenate(parts, out=content)
            self._disk.save((group, block_hash), content.data)

    def load(self, copies: Iterable[BlockCopy]) -> None:
        """Write what was read from disk to blocks. Raises InvariantError if it is not there."""
        for group, block, block_hash in copies:
            content = np.frombuffer(self._disk.take((group, block_hash)), np.uint8)
            start = 0
            for tensor in self._bytes[group]:
                end = start + tensor.shape[1]
                tensor[block] = content[start:end]
                start = end
