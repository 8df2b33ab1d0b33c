"""Where the control groups of this process lie in the file system."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path


def group_chains(controller: str, root: Path = Path("/")) -> Iterator[tuple[int, list[Path]]]:
    """Yield for each mount the version, and the folders of this process's group and its ancestors.

    Both versions are found, also side by side. In a container the group may be known by a path
    that is not mounted there; then what is mounted is taken for it.

    Args:
        controller: such as ``memory`` or ``cpu``; version 2 has one hierarchy for all.
        root: where ``proc`` and the mounts are, for tests.
    """
    try:
        paths = _paths((root / "proc/self/cgroup").read_text(), controller)
        mounts = (root / "proc/self/mountinfo").read_text()
    except (OSError, UnicodeDecodeError):
        return
    for version, inside, point in _mounts(mounts, controller):
        if (path := paths.get(version)) is not None:
            top = root / point.relative_to("/")
            yield version, _chain(top, top / _below(path, inside))


def _paths(text: str, controller: str) -> dict[int, Path]:
    """This process's group in each hierarchy: lines of number, controllers and path."""
    paths = {}
    for line in text.splitlines():
        number, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            paths[1] = Path(path)
        elif number == "0" and not controllers:
            paths[2] = Path(path)
    return paths


def _mounts(text: str, controller: str) -> Iterator[tuple[int, Path, Path]]:
    """Mounts of either version: the group that is mounted, and where."""
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        inside, point = (Path(_unescaped(word)) for word in before.split()[3:5])
        kind, _, options = after.split(maxsplit=2)
        if kind == "cgroup2":
            yield 2, inside, point
        elif kind == "cgroup" and controller in options.split(","):
            yield 1, inside, point


def _unescaped(word: str) -> str:
    """A path of mountinfo, where spaces and the like are written as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), word)


def _below(path: Path, inside: Path) -> Path:
    """The way from the group that is mounted to another; none if it does not lie in there."""
    if ".." in path.parts or not path.is_relative_to(inside):
        return Path()
    return path.relative_to(inside)


def _chain(top: Path, folder: Path) -> list[Path]:
    """The groups from a folder, or the nearest above it that exists, up to the mount."""
    while folder != top and not folder.is_dir():
        folder = folder.parent
    found = [folder]
    while folder != top:
        folder = folder.parent
        found.append(folder)
    return found
