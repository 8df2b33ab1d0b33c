"""Selects the executor of a device, and the memory of its KV."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from weft.core.config import EngineConfig
from weft.core.errors import ConfigError
from weft.core.ports import Executor
from weft.core.resolved import ResolvedConfig
from weft.core.settings import format_bytes
from weft.engine.devices import allocating, is_cpu, is_resident, steps_in_flight
from weft.engine.host_tier import cpu_tier, device_attention
from weft.exec.disk_blocks import DiskBlocks
from weft.exec.eager import EagerExecutor
from weft.exec.input_batch import InputBatch
from weft.exec.step_layout import sizes_for
from weft.exec.store import KVStore, Memory, host_memory
from weft.kernels.lanes import lanes_for
from weft.kv.disk_cache import DiskCache
from weft.models.decoder import Decoder


def kv_memory(decoder: Decoder, nodes: Sequence[int] = ()) -> Memory:
    """Return what makes the memory of KV for a decoder.

    Any thread reads any block, and a block is written by whoever is first, so that on a CPU the
    pages lie on all nodes in turns.

    Args:
        nodes: NUMA nodes of the threads.
    """
    if decoder.on_numpy:
        return partial(host_memory, nodes=nodes)
    from weft.exec.device import tensor_memory

    return tensor_memory(decoder.device)


def describe_executor(executor: Executor) -> str:
    """A readable description of how steps run."""
    captured = getattr(executor, "captured", None)  # of a graph executor
    if captured is None:
        words = "eager" if executor.depth else "eager, on the thread that plans"
        return f"{words}, decoding by the resident loop" if may_lease(executor) else words
    described = f"{captured} captured graphs" if captured else "uncaptured"
    return described + ", replayed under leases" * may_lease(executor)


def may_lease(executor: Executor) -> bool:
    """Whether plans for this executor may lease their rows."""
    return bool(getattr(executor, "resident", False))


def make_executor(
    config: EngineConfig,
    resolved: ResolvedConfig,
    decoder: Decoder,
    store: KVStore,
    table: InputBatch,
    disk: DiskCache | None = None,
) -> Executor:
    """Return the executor for the device where the model lies.

    Raises:
        OutOfMemoryError: the host has no memory for its KV.
        HostWorkerError: nobody can attend there, as is asked for.
        ConfigError: a resident loop is asked for, which the kernels do not have.
    """
    host_tier = allocating(
        f"the KV of the host ({format_bytes(config.host_kv_memory or 0)})",
        "set host_kv_memory to less",
        decoder.ops,
    )
    if is_cpu(decoder.device):
        with host_tier:
            tier = cpu_tier(config, resolved, decoder, store, table)
        blocks = None if disk is None else DiskBlocks(store, disk)
        depth = steps_in_flight(config, decoder.device)
        resident = is_resident(config, decoder.device)
        executor = EagerExecutor(decoder, store, table, depth, tier, blocks, resident=resident)
        if config.resident == "on" and not executor.resident:
            executor.close()
            raise ConfigError(
                "resident 'on' needs the native kernels for all layers and the output head, and "
                f"this model runs with {decoder.ops.describe()['linear']}; leave it at 'auto'.",
                param="resident",
            )
        return executor
    from weft.exec.absent import AbsentDevice
    from weft.exec.device import CudaDevice, Device
    from weft.exec.device_tier import device_tier
    from weft.exec.graphs import GraphExecutor
    from weft.exec.halves_pass import HalvesSetup
    from weft.exec.setup import Steps

    halves = None
    if resolved.half_sizes is not None:
        halves = HalvesSetup(resolved.half_sizes, resolved.attention_programs)
    pairs = halves is not None or config.overlaps  # each of which is captured with each
    steps = Steps(
        max_tokens=resolved.max_num_batched_tokens,
        max_samples=resolved.max_num_seqs * (1 + config.speculation),
        depth=steps_in_flight(config, decoder.device),
        capture=config.graphs,
        sizes=sizes_for(resolved.max_num_seqs, 0 if pairs else resolved.max_num_batched_tokens),
        lanes=lanes_for(resolved.max_num_seqs),
        leases=is_resident(config, decoder.device),
        halves=halves,
    )
    device: Device = AbsentDevice()
    if decoder.device != AbsentDevice.where.type:
        device = CudaDevice(decoder.device)
    with host_tier:
        attend = device_attention(config, decoder, table)
        tier = device_tier(store, resolved.host_blocks, device, attend, overlaps=config.overlaps)
    return GraphExecutor(decoder, store, table, device, steps, tier)
