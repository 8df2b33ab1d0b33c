"""Looks at the processes of a server: memory, CPU time, and whether they are at rest."""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path

import psutil

MEMORY = ("Pss", "Pss_Anon", "Pss_File", "Pss_Shmem", "Private_Clean", "Private_Dirty")
RESTING_S = 3.0  # with hardly any CPU time, after which a process has nothing left to do
POLL_S = 1.0
WORKING = 0.05  # of a core: an idle server wakes up now and then, and time is counted in hundredths


def processes(pid: int) -> dict[str, psutil.Process]:
    """A process and all below it, by title; those of the same title get their number, too."""
    parent = psutil.Process(pid)
    found: dict[str, psutil.Process] = {}
    for process in (parent, *parent.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):
            title = Path(process.cmdline()[0].split(" ")[0]).name
            found[f"{title} {process.pid}" if title in found else title] = process
    return found


def cpu_seconds(pid: int) -> dict[str, float]:
    """CPU seconds of each process by title."""
    times = {title: process.cpu_times() for title, process in processes(pid).items()}
    return {title: spent.user + spent.system for title, spent in times.items()}


def memory(pid: int) -> dict[str, dict[str, int]]:
    """Bytes of each process by title, as the kernel counts them in ``smaps_rollup``.

    ``pss`` divides a page that several processes map among them; ``private`` are the pages that
    no other process has.
    """
    return {title: _memory_of(process.pid) for title, process in processes(pid).items()}


def _memory_of(pid: int) -> dict[str, int]:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    kib = {name: int(size) for name, size in re.findall(r"^(\w+): +(\d+) kB$", text, re.MULTILINE)}
    counts = {name.lower(): kib[name] * 1024 for name in MEMORY}
    counts["private"] = counts.pop("private_clean") + counts.pop("private_dirty")
    return counts


def wait_until_at_rest(pid: int, *titles: str) -> None:
    """Until processes of these titles are there, and none of the server works any more."""
    resting_since, before = time.monotonic(), {"": -1.0}
    while time.monotonic() - resting_since < RESTING_S:
        time.sleep(POLL_S)
        now = cpu_seconds(pid)
        busy = sum(now.values()) - sum(before.values()) > WORKING * POLL_S
        if busy or now.keys() != before.keys() or not all(title in now for title in titles):
            resting_since, before = time.monotonic(), now
