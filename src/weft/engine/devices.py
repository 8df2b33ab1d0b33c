"""Selects the device, and says what is settled by it; loads nothing that runs steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from weft.core.config import EngineConfig
from weft.core.errors import ConfigError, OutOfMemoryError
from weft.core.memory import available_memory, is_out_of_memory
from weft.engine.driver import has_driver
from weft.kernels.interface import OpTable

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
