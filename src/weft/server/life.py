"""Locks that the kernel releases at death: request planes of one store see which are alive."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import struct

from weft.core.errors import ConfigError

_FLOCK = struct.Struct("@hhqqi0q")  # struct flock of Linux with 64-bit offsets
_NUMBERS = 2**62


class Life:
    """A lock on one byte of a file, which ends with this process however it ends.

    Attributes:
        number: of this holder, which is the locked byte; no other has it.

    Args:
        path: of the file, created if missing; None for a holder that no other process sees.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str | None) -> None:
        self._fd = -1
        if path is not None:
            self._fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        self.number = secrets.randbelow(_NUMBERS)
        while path is not None and not self._locked(self.number):
            self.number = secrets.randbelow(_NUMBERS)

    def _locked(self, number: int) -> bool:
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _lock(number))
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            return False
        return True

    def alive(self, number: int) -> bool:
        """Whether the holder of a number lives. Raises OSError if that cannot be known."""
        if number == self.number:
            return True
        if self._fd < 0:
            return False
        kind = _FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, _lock(number)))[0]
        return bool(kind != fcntl.F_UNLCK)

    def close(self) -> None:
        """Release the lock: this process counts as dead. May be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def _lock(number: int) -> bytes:
    return _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0)


def open_life(store: str | None) -> Life:
    """A sign of life to all that use this store. Raises ConfigError if that cannot be given."""
    path = None if store is None else f"{store}-planes"
    try:
        return Life(path)
    except OSError as error:
        message = f"Cannot open '{path}', which stands beside the stored responses: "
        raise ConfigError(f"{message}{error.strerror}.", param="responses_db") from None
