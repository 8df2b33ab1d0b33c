"""Sockets, NUMA nodes and cores of the machine, and those that this process may compute on."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from weft.core.control_groups import group_chains

SPARE_FROM = 16  # physical cores from which on one is left to the request planes


@dataclass(frozen=True)
class Core:
    """A physical core.

    Attributes:
        cpus: those of its hardware threads that this process may use, in ascending order.
    """

    node: int
    socket: int
    cpus: tuple[int, ...]


@dataclass(frozen=True)
class Topology:
    """The cores that this process may use.

    Attributes:
        cores: node after node, and there in the order of their first hardware thread.
        whole: whether these are all hardware threads of the machine that are online.
        quota: processors' worth of time that control groups allow; None for any.
        memory_nodes: NUMA nodes from which this process may take memory.
    """

    cores: tuple[Core, ...]
    whole: bool
    quota: float | None
    memory_nodes: tuple[int, ...]

    @property
    def nodes(self) -> tuple[int, ...]:
        """NUMA nodes of the cores."""
        return tuple(sorted({core.node for core in self.cores}))

    @property
    def sockets(self) -> int:
        return len({core.socket for core in self.cores})

    @property
    def cpus(self) -> int:
        """Hardware threads."""
        return sum(len(core.cpus) for core in self.cores)

    @property
    def usable(self) -> int:
        """Physical cores that can compute at once: no more than the quota has time for."""
        allowed = len(self.cores) if self.quota is None else math.floor(self.quota)
        return max(1, min(len(self.cores), allowed))

    @property
    def compute_threads(self) -> int:
        """The default number of compute threads.

        One for each physical core. Of many cores one is left to the request planes, so that their
        work does not hold up a thread for which all others then wait.
        """
        usable = self.usable
        return usable - 1 if usable >= SPARE_FROM else usable

    def describe(self) -> str:
        """One line for people."""
        parts = [_count(len(self.cores), "core")]
        if self.cpus != len(self.cores):
            parts[0] += f" with {self.cpus} hardware threads"
        if not self.whole:
            parts[0] += ", a part of the machine's"
        parts.append(_count(self.sockets, "socket"))
        parts.append(_count(len(self.nodes), "NUMA node"))
        if self.quota is not None:
            parts.append(f"a CPU limit of {self.quota:g}")
        return ", ".join(parts)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


@functools.cache
def this_machine() -> Topology:
    """Return what this process may use, as it was when first asked."""
    return read_topology(Path("/"), frozenset(os.sched_getaffinity(0)))


def read_topology(root: Path, allowed: frozenset[int]) -> Topology:
    """Read the files of ``/sys`` below a root folder.

    A machine that does not show them has one node, and a core for each processor.

    Args:
        allowed: processors that the process may run on; never empty.
    """
    devices = root / "sys/devices/system"
    online = _list(devices / "cpu/online") or allowed
    node_of = dict(_nodes(devices / "node"))
    siblings: dict[tuple[int, frozenset[int]], list[int]] = {}
    sockets = {}
    for cpu in sorted(allowed):
        folder = devices / f"cpu/cpu{cpu}/topology"
        # The older name is the same list.
        together = _list(folder / "core_cpus_list") or _list(folder / "thread_siblings_list")
        siblings.setdefault((node_of.get(cpu, 0), frozenset(together or {cpu})), []).append(cpu)
        sockets[cpu] = _number(folder / "physical_package_id")
    cores = [Core(node, sockets[cpus[0]], tuple(cpus)) for (node, _), cpus in siblings.items()]
    nodes = {core.node for core in cores}
    memory = _memory_nodes(root) or nodes
    return Topology(
        tuple(sorted(cores, key=lambda core: (core.node, core.cpus))),
        online <= allowed,
        cpu_quota(root),
        tuple(sorted(memory)),
    )


def cpu_quota(root: Path) -> float | None:
    """Return how many processors' worth of time the control groups allow; None for any number."""
    found = []
    for version, folders in group_chains("cpu", root):
        for folder in folders:
            if version == 2:
                words = _words(folder / "cpu.max")
            else:
                words = _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
            with contextlib.suppress(ValueError):  # "max", or a group without the files
                quota, period = map(int, words)
                if quota > 0 and period > 0:  # version 1 says -1 where there is no limit
                    found.append(quota / period)
    return min(found, default=None)


def _nodes(folder: Path) -> Iterator[tuple[int, int]]:
    """Yield each processor and its node."""
    for node in _list(folder / "online"):
        for cpu in _list(folder / f"node{node}/cpulist"):
            yield cpu, node


def _memory_nodes(root: Path) -> set[int]:
    """Nodes with memory that this process's set of nodes has."""
    found = set(_list(root / "sys/devices/system/node/has_memory"))
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "Mems_allowed_list":
                found &= set(_parsed(value))
    return found


def _list(path: Path) -> frozenset[int]:
    """The numbers of a file such as ``0-3,8``; none if there is no such file."""
    try:
        return frozenset(_parsed(path.read_text()))
    except (OSError, ValueError):
        return frozenset()


def _parsed(text: str) -> Iterable[int]:
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _number(path: Path) -> int:
    """The number in a file, and 0 for what is unknown, which virtual machines call -1."""
    try:
        return max(0, int(path.read_text()))
    except (OSError, ValueError):
        return 0


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
