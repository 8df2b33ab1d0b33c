"""Images of a disk after a loss of power, from a log of what processes did to it.

``powerlog.c`` writes the log. What a synchronised file, or folder, held is surely there: bytes by
fsync of the file, names by fsync of their folder. Of what came later anything may be there: some
writes and not others, in sectors or pages, and some names and not others.
"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from builds import compiled

SOURCE = Path(__file__).with_name("powerlog.c")
_HEAD = struct.Struct("=QQQII")
_CREATED, _CUT = 1, 2

Change = TypeVar("Change")


def library() -> Path:
    """The layer, for ``LD_PRELOAD``. Raises CompileError."""
    words = ["-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", str(SOURCE)]
    return compiled("gcc", words, [SOURCE])


def variables(root: Path, log: Path) -> dict[str, str]:
    """The environment of processes whose work below a folder is to be logged."""
    found = {"POWERLOG_ROOT": str(root), "POWERLOG_FILE": str(log)}
    return {**found, "LD_PRELOAD": str(library())}


@dataclass(frozen=True)
class Act:
    """What was done: ``end`` is the size of the log afterwards."""

    kind: str
    file: int
    place: int
    first: bytes
    second: bytes
    end: int


def read_log(log: Path) -> Iterator[Act]:
    """All that was done, in its order."""
    data, at = log.read_bytes(), 0
    while at < len(data):
        kind, file, place, first, second = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        end = at + first + second
        yield Act(chr(kind), file, place, data[at : at + first], data[at + first : end], end)
        at = end


class File:
    """Bytes: as they are now, as they surely are, and what happened between."""

    def __init__(self) -> None:
        self.now = bytearray()
        self.sure = b""
        self.since: list[tuple[int, bytes | None]] = []  # None: cut, or lengthened, to the place

    def do(self, place: int, data: bytes | None) -> None:
        _apply(self.now, place, data)
        self.since.append((place, data))

    def sync(self) -> None:
        self.sure = bytes(self.now)
        self.since.clear()

    def image(self, draw: random.Random | None) -> bytes:
        data = bytearray(self.sure)
        for place, piece in _some(list(_pieces(self.since, draw)), draw):
            _apply(data, place, piece)
        return bytes(data)


@dataclass
class Folder:
    """Names: as they are now, as they surely are, and what happened between."""

    now: dict[str, File | Folder] = field(default_factory=dict)
    sure: dict[str, File | Folder] = field(default_factory=dict)
    since: list[tuple[str, str, File | Folder | None]] = field(default_factory=list)

    def do(self, old: str, new: str, node: File | Folder | None) -> None:
        """Take a name away and give another one; either may be empty."""
        _rename(self.now, old, new, node)
        self.since.append((old, new, node))

    def sync(self) -> None:
        self.sure = dict(self.now)
        self.since.clear()

    def image(self, draw: random.Random | None) -> dict[str, File | Folder]:
        names = dict(self.sure)
        for change in _some(self.since, draw):
            _rename(names, *change)
        return names


class Disk:
    """Follows a log.

    Args:
        root: the folder that was logged.
        start: what it had before; nothing, if it is not given.
    """

    def __init__(self, root: Path, start: Folder | None = None) -> None:
        self._top = start or Folder()
        self._root = os.fsencode(root.resolve())
        self._files: dict[int, File] = {}  # by the numbers of their inodes

    def do(self, act: Act) -> None:
        """Take the next act."""
        if act.kind == "O":
            if act.place & _CREATED:
                file = self._files[act.file] = File()
                folder, name = self._find(act.first)
                folder.do("", name, file)
                return
            found = self._at(act.first)
            if isinstance(found, File):
                self._files[act.file] = found
                if act.place & _CUT:
                    found.do(0, None)
        elif act.kind == "W":
            self._files[act.file].do(act.place, act.first)
        elif act.kind == "T":
            self._files[act.file].do(act.place, None)
        elif act.kind == "S" and not act.place:
            self._files[act.file].sync()
        elif act.kind == "S":
            found = self._at(act.first)
            assert isinstance(found, Folder)
            found.sync()
        elif act.kind == "M":
            folder, name = self._find(act.first)
            folder.do("", name, Folder())
        elif act.kind == "U":
            folder, name = self._find(act.first)
            folder.do(name, "", None)
        else:
            self._link(act)

    def _link(self, act: Act) -> None:
        folder, old = self._find(act.first)
        other, new = self._find(act.second)
        assert folder is other, "nothing is moved between folders"
        folder.do(old if act.kind == "R" else "", new, folder.now[old])

    def write(self, target: Path, draw: random.Random | None) -> None:
        """Make what the disk may hold now, by the draw; None for what is surely there."""
        _write(self._top, target, draw)

    def _at(self, path: bytes) -> File | Folder:
        folder, name = self._find(path)
        return folder.now[name] if name else folder

    def _find(self, path: bytes) -> tuple[Folder, str]:
        """The folder of a path and its last part, which is empty for the root."""
        parts = os.path.normpath("/" + os.fsdecode(path[len(self._root) :])).strip("/").split("/")
        folder = self._top
        for part in parts[:-1]:
            found = folder.now[part]
            assert isinstance(found, Folder)
            folder = found
        return folder, parts[-1]


def snapshot(path: Path) -> Folder:
    """What a folder has, all of it on the disk."""
    folder = Folder()
    for entry in path.iterdir():
        if entry.is_dir():
            folder.now[entry.name] = snapshot(entry)
        else:
            file = folder.now[entry.name] = File()
            file.now += entry.read_bytes()
            file.sync()
    folder.sync()
    return folder


def _write(folder: Folder, target: Path, draw: random.Random | None) -> None:
    target.mkdir()
    for name, node in folder.image(draw).items():
        if isinstance(node, Folder):
            _write(node, target / name, draw)
        else:
            (target / name).write_bytes(node.image(draw))


def _apply(data: bytearray, place: int, piece: bytes | None) -> None:
    size = place if piece is None else place + len(piece)
    if len(data) < size:
        data.extend(bytes(size - len(data)))
    if piece is None:
        del data[place:]
    else:
        data[place:size] = piece


def _rename(
    names: dict[str, File | Folder], old: str, new: str, node: File | Folder | None
) -> None:
    names.pop(old, None)
    if new and node is not None:
        names[new] = node


def _pieces(
    since: list[tuple[int, bytes | None]], draw: random.Random | None
) -> Iterator[tuple[int, bytes | None]]:
    """Writes as they may reach the disk: whole, in pages, or in sectors."""
    size = draw.choice((512, 4096, 2**30)) if draw is not None else 1
    for place, data in since if draw is not None else ():
        if data is None:
            yield place, None
            continue
        at = 0
        while at < len(data):
            step = size - (place + at) % size
            yield place + at, data[at : at + step]
            at += step


def _some(changes: list[Change], draw: random.Random | None) -> list[Change]:
    """Those that have reached the disk: none, the first ones, or any."""
    if draw is None or not changes:
        return []
    manner = draw.random()
    if manner < 0.25:
        return []
    if manner < 0.5:
        return changes[: draw.randint(0, len(changes))]
    share = draw.random()
    return [change for change in changes if draw.random() < share]
