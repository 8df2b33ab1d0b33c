"""Facts of the machine that the engine runs on."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

from weft.core.config import EngineConfig
from weft.core.memory import memory_groups

BF16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")  # the last one is Arm's


class WallClock:
    """Monotonic seconds of the machine."""

    def now(self) -> float:
        return time.monotonic()


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def compute_threads(config: EngineConfig) -> int:
    """Threads of each rank."""
    return config.threads or max(1, usable_cores() // config.tensor_parallel)


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that can be allocated without swapping, within the limits of all control groups.

    Args:
        root: where ``proc`` and the control groups are, for tests.
    """
    found = [int(psutil.virtual_memory().available)]
    found += [left for group in memory_groups(root) if (left := group.available()) is not None]
    return min(found)


def resident_bytes(pid: int) -> int:
    """Memory that a process occupies; 0 if there is none."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def has_fast_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 numbers in hardware."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    for line in text.splitlines():
        if line.startswith(("flags", "Features")):
            return any(flag in line.split() for flag in BF16_FLAGS)
    return False


def cpu_name() -> str:
    """The CPU's name as the kernel tells it, or ``unknown CPU``."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "unknown CPU"
    for line in text.splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown CPU"
