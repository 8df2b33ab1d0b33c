"""Facts of the machine that the engine runs on."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

BF16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")  # the last one is Arm's


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def available_memory() -> int:
    """Bytes that can be allocated without swapping, within the limits of the control group."""
    available = int(psutil.virtual_memory().available)
    for limit_file, used_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        limit, used = _read_number(limit_file), _read_number(used_file)
        if limit is not None and used is not None:
            available = min(available, max(0, limit - used))
    return available


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


def _read_number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None
