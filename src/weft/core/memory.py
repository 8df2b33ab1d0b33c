"""Memory that is free for this process, limits of its control groups, and kills under them."""

from __future__ import annotations

import errno
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from weft.core.control_groups import group_chains
from weft.core.settings import format_bytes

RECENT_S = 10.0  # from a kill until its process is gone and noticed, at the most
NO_LIMIT = 2**62  # version 1 says a number near 2**63 where there is none
# What the message of a RuntimeError says when memory ran out: of torch on a CPU; of CUDA, its
# driver, Triton and NCCL; of cuBLAS.
OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


@dataclass(frozen=True)
class _Version:
    """The files of a version of control groups.

    Attributes:
        limits: bytes, or ``max``.
        nested_limit: name of the lowest limit of the ancestors in ``memory.stat``.
        droppable: names of the file pages in there, which go when memory is needed.
        kills: the file that counts processes of the group killed for memory, as ``oom_kill``.
    """

    limits: tuple[str, ...]
    used: str
    nested_limit: str
    droppable: tuple[str, ...]
    kills: str


# memory.high stops no process but slows all of them down to a crawl, so it is a limit, too.
_V2 = _Version(
    ("memory.max", "memory.high"),
    "memory.current",
    "",
    ("inactive_file", "active_file"),
    "memory.events",
)
_V1 = _Version(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    "hierarchical_memory_limit",
    ("total_inactive_file", "total_active_file"),
    "memory.oom_control",
)


@dataclass(frozen=True)
class MemoryGroup:
    """A control group whose limits this process is under.

    Attributes:
        own: whether it is this process's own group, and not an ancestor of it.
    """

    folder: Path
    version: _Version
    own: bool

    def limit(self) -> int | None:
        """Bytes that its processes may use together; None for any number."""
        found = [_number(self.folder / name) for name in self.version.limits]
        if self.own:  # in a container the ancestors themselves may be out of sight
            found.append(_entry(self.folder / "memory.stat", self.version.nested_limit))
        limits = (limit for limit in found if limit is not None and limit < NO_LIMIT)
        return min(limits, default=None)

    def available(self) -> int | None:
        """Bytes that its processes can still allocate; None if it sets no limit.

        Its usage counts file pages, which the kernel drops when memory is needed; so they are free
        for us. Among the active ones are mapped weights, also of an engine that has ended. Pages of
        tmpfs and shared memory are on neither list.
        """
        limit, used = self.limit(), _number(self.folder / self.version.used)
        if limit is None or used is None:
            return None
        stat = self.folder / "memory.stat"
        droppable = sum(_entry(stat, name) or 0 for name in self.version.droppable)
        return max(0, limit - max(0, used - droppable))

    def kills(self) -> int | None:
        """Its processes that the kernel has killed for memory; None if it does not count them."""
        return _entry(self.folder / self.version.kills, "oom_kill")


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that can be allocated without swapping, within the limits of all control groups.

    Args:
        root: where ``proc`` and the control groups are, for tests.
    """
    found = [_available_bytes()]
    found += [left for group in memory_groups(root) if (left := group.available()) is not None]
    return min(found)


def _available_bytes() -> int:
    """Memory that the kernel estimates to be free without swapping."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("MemAvailable:")]
    return 1024 * int(line.split()[1])


def memory_groups(root: Path = Path("/")) -> list[MemoryGroup]:
    """The control groups of this process that govern memory, each before its parent.

    Args:
        root: where ``proc`` and the mounts are, for tests.
    """
    found: dict[Path, MemoryGroup] = {}
    for number, folders in group_chains("memory", root):
        version = _V1 if number == 1 else _V2
        for index, folder in enumerate(folders):
            if index and _number(folder / "memory.use_hierarchy") == 0:
                break  # version 1 may keep limits from the groups below
            found.setdefault(folder, MemoryGroup(folder, version, own=index == 0))
    return list(found.values())


def memory_limit(groups: list[MemoryGroup]) -> int | None:
    """The lowest limit of control groups in bytes; None if none of them has one."""
    limits = (group.limit() for group in groups)
    return min((limit for limit in limits if limit is not None), default=None)


class MemoryKills:
    """Tells processes that the kernel killed because memory ran out from those that others killed.

    The kernel raises a group's counter before it kills a process of it. The processes in question
    must be in the group of this one.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._groups = memory_groups(root)
        self._machine = root / "proc/vmstat"
        self._count = self._read()
        self._rose_s = -math.inf

    def look(self) -> None:
        """Check whether the counter has risen since the last call, which makes the rise recent."""
        count = self._read()
        if count > self._count:
            self._count, self._rose_s = count, time.monotonic()

    def recent(self) -> bool:
        """Whether a process that has just ended by SIGKILL was killed for memory."""
        self.look()
        return time.monotonic() - self._rose_s < RECENT_S

    def explain(self) -> str:
        """The memory limit that was reached, for the log."""
        limit = memory_limit(self._groups)
        if limit is None:
            return "the memory of this machine ran out"
        return f"the {format_bytes(limit)} of memory that its control group may use ran out"

    def _read(self) -> int:
        counts = [group.kills() for group in self._groups if group.own]
        known = [count for count in counts if count is not None]
        # The root group has no counter; the machine's counts those of other groups, too.
        return sum(known) if known else _entry(self._machine, "oom_kill") or 0


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _entry(path: Path, name: str) -> int | None:
    """The number that follows a name in a file of names and numbers; None if there is none."""
    try:
        entries = dict(line.split(maxsplit=1) for line in path.read_text().splitlines())
        return int(entries[name])
    except (OSError, ValueError, KeyError):
        return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of Python, torch, cuBLAS, Triton or the driver says that memory ran out.

    Not Triton's "out of resource: shared memory": such a kernel does not fit whatever is free.
    """
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch and isinstance(error, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError):  # of pages that are mapped
        return error.errno == errno.ENOMEM
    text = str(error)
    return isinstance(error, RuntimeError) and any(words in text for words in OUT_OF_MEMORY)
