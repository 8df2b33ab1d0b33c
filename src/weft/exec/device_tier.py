"""The host tier of a device: pinned memory, and copies beside the device's steps."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from weft.core.plan import StepPlan
from weft.exec.device import Device
from weft.exec.host_attention import HostAttention
from weft.exec.store import KVStore
from weft.exec.tiers import HostTier


def device_tier(
    store: KVStore,
    num_blocks: Seq[int],
    device: Device,
    attend: Callable[[KVStore], HostAttention] | None = None,
    *,
    overlaps: bool = False,
) -> HostTier | None:
    """Return the host tier of a store, with so many blocks of each group; None if these are none.

    Args:
        attend: makes what attends over the KV of the host; None where nobody does.
        overlaps: whether sub-batches wait for it in each layer.

    Raises:
        OutOfMemoryError: the driver does not pin the memory.
        HostWorkerError: the worker cannot be started.
    """
    if not num_blocks:
        return None

    def memory(shape: Seq[int], dtype: str) -> Tensor:
        kind: torch.dtype = getattr(torch, dtype)
        size = torch.Size(shape).numel() * kind.itemsize
        return device.exchange_memory(size, torch.uint8).view(kind).view(tuple(shape))

    host = store.like(num_blocks, memory)
    attention = None if attend is None else attend(host)
    tier = HostTier(store, host, device.copy_blocks, attention, overlaps=overlaps)
    device.synchronize()  # zeros were not ordered as its work
    warm_up = tuple((group, 0) for group in range(len(num_blocks)))
    with device.work():
        tier.before(StepPlan(0, (), zero_host=warm_up))  # compiles the kernel
    return tier
