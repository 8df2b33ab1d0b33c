"""Selects the device, its memory and its executor."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from weft.core.config import EngineConfig
from weft.core.errors import ConfigError, OutOfMemoryError
from weft.core.memory import available_memory
from weft.core.ports import Executor
from weft.core.resolved import ResolvedConfig
from weft.core.settings import format_bytes
from weft.engine.driver import has_driver
from weft.engine.host_tier import cpu_tier, device_attention
from weft.exec.collect import is_out_of_memory
from weft.exec.disk_blocks import DiskBlocks
from weft.exec.eager import EagerExecutor
from weft.exec.input_batch import InputBatch
from weft.exec.step_layout import sizes_for
from weft.exec.store import KVStore, Memory, host_memory
from weft.kernels.interface import OpTable
from weft.kernels.lanes import lanes_for
from weft.kv.disk_cache import DiskCache
from weft.models.decoder import Decoder

logger = logging.getLogger("weft")


class Stopwatch:
    """The time that each part of a start takes.

    Attributes:
        seconds: of each part by its name, and of all under ``ready``.
        notes: of parts, in words.
    """

    def __init__(self) -> None:
        self._began = self._since = time.monotonic()
        self.seconds: dict[str, float] = {}
        self.notes: dict[str, str] = {}

    def mark(self, name: str, note: str = "") -> None:
        """This part ends now, and the next one begins."""
        now = time.monotonic()
        self.seconds[name], self._since = round(now - self._since, 3), now
        if note:
            self.notes[name] = note

    def ready(self) -> None:
        """The last part has ended."""
        self.seconds["ready"] = round(time.monotonic() - self._began, 3)

    def describe(self) -> str:
        """Return a sentence such as "ready after 3.1 s: weights 2.0 s, capture 1.1 s"."""
        parts = [
            f"{name} {seconds:.2f} s{f' ({self.notes[name]})' if name in self.notes else ''}"
            for name, seconds in self.seconds.items()
            if name != "ready"
        ]
        return f"ready after {self.seconds['ready']:.2f} s: {', '.join(parts)}"


@contextmanager
def allocating(what: str, advice: str, ops: OpTable | None = None) -> Iterator[None]:
    """Name the purpose of the memory if it runs out within.

    Args:
        what: is allocated.
        advice: which settings help.
        ops: of the model that it is for.

    Raises:
        OutOfMemoryError: instead of what torch, the driver or Python raise.
    """
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        of = f" of rank {ops.process}" if ops is not None and ops.processes > 1 else ""
        raise OutOfMemoryError(f"There is not enough memory for {what}{of}; {advice}.") from error


def pick_device(wish: str, rank: int = 0, ranks: int = 1) -> str:
    """Return the device of the setting ``device`` for one of several ranks, such as ``cuda:0``.

    torch is imported only where there is a driver for it.

    Raises:
        ConfigError: there are fewer NVIDIA GPUs that torch can use than ranks.
        OutOfMemoryError: the GPU is full.
    """
    if wish == "cpu" or (wish == "auto" and not has_driver()):
        return "cpu"
    try:
        import torch
    except ImportError:
        needs = "needs torch, which is not installed: pip install 'weft[cuda]'"
        if wish == "cuda":
            raise ConfigError(
                f"device cuda {needs}. Or set device to cpu.", param="device"
            ) from None
        logger.warning("There is an NVIDIA driver, but the CPU computes: a GPU %s.", needs)
        return "cpu"
    found = torch.cuda.device_count()
    if found == 0 and wish != "cuda":
        return "cpu"
    if found >= ranks:
        device = f"cuda:{rank}"
        with allocating(f"a CUDA context on {device}", "other processes hold the GPU's"):
            torch.cuda.set_device(device)
        return device
    built = "" if torch.version.cuda else f"; torch {torch.__version__} is built without CUDA"
    wanted = f"an NVIDIA GPU for each of {ranks} ranks" if ranks > 1 else "an NVIDIA GPU"
    raise ConfigError(
        f"device cuda needs {wanted}, but torch finds {found or 'none'}{built}. Set device to cpu.",
        param="device",
    )


def is_cpu(device: str) -> bool:
    """Whether a device is the CPU."""
    return device == "cpu"


def free_memory(device: str) -> int:
    """Bytes that can be allocated on a device."""
    if is_cpu(device):
        return available_memory()
    import torch

    return torch.cuda.mem_get_info(device)[0]


def device_name(device: str) -> str:
    """The common name of the device."""
    if is_cpu(device):
        return "cpu"
    import torch

    return torch.cuda.get_device_name(device)


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


def is_resident(config: EngineConfig, device: str) -> bool:
    """Whether steps are leased to the resident loop; see ``resident`` in the settings."""
    wanted = config.resident == "on" or (config.resident == "auto" and is_cpu(device))
    return wanted and config.processes == 1


def steps_in_flight(config: EngineConfig, device: str) -> int:
    """Steps that wait while the next is planned; see ``steps_in_flight`` in the settings.

    By default one, but none where the thread that plans computes, too: on a CPU alone. With the
    stages of a pipeline one for each.
    """
    if config.steps_in_flight is not None:
        return config.steps_in_flight
    if config.pipeline_parallel > 1:
        return config.pipeline_parallel
    beside = bool(config.host_kv_memory or config.attend) or config.tensor_parallel > 1
    return int(beside or not is_cpu(device))


def pipelined_steps(config: EngineConfig) -> int:
    """How many steps the sequences are shared out over that decode; 0 without a pipeline."""
    if config.pipeline_parallel == 1:
        return 0
    return max(1, steps_in_flight(config, config.device))


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
