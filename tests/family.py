"""Resources of a running server: its processes, their memory and descriptors, its rings' slots.

Reads ``/proc`` and the rings' own memory, so that nothing has to be believed that the server says.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from weft.ring import _native
from weft.ring.layout import State


@dataclass(frozen=True)
class Sample:
    """One look at a process; ``memory_bytes`` is its own memory without files and rings."""

    memory_bytes: int
    descriptors: int
    threads: int


class Family:
    """All processes of one server, those that were killed and started again included."""

    def __init__(self, supervisor: int) -> None:
        self.samples: dict[tuple[str, int], list[Sample]] = {}  # by title and process
        self._root = psutil.Process(supervisor)

    def members(self) -> list[tuple[str, psutil.Process]]:
        """(title, process) of the supervisor and whatever descends from it now."""
        found = []
        for process in (self._root, *self._root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess, IndexError):
                found.append((Path(process.cmdline()[0].split()[0]).name, process))
        return found

    def sample(self) -> None:
        """Look at every member once."""
        for title, process in self.members():
            with contextlib.suppress(OSError, psutil.Error):
                sample = Sample(own_memory(process.pid), process.num_fds(), process.num_threads())
                self.samples.setdefault((title, process.pid), []).append(sample)

    def alive(self) -> list[str]:
        """Processes ever seen that still run, with their state; the dead may wait to be reaped."""
        found = []
        for title, pid in self.samples:
            with contextlib.suppress(psutil.NoSuchProcess):
                if (state := psutil.Process(pid).status()) != psutil.STATUS_ZOMBIE:
                    found.append(f"{title} {pid} {state}")
        return found

    def growth(self) -> list[dict[str, object]]:
        """How each process changed from the first quarter of its samples to the last."""
        rows = []
        for (title, pid), samples in self.samples.items():
            quarter = len(samples) // 4
            if quarter == 0:
                continue
            first, last = samples[quarter : 2 * quarter], samples[-quarter:]
            row: dict[str, object] = {"process": title, "pid": pid, "samples": len(samples)}
            for name in ("memory_bytes", "descriptors", "threads"):
                before, after = (median(getattr(s, name) for s in part) for part in (first, last))
                row |= {name: after, f"{name}_more": after - before}
            rows.append(row)
        return rows


def own_memory(pid: int) -> int:
    """Anonymous resident bytes of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"process {pid} has no memory")


def peak_bytes(pid: int) -> int:
    """The most bytes of a process that were resident so far."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"process {pid} has no memory")


@dataclass(frozen=True)
class Ring:
    """What lies in a ring: its resident bytes, the engine's process, how many slots are in use."""

    memory_bytes: int
    engine_pid: int
    busy: int


def rings(pid: int) -> Iterator[Ring]:
    """The rings that a process has open, read through its descriptors."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if "weft-ring" in os.readlink(entry):
                fd = os.open(entry, os.O_RDWR)
                try:
                    yield _ring(fd)
                finally:
                    os.close(fd)


def _ring(fd: int) -> Ring:
    page = _native.Page(fd)
    busy = sum(state != State.EMPTY for state in page.states())
    return Ring(os.fstat(fd).st_blocks * 512, page.info()["pid"], busy)
