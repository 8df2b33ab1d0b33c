"""The prefix cache on disk: blocks that memory gives up, written behind, and read ahead of use.

What happens to a block, from its eviction to its return:

    scheduler   reserve()                  has()  fetch()      staged()  claim()
    executor               save()                                                 take()
    threads                       writes            reads
    in memory          |--------------|                 |------------------------|
    on disk                           |------------------------------------------------------
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from queue import SimpleQueue

from weft.core.errors import InvariantError
from weft.core.settings import format_bytes
from weft.kv.block_files import BlockFiles, Key

WRITING_BYTES = 64 * 2**20  # that wait to be written
STAGED_BYTES = 512 * 2**20  # that are read ahead, or asked for
RATE_BYTES_S = 500e6  # of a disk that was not measured lately
RATE_HALF_LIFE_S = 60.0  # of what was measured
MEASURED_BYTES = 2**20  # of a fetch that tells how fast the disk is
SCAN_S = 1.0  # at most, that sequences wait until it is known what there is
LATE, LATE_S = (
    4.0,
    1.0,
)  # so many times the predicted time, and seconds, after which a fetch is late
PAUSE_S = 30.0  # after the disk could not be written
RESCAN_S = 600.0

logger = logging.getLogger("weft")


@dataclass(slots=True)
class Fetch:
    """Blocks that are read from disk, in order.

    Attributes:
        keys: those that are asked for, or staged; up to the first that is not there.
        late_at: when nobody should wait for it any more, on the monotonic clock.
        done: whether all are staged.
        wanted: whether somebody asks for it.
    """

    keys: Seq[Key]
    late_at: float
    done: bool = False
    wanted: bool = True

    @property
    def pending(self) -> bool:
        """Whether to wait for it."""
        return not self.done and time.monotonic() < self.late_at


@dataclass(slots=True)
class DiskTotals:
    """Counts since the start.

    Attributes:
        saved, read: blocks.
        lost: blocks that were to be saved, and are not.
        missing: blocks that were to be read, and were not there whole.
    """

    saved: int = 0
    read: int = 0
    lost: int = 0
    missing: int = 0


class DiskCache:
    """Saves and reads the blocks of prefixes on threads of its own.

    Args:
        sizes: bytes of a block of each group.
        writing_bytes: that may wait to be written.
        staged_bytes: that all fetches together may ask for.

    Attributes:
        files: where they lie.
        totals: what was done so far.
    """

    def __init__(
        self,
        files: BlockFiles,
        sizes: Seq[int],
        *,
        writing_bytes: int = WRITING_BYTES,
        staged_bytes: int = STAGED_BYTES,
    ) -> None:
        self.files = files
        self.totals = DiskTotals()
        self._sizes = tuple(sizes)
        self._writing_bytes, self._staged_bytes = writing_bytes, staged_bytes
        self._measured, self._measured_at = RATE_BYTES_S, 0.0
        self._lock = threading.Lock()
        self._reserved: set[Key] = set()
        self._reserved_bytes = self._asked_bytes = self._unread_bytes = 0
        self._writing: dict[Key, memoryview] = {}
        self._asked: Counter[Key] = Counter()  # by fetches and claims
        self._staged: dict[Key, memoryview] = {}
        self._claims: Counter[Key] = Counter()
        self._writes: SimpleQueue[Key | None] = SimpleQueue()
        self._reads: SimpleQueue[Fetch | None] = SimpleQueue()
        self._arrived: Callable[[], None] = lambda: None
        self._threads: list[threading.Thread] = []
        self._scanned = threading.Event()
        self._started = self._paused_until = 0.0

    def start(self, arrived: Callable[[], None]) -> None:
        """Look at what there is, and begin to read and write.

        Args:
            arrived: called on another thread when a fetch is done, all is written, or it is known
                what there is.
        """
        self._arrived, self._started = arrived, time.monotonic()
        for name, work in (("weft-disk-write", self._write), ("weft-disk-read", self._read)):
            thread = threading.Thread(target=work, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    @property
    def starting(self) -> bool:
        """Whether it will be known soon what there is."""
        soon = time.monotonic() < self._started + SCAN_S
        return soon and bool(self._threads) and not self._scanned.is_set()

    # -- saving -------------------------------------------------------------------------------

    def reserve(self, key: Key) -> bool:
        """Whether a block is to be saved: it is not there yet, and there is room until then.

        If so, ``save`` must follow.
        """
        size = self._sizes[key[0]]
        with self._lock:
            if not self._scanned.is_set() or key in self._reserved or key in self.files:
                return False
            if self.full or self.paused:
                self.totals.lost += 1
                return False
            self._reserved.add(key)
            self._reserved_bytes += size
        return True

    @property
    def full(self) -> bool:
        """Whether nothing can be reserved before something is written."""
        return self._reserved_bytes + max(self._sizes) > self._writing_bytes

    @property
    def paused(self) -> bool:
        """Whether nothing is written, as the disk could not be written a moment ago."""
        return time.monotonic() < self._paused_until

    def save(self, key: Key, content: memoryview) -> None:
        """Write a block that was reserved, soon; ``content`` must not change any more."""
        with self._lock:
            self._writing[key] = content
        self._writes.put(key)

    def _write(self) -> None:
        self._scan()
        scanned = time.monotonic()
        self._scanned.set()
        self._arrived()
        while (key := self._writes.get()) is not None:
            try:
                self.files.write(key, self._writing[key])
                self.totals.saved += 1
            except OSError as error:
                self._pause(error)
            except Exception:
                logger.exception("A prefix could not be kept on disk.")
                self.totals.lost += 1
            with self._lock:
                del self._writing[key]
                self._reserved.remove(key)
                self._reserved_bytes -= self._sizes[key[0]]
            if self._writes.empty():
                self._arrived()
            if time.monotonic() - scanned > RESCAN_S:
                self._scan()
                scanned = time.monotonic()

    def _scan(self) -> None:
        try:
            self.files.scan()
        except OSError as error:
            logger.warning("The prefixes on disk cannot be listed: %s.", error.strerror or error)

    def _pause(self, error: OSError) -> None:
        """Save nothing for a while; say so once each time."""
        self.totals.lost += 1
        if not self.paused:
            logger.warning(
                "Prefixes cannot be kept on disk at present: %s. Those that are there are used.",
                error.strerror or error,
            )
        self._paused_until = time.monotonic() + PAUSE_S

    # -- reading ------------------------------------------------------------------------------

    def has(self, key: Key) -> bool:
        """Whether a block can probably be read."""
        return key in self._staged or key in self._writing or key in self.files

    def block_bytes(self, group: int) -> int:
        """Bytes of a block of a group."""
        return self._sizes[group]

    @property
    def bytes_s(self) -> float:
        """Rate at which blocks are read and checked: as measured, the less so the longer ago."""
        age_s = time.monotonic() - self._measured_at
        return RATE_BYTES_S + (self._measured - RATE_BYTES_S) * math.exp2(-age_s / RATE_HALF_LIFE_S)

    def read_s(self, nbytes: int) -> float:
        """Predict the seconds until so many bytes more are read than are asked for."""
        return (self._unread_bytes + nbytes) / self.bytes_s

    @property
    def room(self) -> int:
        """Bytes that may still be asked for."""
        return self._staged_bytes - self._asked_bytes

    def fetch(self, keys: Seq[Key]) -> Fetch:
        """Begin to stage blocks; ``release`` must follow."""
        with self._lock:
            for key in keys:
                size = 0 if key in self._asked else self._sizes[key[0]]
                self._asked_bytes += size
                self._unread_bytes += size
                self._asked[key] += 1
            late_s = LATE_S + LATE * self.read_s(0)
        fetch = Fetch(keys, time.monotonic() + late_s, done=not keys)
        if keys:
            self._reads.put(fetch)
        return fetch

    def release(self, fetch: Fetch) -> None:
        """Forget what was fetched and nobody else asks for; what is not read yet is not read."""
        with self._lock:
            fetch.wanted = False
            self._drop(fetch.keys)

    def _drop(self, keys: Seq[Key]) -> None:
        """One fetch or claim less asks for each of these blocks."""
        for key in keys:
            self._asked[key] -= 1
            if not self._asked[key]:
                del self._asked[key]
                self._asked_bytes -= self._sizes[key[0]]
                if self._staged.pop(key, None) is None:
                    self._unread_bytes -= self._sizes[key[0]]

    def _read(self) -> None:
        while (fetch := self._reads.get()) is not None:
            begun = time.perf_counter()
            try:
                nbytes = self._stage_all(fetch)
            except Exception:
                logger.exception("Prefixes on disk could not be read.")
                nbytes = 0
            finally:
                fetch.done = True
            if nbytes >= MEASURED_BYTES:
                now, found = time.perf_counter(), self.bytes_s
                self._measured = found + (nbytes / (now - begun) - found) / 4
                self._measured_at = time.monotonic()
            self._arrived()

    def _stage_all(self, fetch: Fetch) -> int:
        """Stage blocks up to the first that is not there; return the bytes that were read."""
        total = 0
        for index, key in enumerate(fetch.keys):
            nbytes = self._stage(fetch, key)
            if nbytes is None:
                with self._lock:
                    if fetch.wanted:
                        self._drop(fetch.keys[index:])
                        fetch.keys = fetch.keys[:index]
                break
            total += nbytes
        return total

    def _stage(self, fetch: Fetch, key: Key) -> int | None:
        """Have a block in memory; return the bytes that were read, None if it is not there."""
        with self._lock:
            if not fetch.wanted:
                return None
            if key in self._staged:
                return 0
            content = self._writing.get(key)
        nbytes = 0
        if content is None:
            nbytes = self._sizes[key[0]]
            content = self.files.read(key, nbytes)
            if content is None:
                self.totals.missing += 1
                return None
            self.totals.read += 1
        with self._lock:
            if key in self._asked and key not in self._staged:
                self._staged[key] = content
                self._unread_bytes -= self._sizes[key[0]]
        return nbytes

    def staged(self, key: Key) -> bool:
        """Whether a block is in memory and may be claimed."""
        return key in self._staged

    def claim(self, keys: Seq[Key]) -> bool:
        """Reserve staged blocks for a step, which takes each once; False if one is not there."""
        with self._lock:
            if not all(key in self._staged for key in keys):
                return False
            self._claims.update(keys)
            self._asked.update(keys)
        return True

    def take(self, key: Key) -> memoryview:
        """The content of a claimed block. Raises InvariantError if it was not claimed."""
        with self._lock:
            if key not in self._claims:
                raise InvariantError("a block from disk was not claimed")
            self._claims[key] -= 1
            if not self._claims[key]:
                del self._claims[key]
            content = self._staged[key]
            self._drop([key])
            return content

    # -- the end ------------------------------------------------------------------------------

    def close(self, patience_s: float = 0.0) -> None:
        """Stop, once what is to be saved is written or so many seconds have passed."""
        self._writes.put(None)
        self._reads.put(None)
        end = time.monotonic() + patience_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def describe(self) -> str:
        """A readable description of what there is."""
        return f"{len(self.files)} blocks, {format_bytes(self.files.nbytes)} in all"
