"""The folder that has the bytes of files: uploads come whole or not at all, orphans are swept.

Whoever writes a file holds a lock on it until its row is in the data base, so that a file without
a lock and without a row was left by a process that has died.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from weft.batch import points
from weft.batch.journal import sync_folder
from weft.core.errors import ConfigError, WeftError

PARTIAL = ".part"  # at the end of the name of an upload in progress
LOOK_EVERY_BYTES = 16 * 2**20  # written, after which the room on the disk is looked at again


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Bounds on what is kept.

    Attributes:
        file_bytes, key_bytes: of one file, and of all files that one key has uploaded.
        reserve_bytes: of the disk that stay free.
    """

    file_bytes: int = 2**30
    key_bytes: int = 10 * 2**30
    reserve_bytes: int = 2**30


class StorageFullError(WeftError):
    """There is no room for a file: on the disk, or for this key."""

    http_status = 507
    code = "storage_full"


class FileTooLargeError(WeftError):
    """A file has more bytes than the server takes."""

    http_status = 413
    code = "file_too_large"


class FileFolder:
    """Files by their ids.

    Args:
        path: the folder, made if need be; only this user can read it.
        reserve_bytes: that stay free on the disk.

    Raises:
        ConfigError: the folder cannot be used.
    """

    def __init__(self, path: Path, reserve_bytes: int) -> None:
        self._path = path
        self._reserve_bytes = reserve_bytes
        try:
            _make_folder(path)
        except OSError as error:
            message = f"Cannot use the data folder '{path}': {error.strerror}."
            raise ConfigError(message, param="data_dir") from None

    def path(self, file_id: str) -> Path:
        """Where the bytes of a file are."""
        return self._path / file_id

    def has_room(self, wanted: int = 0) -> bool:
        """Whether so many bytes leave the reserve free."""
        return shutil.disk_usage(self._path).free - wanted >= self._reserve_bytes

    def check_room(self, wanted: int = 0) -> None:
        """Raise StorageFullError if so many bytes do not leave the reserve free."""
        if not self.has_room(wanted):
            raise StorageFullError(
                "The disk of the server has no room for more files at present; delete some, or try "
                "again later."
            )

    def begin(self, file_id: str, max_bytes: int) -> Upload:
        """Start a file of at most so many bytes. Raises StorageFullError."""
        self.check_room()
        return Upload(self, file_id, max_bytes)

    def size(self, file_id: str) -> int:
        """Bytes of a file; 0 if it is not there."""
        with contextlib.suppress(FileNotFoundError):
            return self.path(file_id).stat().st_size
        return 0

    def remove(self, file_id: str) -> None:
        """Remove the bytes of a file, if they are there."""
        self.path(file_id).unlink(missing_ok=True)

    def sweep(self, known: Callable[[], Collection[str]]) -> int:
        """Remove what was left by processes that have died; how many files that were.

        Args:
            known: the ids of all files that have a row, or that unfinished batches write.
        """
        names = set(os.listdir(self._path))  # first: what comes later is none of ours
        swept = 0
        for name in sorted(names - set(known())):
            with contextlib.suppress(FileNotFoundError):
                swept += self._sweep(name, known)
        return swept

    def _sweep(self, name: str, known: Callable[[], Collection[str]]) -> bool:
        fd = os.open(self._path / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        else:
            left = name not in known()  # its row may have come just before the lock went
            if left:
                os.unlink(self._path / name)
            return left
        finally:
            os.close(fd)


class Upload:
    """A file that is being written; ``keep`` or ``close`` ends it.

    Attributes:
        size: bytes so far.
    """

    def __init__(self, folder: FileFolder, file_id: str, max_bytes: int) -> None:
        self.id = file_id
        self.size = 0
        self._folder = folder
        self._max_bytes = max_bytes
        self._look_at = LOOK_EVERY_BYTES
        self._target = folder.path(file_id)
        self._path, self._fd = _locked_file(self._target)
        points.reached("upload begun")

    def write(self, data: bytes) -> None:
        """Append bytes.

        Raises:
            FileTooLargeError: there are more than there may be.
            StorageFullError: the disk is full, but for its reserve.
        """
        self.size += len(data)
        if self.size > self._max_bytes:
            raise FileTooLargeError(
                f"The file has more than {self._max_bytes} bytes, which is the most.", param="file"
            )
        if self.size > self._look_at:
            self._look_at = self.size + LOOK_EVERY_BYTES
            self._folder.check_room(LOOK_EVERY_BYTES)
        with _no_room():
            view = memoryview(data)
            while view:
                view = view[os.write(self._fd, view) :]

    def keep(self) -> None:
        """Give the file its name, after all of it is on the disk. The lock stays until ``close``.

        Raises:
            StorageFullError: the disk is full.
        """
        points.reached("upload written")
        with _no_room():
            os.fsync(self._fd)
            points.reached("upload synchronised")
            os.rename(self._path, self._target)
            sync_folder(self._target.parent)
        points.reached("upload renamed")

    def abandon(self) -> None:
        """Remove the file, whatever it is called now, and close it."""
        for path in (self._path, self._target):
            path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Give the lock up. May be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def _make_folder(path: Path) -> None:
    """Make a folder, and those above it, so that they outlive a loss of power."""
    if not path.is_dir():
        _make_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
    with contextlib.suppress(PermissionError):  # of another user, who has made it long ago
        sync_folder(path.parent)


def _locked_file(target: Path) -> tuple[Path, int]:
    """A new file beside the target, and its descriptor, which holds the lock."""
    while True:
        path = target.with_name(f"{target.name}.{secrets.token_hex(4)}{PARTIAL}")
        with _no_room():
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return path, fd
        os.close(fd)  # somebody has taken it for one that was left, before it was locked


@contextlib.contextmanager
def _no_room() -> Iterator[None]:
    """Raise StorageFullError where a write finds no room."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise StorageFullError("The disk of the server is full; try again later.") from None
