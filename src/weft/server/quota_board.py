"""Present use of each API key, in memory that all request planes share.

    used slots | accounts: 32 bytes a slot | full: 2 words a slot | open: 1 word a slot and plane

A slot is an account's while it is in use. ``full`` says when its buckets of requests and tokens
will be full, ``open`` how many of its requests each plane has in progress. All is read and written
under a lock that the kernel takes away from who dies. Each number is one aligned word, so that a
process that dies leaves none half written; its open requests are given back by ``release_plane``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq

from weft.core.errors import WeftError
from weft.server.keyfile import MAX_KEYS
from weft.server.quota import Level, after_taking, level, wait_ns

SLOTS = 2 * MAX_KEYS  # also for keys that are valid no more
ACCOUNT_BYTES = 32
WORD_BYTES = 8
BUCKETS = 2
HEAD_BYTES = 64
LOCK_TRIES = 100
LOCK_PAUSE_S = 0.0002
IMPATIENT_S = 1.0

_FULL_AT = HEAD_BYTES + SLOTS * ACCOUNT_BYTES
_OPEN_AT = _FULL_AT + SLOTS * BUCKETS * WORD_BYTES
_PLANE_BYTES = SLOTS * WORD_BYTES
_FLOCK = struct.Struct("@hhqqi0q")  # struct flock of Linux with 64-bit offsets


class TooManyKeysError(WeftError):
    """More keys are in use at once than there is room for."""

    http_status = 429
    code = "too_many_requests"
    retry_after_s = 1


class QuotaBoard:
    """The view of one request plane.

    Args:
        memory: of ``create_quota_board``; it may be closed afterwards.
        plane: number of this request plane, whose predecessor has nothing open any more.

    Raises:
        OSError: the memory cannot be opened.
    """

    def __init__(self, memory: int, plane: int) -> None:
        # Opened anew, as locks on an inherited descriptor would be its parent's and siblings' too.
        self._lock_fd = os.open(f"/proc/self/fd/{memory}", os.O_RDWR | os.O_CLOEXEC)
        self._map = mmap.mmap(memory, 0)
        words = memoryview(self._map)
        self._used = words[:WORD_BYTES].cast("Q")
        self._full = words[_FULL_AT:_OPEN_AT].cast("Q")
        self._open = words[_OPEN_AT:].cast("Q")
        self._planes = len(self._open) // SLOTS
        self._own = plane * SLOTS
        self._patient_from = 0.0  # when it is worth waiting for the lock again
        self._slots: dict[bytes, int] = {}
        with self._locked():
            _clear(self._map, plane)

    @classmethod
    def alone(cls) -> QuotaBoard:
        """The board of a request plane that shares it with no other."""
        memory = create_quota_board(1)
        try:
            return cls(memory, 0)
        finally:
            os.close(memory)

    def enter(self, account: bytes, most: int | None) -> int | None:
        """Count one more request in progress; None if there are as many as may be.

        Returns:
            What ``leave`` needs.
        """
        with self._locked():
            slot = self._slot(account)
            if most is not None and self._num_open(slot) >= most:
                return None
            self._open[self._own + slot] += 1
            return slot

    def leave(self, slot: int) -> None:
        """A request that has entered has ended."""
        if self._lock_fd < 0:  # so has the server
            return
        self._open[self._own + slot] -= 1  # its own word, which nobody else writes

    def num_open(self, account: bytes) -> int:
        """Requests in progress, of all request planes."""
        with self._locked():
            return self._num_open(self._slot(account))

    def take(
        self, account: bytes, limits: Seq[int | None], amounts: Seq[int]
    ) -> tuple[list[int | None], list[Level | None]]:
        """Take from every bucket, or from none.

        Args:
            limits: of the buckets, None where there is none.
            amounts: to be taken.

        Returns:
            For each bucket the nanoseconds after which it holds so much (0: it does; None: it never
            will), and its level afterwards. It was taken if the first are all 0.
        """
        with self._locked():
            now, first = time.monotonic_ns(), self._slot(account) * BUCKETS
            rows = [
                (first + place, limit, amount)
                for place, (limit, amount) in enumerate(zip(limits, amounts, strict=True))
            ]
            waits = [
                0 if limit is None else wait_ns(limit, self._full[at], now, amount)
                for at, limit, amount in rows
            ]
            if not any(wait != 0 for wait in waits):
                self._shift(rows, now)
            return waits, [
                None if limit is None else level(limit, self._full[at], now)
                for at, limit, _ in rows
            ]

    def correct(self, account: bytes, limits: Seq[int | None], amounts: Seq[int]) -> None:
        """Take so much more from the buckets, also what they have not; give back, below 0."""
        if self._lock_fd < 0:  # the server has ended
            return
        with self._locked():
            now, first = time.monotonic_ns(), self._slot(account) * BUCKETS
            rows = zip(range(first, first + BUCKETS), limits, amounts, strict=True)
            self._shift(list(rows), now)

    def _shift(self, rows: Seq[tuple[int, int | None, int]], now_ns: int) -> None:
        for at, limit, amount in rows:
            if limit is not None and amount:
                self._full[at] = max(0, after_taking(limit, self._full[at], now_ns, amount))

    def _num_open(self, slot: int) -> int:
        return sum(self._open[plane * SLOTS + slot] for plane in range(self._planes))

    def _slot(self, account: bytes) -> int:
        """The slot of an account, which gets one if it has none. Raises TooManyKeysError."""
        slot = self._slots.get(account)
        if slot is None or self._account(slot) != account:
            slot = self._find(account)
            if slot is None:
                slot = self._claim(account)
            self._slots[account] = slot
        return slot

    def _account(self, slot: int) -> bytes:
        at = HEAD_BYTES + slot * ACCOUNT_BYTES
        return self._map[at : at + ACCOUNT_BYTES]

    def _find(self, account: bytes) -> int | None:
        end = HEAD_BYTES + self._used[0] * ACCOUNT_BYTES
        at = self._map.find(account, HEAD_BYTES, end)
        while at >= 0 and (at - HEAD_BYTES) % ACCOUNT_BYTES:
            at = self._map.find(account, at + 1, end)
        return None if at < 0 else (at - HEAD_BYTES) // ACCOUNT_BYTES

    def _claim(self, account: bytes) -> int:
        """A new slot, or that of an account that uses nothing."""
        slot = self._used[0]
        if slot == SLOTS:
            now = time.monotonic_ns()
            unused = (slot for slot in range(SLOTS) if not self._in_use(slot, now))
            slot = next(unused, SLOTS)
            if slot == SLOTS:
                raise TooManyKeysError("Too many API keys are in use at once.")
            self._full[slot * BUCKETS] = self._full[slot * BUCKETS + 1] = 0
        at = HEAD_BYTES + slot * ACCOUNT_BYTES
        self._map[at : at + ACCOUNT_BYTES] = account
        self._used[0] = max(self._used[0], slot + 1)
        return slot

    def _in_use(self, slot: int, now_ns: int) -> bool:
        full = self._full[slot * BUCKETS : (slot + 1) * BUCKETS]
        return any(word > now_ns for word in full) or self._num_open(slot) > 0

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock. Who does not get it in some 20 ms goes on without: its holder is stopped.

        A limit may then be exceeded by what two planes admit at the same moment. For a while it
        does not wait again.
        """
        patient = time.monotonic() >= self._patient_from
        for _ in range(LOCK_TRIES if patient else 1):
            try:
                fcntl.fcntl(self._lock_fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK))
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                time.sleep(LOCK_PAUSE_S)
            else:
                break
        else:
            self._patient_from = time.monotonic() + IMPATIENT_S
        try:
            yield
        finally:
            fcntl.fcntl(self._lock_fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK))

    def close(self) -> None:
        """Let the memory go. May be called twice."""
        if self._lock_fd >= 0:
            for view in (self._used, self._full, self._open):
                view.release()
            with contextlib.suppress(BufferError):
                self._map.close()
            os.close(self._lock_fd)
        self._lock_fd = -1


def _flock(kind: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, 0, 1, 0)


def _clear(memory: mmap.mmap, plane: int) -> None:
    at = _OPEN_AT + plane * _PLANE_BYTES
    memory[at : at + _PLANE_BYTES] = bytes(_PLANE_BYTES)


def create_quota_board(planes: int) -> int:
    """A descriptor of memory for so many request planes; pages that nobody uses take no room."""
    memory = os.memfd_create("weft-quotas", os.MFD_CLOEXEC)
    os.ftruncate(memory, _OPEN_AT + planes * _PLANE_BYTES)
    return memory


def release_plane(memory: int, plane: int) -> None:
    """Give back what a request plane that has died had open."""
    with mmap.mmap(memory, 0) as shared:
        _clear(shared, plane)
