"""Facts of the machine that the engine runs on."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

BF16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")  # the last one is Arm's


class WallClock:
    """Monotonic seconds of the machine."""

    def now(self) -> float:
        return time.monotonic()


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def available_memory(cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can be allocated without swapping, within the limits of the control group.

    A group's usage counts file pages that the kernel drops when memory is needed; the inactive
    ones are free for us. Both versions of control groups are read.
    """
    available = int(psutil.virtual_memory().available)
    for folder, limit_file, used_file, reclaimable in (
        (cgroups, "memory.max", "memory.current", "inactive_file"),
        (
            cgroups / "memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ):
        limit, used = _read_number(folder / limit_file), _read_number(folder / used_file)
        if limit is not None and used is not None:
            used = max(0, used - _read_entry(folder / "memory.stat", reclaimable))
            available = min(available, max(0, limit - used))
    return available


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


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _read_entry(path: Path, name: str) -> int:
    """The number that follows a name in a file of names and numbers, or 0."""
    try:
        entries = dict(line.split(maxsplit=1) for line in path.read_text().splitlines())
        return int(entries[name])
    except (OSError, ValueError, KeyError):
        return 0
