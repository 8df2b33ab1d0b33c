"""API keys that are valid now: read again when their file changes, and found in constant time."""

from __future__ import annotations

import contextlib
import hmac
import logging
import time
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

from weft.core.errors import ConfigError
from weft.server.keyfile import Key, NoKeysError, read_keys

logger = logging.getLogger("weft.server")

LOOK_EVERY_S = 1.0
INLINE_BYTES = 32 * 1024  # of a file: up to here it is read on the event loop


class KeyRing:
    """The keys that are valid now. A changed file counts within a second, without a restart.

    A file that is gone or empty has no keys any more; one that is unreadable or malformed changes
    nothing. The log says so. Whoever starts a server checks the file by `read_keys` before: where
    it cannot be used from the beginning, because a process was restarted, it has no keys.

    Args:
        given: keys of the command line.
        path: of the file, if there is one.
        classes: the class table, which the file may name.
    """

    def __init__(
        self, given: Seq[str] = (), path: str | None = None, classes: Seq[str] | None = None
    ) -> None:
        self._given = tuple(given)
        self._path = path
        self._classes = classes
        self._stamp = self._look()
        self._next_look = 0.0
        self._keys = read_keys(given, None)
        self._reading: Future[list[Key] | ConfigError] | None = None
        self._accept(self._read())

    @property
    def demanded(self) -> bool:
        """Whether requests need a key at all."""
        return bool(self._given) or self._path is not None

    @property
    def from_file(self) -> bool:
        """Whether there is a file to look at again and again."""
        return self._path is not None

    def find(self, given: str) -> Key | None:
        """The key that was given. All digests are compared, each in constant time."""
        self.refresh()
        digest = sha256(given.encode("utf-8", "surrogateescape")).digest()
        found = None
        for key in self._keys:
            if hmac.compare_digest(digest, key.digest):
                found = key
        return found

    def named(self, digest: bytes) -> str:
        """What the key of a digest is called; "" if it is valid no more."""
        return next((key.name for key in self._keys if key.digest == digest), "")

    def refresh(self) -> None:
        """Read the file again if it has changed; looks at most once a second.

        A large file is read on a thread; a later call takes what it has.
        """
        now = time.monotonic()
        if self._reading is not None:
            if self._reading.done():
                found, self._reading = self._reading.result(), None
                self._take(found)
            return
        if self._path is None or now < self._next_look:
            return
        self._next_look = now + LOOK_EVERY_S
        stamp = self._look()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        if stamp is not None and stamp[1] > INLINE_BYTES:
            thread = ThreadPoolExecutor(1, thread_name_prefix="weft-keys")
            self._reading = thread.submit(self._read)
            thread.shutdown(wait=False)
        else:
            self._take(self._read())

    def _read(self) -> list[Key] | ConfigError:
        try:
            return read_keys(self._given, self._path, self._classes)
        except ConfigError as error:
            return error

    def _take(self, found: list[Key] | ConfigError) -> None:
        """Let what was read be valid from now on."""
        self._accept(found)
        logger.warning("The API key file has changed; %d keys are valid.", len(self._keys))

    def _accept(self, found: list[Key] | ConfigError) -> None:
        if isinstance(found, NoKeysError):
            logger.warning("No key from a file is valid now. %s", found.message)
            self._keys = read_keys(self._given, None)
        elif isinstance(found, ConfigError):
            logger.error("The API keys were not read; no key has changed. %s", found.message)
        else:
            self._keys = found

    def _look(self) -> tuple[int, ...] | None:
        if self._path is None:
            return None
        with contextlib.suppress(OSError):
            stat = Path(self._path).stat()
            return stat.st_mtime_ns, stat.st_size, stat.st_ino
        return None
