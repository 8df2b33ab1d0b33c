"""Files of packed weights in the cache folder, by the checkpoint and the settings they are made of.

A file is written under another name, by whoever holds the lock on that, and renamed when it is
whole. Readers take no lock: a file that is removed or replaced stays with those that have mapped
it. The time of a file's last change is that of its last use.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from weft.core.cache_folder import cache_folder, file_stem
from weft.core.placement import interleaving
from weft.core.settings import format_bytes
from weft.models.packed_file import (
    VERSION,
    MapMatrix,
    PackedFile,
    PackedFileError,
    packed_bytes,
    write_packed,
)

logger = logging.getLogger("weft")

SUFFIX, PARTIAL = ".packed", ".partial"
SPARE_BYTES = 64 * 2**20  # that a disk keeps free
LOOK_AGAIN_S = 0.05
START_S = 1.0  # after which whoever is about to write has begun
LOCK_TRIES = 5
TICK_S = 0.02  # two changes of a file may have the same time if they are nearer to each other


@dataclass(frozen=True)
class PackedKey:
    """What packed weights are made of.

    Attributes:
        source: the model folder or GGUF file.
        checkpoint: what it is known by; see ``identity_of``.
        settings: all else that their bytes depend on.
    """

    source: Path
    checkpoint: Mapping[str, Any]
    settings: Mapping[str, str]

    @property
    def about(self) -> dict[str, Any]:
        """What the header of the file says."""
        return {"source": str(self.source), **self._parts}

    @property
    def _parts(self) -> dict[str, Any]:
        return {"checkpoint": dict(self.checkpoint), "settings": dict(self.settings)}

    @property
    def file_name(self) -> str:
        """A name that is readable and differs where any part of the key does."""
        text = json.dumps([VERSION, self._parts], sort_keys=True)
        digest = blake2b(text.encode(), digest_size=12).hexdigest()
        return f"{file_stem(self.source)}-{self.settings['dtype']}-{digest}{SUFFIX}"

    def matches(self, about: Mapping[str, Any]) -> bool:
        """Whether a header is of this key."""
        return all(about.get(name) == value for name, value in self._parts.items())


@dataclass(frozen=True)
class KeptFile:
    """A file in the cache folder.

    Attributes:
        source: the model that it was made of; None where its header cannot be read.
        checkpoint: what its files were then; see ``identity_of``.
        used: when it was last used, in seconds since the epoch.
    """

    path: Path
    nbytes: int
    used: float
    source: str | None
    checkpoint: object
    settings: Mapping[str, str]


def identity_of(files: Sequence[Path], described_by: Sequence[Path]) -> dict[str, Any]:
    """Return what changes where a checkpoint does, without reading its weights.

    Args:
        files: of the weights: their names, sizes, inodes and times.
        described_by: small files that say how to read them: their content.
    """
    found = {file.name: _stat(file) for file in files}
    if time.time() - max(times[2] for times in found.values()) / 1e9 < TICK_S:
        time.sleep(TICK_S)
        found = {file.name: _stat(file) for file in files}
    texts = {
        file.name: blake2b(file.read_bytes(), digest_size=16).hexdigest()
        for file in described_by
        if file.is_file()
    }
    return {"files": found, "described_by": texts}


class PackedCache:
    """The files of one folder, of so many bytes at most.

    Args:
        nodes: NUMA nodes on which the pages of a file lie in turns, whoever reads or writes it
            first. All processes share them, so they are near to no thread in particular.
    """

    def __init__(
        self, limit_bytes: int, folder: Path | None = None, nodes: Sequence[int] = ()
    ) -> None:
        self.folder = packed_folder() if folder is None else folder
        self._limit = limit_bytes
        self._nodes = nodes

    def find(
        self, key: PackedKey, map_matrix: MapMatrix, *, verify: bool = False
    ) -> dict[str, Any] | None:
        """Return the mapped weights, or None if there is no file.

        One that cannot be used is removed; the log says why.

        Args:
            verify: compare all bytes with their digests.
        """
        path = self.folder / key.file_name
        try:
            with PackedFile(path) as file:
                if not key.matches(file.about):
                    raise PackedFileError("it is of other weights")
                weights = file.weights(map_matrix, verify=verify, nodes=self._nodes)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except PackedFileError as error:
            logger.warning("%s is not used: %s. The weights are packed again.", path, error)
            self.drop(key)
            return None
        except OSError as error:  # of a file system without maps, or of a disk that fails
            why = f"it cannot be read ({error.strerror})"
            logger.warning("%s is not used: %s. The weights are packed again.", path, why)
            return None
        with contextlib.suppress(OSError):  # a folder that is only read
            os.utime(path)
        return weights

    def drop(self, key: PackedKey) -> None:
        """Remove a file that cannot be used."""
        with contextlib.suppress(OSError):
            (self.folder / key.file_name).unlink()

    def wait(self, key: PackedKey, patience_s: float) -> None:
        """Wait for a file that another process writes, or is about to write."""
        began, seen = time.monotonic(), False
        while not os.path.exists(self.folder / key.file_name):
            waited, written = time.monotonic() - began, _is_locked(self._partial(key))
            if waited >= patience_s or (not written and (seen or waited >= START_S)):
                return
            seen = seen or written
            time.sleep(LOOK_AGAIN_S)

    def keep(
        self,
        key: PackedKey,
        weights: Mapping[str, Any],
        between: Callable[[], None] = lambda: None,
    ) -> bool:
        """Write the weights into the folder; whether that was done.

        It is not if another process writes them, or has, or if they alone are more than the limit.

        Args:
            between: see ``write_packed``; if it raises, nothing is left behind.

        Raises:
            OSError: the folder cannot be written, or the disk is full.
        """
        needed = packed_bytes(weights)
        if needed > self._limit:
            logger.warning(
                "The packed weights have %s and are not kept; packed_cache allows %s.",
                format_bytes(needed),
                format_bytes(self._limit),
            )
            return False
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial = self._partial(key)
        with _locked(partial) as file:
            if file is None or self._is_kept(key):
                logger.info("Another process writes the packed weights, or has written them.")
                return False
            self._make_room(key, needed)
            with interleaving(self._nodes):
                write_packed(file, key.about, weights, between)
            if not _is_at(file, partial):  # removed by hand; another file may be in its place
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(partial))
            partial.replace(self.folder / key.file_name)
        _sync(self.folder)
        return True

    def _partial(self, key: PackedKey) -> Path:
        return self.folder / (key.file_name + PARTIAL)

    def _is_kept(self, key: PackedKey) -> bool:
        try:
            with PackedFile(self.folder / key.file_name) as file:
                return key.matches(file.about)
        except (FileNotFoundError, PackedFileError):
            return False

    def _make_room(self, key: PackedKey, needed: int) -> None:
        """Remove what nobody finishes, then the files that were used longest ago."""
        for path in self.folder.glob(f"*{PARTIAL}"):
            if path != self._partial(key):
                _remove_unfinished(path)
        files = kept_files(self.folder)
        total = sum(file.nbytes for file in files)
        for file in files:
            if total + needed <= self._limit:
                break
            file.path.unlink(missing_ok=True)
            total -= file.nbytes
            logger.info("%s is removed to make room for other packed weights.", file.path)
        found = os.statvfs(self.folder)
        if found.f_bavail * found.f_frsize < needed + SPARE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def packed_folder() -> Path:
    """The folder of packed weights."""
    return cache_folder() / "packed"


def kept_files(folder: Path) -> list[KeptFile]:
    """Return the files of a folder; the one that was used longest ago comes first."""
    found = []
    for path in folder.glob(f"*{SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            about: Mapping[str, Any] = {}
            with contextlib.suppress(PackedFileError), PackedFile(path) as file:
                about = file.about
            status = path.stat()
            source, settings = about.get("source"), about.get("settings")
            found.append(
                KeptFile(
                    path,
                    status.st_size,
                    status.st_mtime,
                    source if isinstance(source, str) else None,
                    about.get("checkpoint"),
                    settings if isinstance(settings, dict) else {},
                )
            )
    return sorted(found, key=lambda file: (file.used, file.path))


def clear(folder: Path, model: str | None = None) -> list[KeptFile]:
    """Remove the files of a folder and return them; of one model only if its path is given.

    Files that processes have mapped stay with these until they end.
    """
    removed = [file for file in kept_files(folder) if model is None or file.source == model]
    for file in removed:
        file.path.unlink(missing_ok=True)
    if model is None:
        for path in folder.glob(f"*{PARTIAL}"):
            _remove_unfinished(path)
    return removed


def _stat(path: Path) -> list[int]:
    """Size, and times of the last change of content and of anything, and the inode."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int | None]:
    """Make a file, empty, and lock it; None if another process has. Removes what is not renamed."""
    with contextlib.ExitStack() as opened:
        file = None
        for _ in range(LOCK_TRIES):
            file = _open_locked(path, os.O_CREAT, opened)
            if file is not None:
                break
            time.sleep(LOOK_AGAIN_S / LOCK_TRIES)  # whoever looks or removes has it for a moment
        if file is None:
            yield None
            return
        try:
            os.ftruncate(file, 0)
            yield file
        finally:
            if _is_at(file, path):
                path.unlink()


def _remove_unfinished(path: Path) -> None:
    """Remove a file that nobody writes, under its lock, so that nobody begins to meanwhile."""
    with contextlib.ExitStack() as opened, contextlib.suppress(FileNotFoundError):
        if _open_locked(path, 0, opened) is not None:
            path.unlink()


def _open_locked(path: Path, flags: int, opened: contextlib.ExitStack) -> int | None:
    """Open a file and lock it; None if another process has, or if it is at the path no more.

    Args:
        opened: closes it.
    """
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    opened.callback(os.close, file)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    return file if _is_at(file, path) else None


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _is_locked(path: Path) -> bool:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks, on which nobody writes
        return False
    finally:
        os.close(file)
    return False


def _sync(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
