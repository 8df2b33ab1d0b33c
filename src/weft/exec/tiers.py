"""Copies KV between device and host memory, in the order of the device's work."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from weft.core.errors import InvariantError
from weft.core.plan import KVMove, StepPlan, Tier
from weft.exec.device import Device
from weft.exec.store import KVStore


class HostTier:
    """Blocks on the host beside those of a device; both have the same groups and layers.

    A copy is ordered between the steps before and after it, so a block that is given up and taken
    again is never read too late or written too early.
    """

    def __init__(self, store: KVStore, host: KVStore, device: Device) -> None:
        self._store = store
        self._host = host
        self._device = device
        self._nothing = [torch.zeros_like(keys[0][:1]) for keys in store.keys]  # by group

    def zero(self, plan: StepPlan) -> None:
        """Overwrite the blocks of the host that the plan names."""
        for group, block in plan.zero_host:
            nothing = self._nothing[group]
            for tensor in self._host.tensors(group):
                self._device.download(nothing, tensor[block : block + 1])

    def move(self, move: KVMove) -> None:
        """Copy what lies in the blocks of ``source`` to those of ``target``, in all layers."""
        out = move.to is Tier.HOST
        old, new = (self._store, self._host) if out else (self._host, self._store)
        copy = self._device.download if out else self._device.upload
        for group, (source, target) in enumerate(zip(move.source, move.target, strict=True)):
            for first, to, count in runs(source, target):
                for a, b in zip(old.tensors(group), new.tensors(group), strict=True):
                    copy(a[first : first + count], b[to : to + count])


def runs(source: Seq[int], target: Seq[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (first block, first block, count) of neighbours that stay neighbours.

    Blocks are -1 where a sliding group holds none, in both tables alike.
    """
    start = 0
    for i in range(1, len(source) + 1):
        goes_on = i < len(source) and source[i - 1] >= 0
        if goes_on and source[i] == source[i - 1] + 1 and target[i] == target[i - 1] + 1:
            continue
        if source[start] >= 0:
            yield source[start], target[start], i - start
        start = i


def host_store(store: KVStore, num_blocks: Seq[int], device: Device) -> KVStore:
    """Return a store like ``store`` in memory of the host from and to which copies run."""

    def memory(shape: Seq[int], dtype: str) -> Tensor:
        kind: torch.dtype = getattr(torch, dtype)
        size = torch.Size(shape).numel() * kind.itemsize
        return device.host_memory(size, torch.uint8).view(kind).view(tuple(shape))

    return store.like(num_blocks, memory)


def check_computes(plan: StepPlan, tier: HostTier | None) -> None:
    """Raise InvariantError for a plan that needs more of the host than its memory."""
    if plan.computes_on_host or (plan.needs_host and tier is None):
        raise InvariantError(f"step {plan.step_id} needs a host tier, which is not here")
