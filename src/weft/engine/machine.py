"""Facts of the machine that the engine runs on."""

from __future__ import annotations

import os
import time
from pathlib import Path

from weft.core.topology import this_machine

BF16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")  # the last one is Arm's


class WallClock:
    """Monotonic seconds of the machine."""

    def now(self) -> float:
        return time.monotonic()


def usable_cores() -> int:
    """Processors that this process has the time of."""
    machine = this_machine()
    return machine.cpus if machine.quota is None else max(1, min(machine.cpus, int(machine.quota)))


def resident_bytes(pid: int) -> int:
    """Memory that returns when a process ends; 0 if there is none. Files stay in the cache."""
    try:
        _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


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
