"""KV arrays of one tier: for each group and layer, keys and values by block."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, TypeAlias

from weft.core.kv_types import row_size
from weft.core.placement import interleave
from weft.exec.memory import give_back, host_zeros
from weft.kernels.arrays import Array, address, dtype_name, numpy_dtype
from weft.models.spec import KVGroup

if TYPE_CHECKING:
    from weft.exec.states import StateStore

# Makes zeros of a shape and a dtype, by its name, where KV is kept.
Memory: TypeAlias = Callable[[Seq[int], str], Array]


def host_memory(shape: Seq[int], dtype: str, nodes: Seq[int] = ()) -> Array:
    """Return zeros on the host as numpy's, whose pages are taken when they are first written.

    Args:
        nodes: NUMA nodes on which the pages then lie in turns; see ``interleave``.
    """
    kind = numpy_dtype(dtype)
    zeros = host_zeros(math.prod(shape) * kind.itemsize)
    interleave(address(zeros), zeros.nbytes, nodes)
    return zeros.view(kind).reshape(tuple(shape))


def tensor_shapes(
    groups: Seq[KVGroup], num_blocks: Seq[int], block_size: int, dtype: str
) -> list[tuple[int, ...]]:
    """Return the shapes of all arrays of a store, in the order in which it makes them."""
    return [
        (blocks, group.num_kv_heads, block_size, row_size(dtype, group.head_dim))
        for group, blocks in zip(groups, num_blocks, strict=True)
        for _ in range(group.arrays * len(group.layers))
    ]


class KVStore:
    """Memory for the KV blocks of every group.

    ``keys[group][i]`` and ``values[group][i]`` are [num_blocks, Hkv, block_size, D] arrays of the
    group's i-th layer, one array where ``KVGroup.value_in_key``; of 8-bit types [num_blocks, Hkv,
    block_size, D + 4], a block's scales included (``kernels.kv_storage``).

    Args:
        memory: for this store, and for those like it.
        file: for this store alone: memory of a file, which other processes may map.

    Attributes:
        states: the slots of recurrent layers; None for a model without.
    """

    states: StateStore | None = None

    def __init__(
        self,
        groups: Seq[KVGroup],
        num_blocks: Seq[int],
        block_size: int,
        dtype: str,
        memory: Memory = host_memory,
        file: Memory | None = None,
    ) -> None:
        self.block_size = block_size
        self._memory, self._shared = memory, file is not None
        self.keys: list[list[Array]] = []
        self.values: list[list[Array]] = []
        shapes = iter(tensor_shapes(groups, num_blocks, block_size, dtype))
        for group in groups:
            kinds = [
                [(file or memory)(next(shapes), dtype) for _ in group.layers]
                for _ in range(group.arrays)
            ]
            self.keys.append(kinds[0])
            self.values.append(kinds[-1])

    def tensors(self, group: int) -> tuple[Array, ...]:
        """Keys and values of every layer of the group, or what is both once."""
        if self.values[group] is self.keys[group]:
            return tuple(self.keys[group])
        return (*self.keys[group], *self.values[group])

    def zero(self, group: int, block: int) -> None:
        """Overwrite one block in every layer of the group."""
        for tensor in self.tensors(group):
            tensor[block] = 0

    def give_back(self, group: int, blocks: Seq[int]) -> Iterator[int]:
        """Give the pages of blocks that hold nothing back, a layer's keys or values at a time.

        They are zeros until they are written again. Pages that other blocks share stay.

        Args:
            blocks: in ascending order.

        Yields:
            Bytes of whole pages that hold nothing now.
        """
        runs = list(_runs(blocks))
        for tensor in self.tensors(group):
            size, start = tensor.nbytes // len(tensor), address(tensor)
            yield sum(
                give_back(start + first * size, count * size, shared=self._shared)
                for first, count in runs
            )

    def like(self, num_blocks: Seq[int], memory: Memory | None = None) -> KVStore:
        """Return a store of the same groups and layers, which starts as zeros.

        Args:
            memory: of another kind than that of this one.
        """
        memory = memory or self._memory
        other = KVStore((), (), self.block_size, "float32", memory)
        for keys, values, count in zip(self.keys, self.values, num_blocks, strict=True):
            kinds = [
                [memory((count, *t.shape[1:]), dtype_name(t.dtype)) for t in tensors]
                for tensors in ([keys] if values is keys else [keys, values])
            ]
            other.keys.append(kinds[0])
            other.values.append(kinds[-1])
        return other


def _runs(blocks: Seq[int]) -> Iterator[tuple[int, int]]:
    """Yield runs of neighbouring blocks as their first one and their number."""
    first = count = 0
    for block in blocks:
        if count and block == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = block, 1
    if count:
        yield first, count
