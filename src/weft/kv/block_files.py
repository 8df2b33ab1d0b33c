"""Files of KV blocks in one folder, named by content, checksummed, of so many bytes at most.

A file is written under another name and renamed, and checked whenever it is read: one that is torn,
damaged or of something else counts as missing. Several processes may use one folder, also such as
have the same number, in containers that share it; each keeps the limit as far as it knows of the
files. The time of a file's last change is that of its last use.
Files with other names are never touched.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import time
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from threading import Lock
from typing import TypeAlias

from weft.core.errors import ConfigError

Key: TypeAlias = tuple[int, bytes]  # a group of layers, and the content hash of a block

MAGIC = b"weft kv\x01"
IDENTITY_BYTES = 16
PARTIAL_S = 600.0  # after which nobody writes a file any more
PAGE = 4096  # of which file systems give a file a whole number
_NAME = re.compile(r"[0-9a-f]{32}-[0-9]+(\.kv|\.[0-9]+\.partial)")
_HEAD = Struct(f"<8s{IDENTITY_BYTES}sI16sQII")  # magic, identity, key, bytes, checksums


class BlockFiles:
    """The blocks of one model in a folder that other models may share.

    Methods may be called on any thread.

    Args:
        limit_bytes: of all files together, those of other models included.
        identity: digest of all that the bytes of a block depend on, beside its tokens.

    Raises:
        ConfigError: the folder cannot be made or written.
    """

    def __init__(self, folder: Path, limit_bytes: int, identity: bytes) -> None:
        self._folder, self._limit = folder, limit_bytes
        self._identity = identity
        self._own = identity.hex()
        self._writer = secrets.randbits(63)  # names what is being written
        self._sizes: OrderedDict[str, int] = OrderedDict()  # by path in the folder, oldest first
        self._total = 0
        self._lock = Lock()
        try:
            (folder / self._own).mkdir(parents=True, exist_ok=True, mode=0o700)
            probe = folder / self._own / f"{self._writer}.partial"
            probe.touch(mode=0o600)
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"kv_disk '{folder}' cannot be written: {error.strerror}.", param="kv_disk"
            ) from None

    @property
    def nbytes(self) -> int:
        """Bytes of all files that are known."""
        return self._total

    def __contains__(self, key: Key) -> bool:
        return self._name(key) in self._sizes

    def __len__(self) -> int:
        """The number of blocks of this model."""
        with self._lock:
            return sum(name.startswith(self._own) for name in self._sizes)

    def scan(self) -> None:
        """Look at all files, and remove those used longest ago while they exceed the limit.

        Raises:
            OSError: the folder cannot be listed.
        """
        sizes = OrderedDict((name, size) for _, name, size in sorted(self._files()))
        with self._lock:
            self._sizes, self._total = sizes, sum(sizes.values())
            gone = self._make_room(0)
        self._remove(gone)

    def _files(self) -> Iterator[tuple[float, str, int]]:
        """Yield the time of the last use, the path in the folder, and the size of each file."""
        for model in _folders(self._folder, 32):
            for start in _folders(model, 2):
                for entry in _entries(start):
                    if (kind := _NAME.fullmatch(entry.name)) is None:
                        continue
                    with contextlib.suppress(OSError):  # another process has removed it
                        state = entry.stat(follow_symlinks=False)
                        if kind[1] == ".kv":
                            name = f"{model.name}/{start.name}/{entry.name}"
                            yield state.st_mtime, name, _on_disk(state.st_size)
                        elif time.time() - state.st_mtime > PARTIAL_S:
                            os.unlink(entry.path)

    def write(self, key: Key, content: memoryview) -> None:
        """Keep a block. Raises OSError; nothing is there then.

        A block larger than the limit is not kept.
        """
        name, head = self._name(key), self._head(key, content)
        size = file_bytes(len(content))
        if size > self._limit:
            return
        path = self._folder / name
        partial = path.with_suffix(f".{self._writer}.partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with open(os.open(partial, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "wb") as file:
                file.write(head)
                file.write(content)
            with self._lock:
                self._forget(name)
                gone = self._make_room(size)
            self._remove(gone)
            partial.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise
        with self._lock:
            self._sizes[name] = size
            self._total += size

    def read(self, key: Key, nbytes: int) -> memoryview | None:
        """Return the content of a block of so many bytes; None if there is none that is whole.

        A file that is not what it should be is removed.
        """
        name = self._name(key)
        path = self._folder / name
        with contextlib.suppress(OSError):
            content = self._checked(key, _read_whole(path, _HEAD.size + nbytes), nbytes)
            if content is not None:
                with contextlib.suppress(OSError):  # of a folder that can only be read
                    os.utime(path)
                with self._lock, contextlib.suppress(KeyError):
                    self._sizes.move_to_end(name)
                return content
            path.unlink()
        with self._lock:
            self._forget(name)
        return None

    def _checked(self, key: Key, data: bytes, nbytes: int) -> memoryview | None:
        if len(data) != _HEAD.size + nbytes:
            return None
        content = memoryview(data)[_HEAD.size :]
        return content if data.startswith(self._head(key, content)) else None

    def _head(self, key: Key, content: memoryview) -> bytes:
        checksums = zlib.crc32(content), zlib.adler32(content)  # of 64 bits in all, and fast
        return _HEAD.pack(MAGIC, self._identity, *key, len(content), *checksums)

    def _name(self, key: Key) -> str:
        group, block_hash = key
        text = block_hash.hex()
        return f"{self._own}/{text[:2]}/{text}-{group}.kv"

    def _forget(self, name: str) -> None:
        self._total -= self._sizes.pop(name, 0)

    def _make_room(self, size: int) -> list[str]:
        """Forget files until another one fits, and return those, least recently used first."""
        gone = []
        while self._sizes and self._total + size > self._limit:
            name, nbytes = self._sizes.popitem(last=False)
            self._total -= nbytes
            gone.append(name)
        return gone

    def _remove(self, names: list[str]) -> None:
        for name in names:
            with contextlib.suppress(OSError):  # then it is another process's to remove
                (self._folder / name).unlink()


def _folders(folder: Path | os.DirEntry[str], digits: int) -> Iterator[os.DirEntry[str]]:
    """The folders in a folder whose names have so many hexadecimal digits."""
    for entry in _entries(folder):
        named = len(entry.name) == digits and not set(entry.name) - set("0123456789abcdef")
        if named and entry.is_dir(follow_symlinks=False):
            yield entry


def _entries(folder: Path | os.DirEntry[str]) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except FileNotFoundError:  # another process has removed it
        pass


def file_bytes(nbytes: int) -> int:
    """Bytes that the file of a block of so many bytes takes on disk."""
    return _on_disk(_HEAD.size + nbytes)


def _on_disk(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def _read_whole(path: Path, nbytes: int) -> bytes:
    """The content of a regular file of so many bytes; nothing if it is anything else."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    with open(os.open(path, flags), "rb") as file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode) or state.st_size != nbytes:
            return b""
        return file.read(nbytes)
