"""A real control group with a memory limit, for tests; and made-up ones, as trees of files."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from weft.core.memory import memory_groups

MIB = 2**20
LIMITS = ("memory.limit_in_bytes", "memory.max")


@contextlib.contextmanager
def limited_group(limit: int) -> Iterator[Path]:
    """A group below this process's own, of which the processes that it gets must end before it.

    Skips the test where this process may not make one.
    """
    for parent in (group.folder for group in memory_groups() if group.own):
        folder = parent / f"weft-test-{os.getpid()}-{time.monotonic_ns()}"
        with contextlib.suppress(OSError):
            folder.mkdir()
            if any((folder / name).exists() for name in LIMITS):
                break
            folder.rmdir()
    else:
        pytest.skip("this process may not make a control group with a memory limit")
    try:
        set_limit(folder, limit)
        yield folder
    finally:
        end = time.monotonic() + 30
        while True:  # its processes may be gone from the group a moment later than they have ended
            try:
                folder.rmdir()
                break
            except OSError:
                assert time.monotonic() < end, (folder / "cgroup.procs").read_text()
                time.sleep(0.05)


def set_limit(folder: Path, limit: int) -> None:
    name = next(name for name in LIMITS if (folder / name).exists())
    (folder / name).write_text(str(limit))


def join(folder: Path) -> list[str]:
    """The beginning of a command that runs in a group."""
    return ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(folder)]


class Tree:
    """Files as the kernel shows them below ``root``: who this process is, mounts, groups."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._mounts: list[str] = []
        (root / "proc/self").mkdir(parents=True)

    def member(self, *lines: str) -> None:
        """Lines of ``/proc/self/cgroup``."""
        (self.root / "proc/self/cgroup").write_text("".join(line + "\n" for line in lines))

    def mount(self, kind: str, point: str, inside: str = "/", options: str = "rw") -> None:
        number = len(self._mounts) + 30
        place = f"{number} 25 0:{number} {inside} {point} rw,nosuid shared:9"
        self._mounts.append(f"{place} - {kind} cgroup {options}\n")
        (self.root / "proc/self/mountinfo").write_text("".join(self._mounts))

    def group(self, folder: str, stat: Mapping[str, int] | None = None, **files: object) -> None:
        """The files of a group; names are those of the kernel without ``memory.``."""
        place = self.root / folder.lstrip("/")
        place.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (place / f"memory.{name}").write_text(f"{value}\n")
        lines = "".join(f"{name} {value}\n" for name, value in (stat or {"anon": 1}).items())
        (place / "memory.stat").write_text(lines)
