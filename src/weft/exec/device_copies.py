"""Copies KV between device and host memory, in the order of the device's work."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from weft.core.plan import Tier
from weft.exec.device import Device
from weft.exec.store import KVStore
from weft.exec.tiers import HostTier


class DeviceCopies:
    """See ``weft.exec.tiers.Copies``."""

    def __init__(self, store: KVStore, host: KVStore, device: Device) -> None:
        self._store = store
        self._host = host
        self._device = device
        self._nothing = [torch.zeros_like(keys[0][:1]) for keys in store.keys]  # by group

    def zero(self, group: int, block: int) -> None:
        for tensor in self._host.tensors(group):
            self._device.download(self._nothing[group], tensor[block : block + 1])

    def copy(self, to: Tier, group: int, source: Seq[int], target: Seq[int]) -> None:
        out = to is Tier.HOST
        old, new = (self._store, self._host) if out else (self._host, self._store)
        copy = self._device.download if out else self._device.upload
        for first, there, count in runs(source, target):
            for a, b in zip(old.tensors(group), new.tensors(group), strict=True):
                copy(a[first : first + count], b[there : there + count])


def runs(source: Seq[int], target: Seq[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (first block, first block, count) of neighbours that stay neighbours."""
    start = 0
    for i in range(1, len(source) + 1):
        goes_on = i < len(source)
        if goes_on and source[i] == source[i - 1] + 1 and target[i] == target[i - 1] + 1:
            continue
        yield source[start], target[start], i - start
        start = i


def device_tier(store: KVStore, num_blocks: Seq[int], device: Device) -> HostTier | None:
    """Return the host tier of a store, with so many blocks of each group; None if these are none.

    Raises:
        OutOfMemoryError: the driver does not pin the memory.
    """
    if not num_blocks:
        return None
    return HostTier(DeviceCopies(store, host_store(store, num_blocks, device), device))


def host_store(store: KVStore, num_blocks: Seq[int], device: Device) -> KVStore:
    """Return a store like ``store`` in memory of the host from and to which copies run."""

    def memory(shape: Seq[int], dtype: str) -> Tensor:
        kind: torch.dtype = getattr(torch, dtype)
        size = torch.Size(shape).numel() * kind.itemsize
        return device.host_memory(size, torch.uint8).view(kind).view(tuple(shape))

    return store.like(num_blocks, memory)
