"""Counters of a request plane, and a board in shared memory that sums those of all planes.

A cell of the board has two halves, of which one is written while the other is valid, so that a
process that dies while it writes takes nothing along. Its successor goes on from there. The head of
a cell also says when it was last written, by which the supervisor knows who hangs.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import accumulate, islice
from typing import Any, NamedTuple

import orjson

from weft.core.errors import InvariantError

HEAD_BYTES, HALF_BYTES = 64, 2**20  # pages that are never written take no room
CELL_BYTES = HEAD_BYTES + 2 * HALF_BYTES
_LENGTH = struct.Struct("<Q")
MAX_USES = 2048  # pairs of key and class, each of some 150 bytes at most
OTHERS = "(others)"

# fmt: off
TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0,
)
ITL_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 10.0,
)
LATENCY_BUCKETS = (
    0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
    240.0, 480.0, 960.0,
)
# fmt: on


class Histogram:
    """Counts of observations in buckets."""

    def __init__(self, bounds: Seq[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, observations up to it), as Prometheus has them."""
        names = [*map(str, self.bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self.counts)), strict=True))


def percentile(bounds: Seq[float], counts: Seq[int], share: float) -> float | None:
    """The value that this share of observations does not exceed, estimated within its bucket.

    None without observations; the highest bound for one beyond it.

    Args:
        counts: of each bucket of a `Histogram`, with those beyond the last bound.
    """
    wanted, seen = share * sum(counts), 0
    if not wanted:
        return None
    for low, high, count in zip((0.0, *bounds), bounds, counts, strict=False):
        if seen + count >= wanted:
            return low + (high - low) * (wanted - seen) / count
        seen += count
    return bounds[-1]


class Latencies:
    """How long the sequences of one service class took."""

    def __init__(self) -> None:
        self.time_to_first_token = Histogram(TTFT_BUCKETS)
        self.inter_token_latency = Histogram(ITL_BUCKETS)
        self.e2e = Histogram(LATENCY_BUCKETS)
        self.queue_time = Histogram(LATENCY_BUCKETS)
        self.prefill_time = Histogram(LATENCY_BUCKETS)
        self.decode_time = Histogram(LATENCY_BUCKETS)
        self.time_per_output_token = Histogram(ITL_BUCKETS)

    def dump(self) -> list[list[Any]]:
        """As JSON values, in the order of the histograms."""
        return [[histogram.counts, histogram.total] for histogram in vars(self).values()]

    def add(self, dumped: list[list[Any]]) -> None:
        """Add what another one has dumped."""
        for own, (counts, total) in zip(vars(self).values(), dumped, strict=True):
            own.counts = [a + b for a, b in zip(own.counts, counts, strict=True)]
            own.total += total


class Use(NamedTuple):
    """What one key has used of one service class."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Counts:
    """Plain numbers of one request plane, or the sum of several.

    Classes of sequences are told by their place in the table, in words, since the board is JSON.

    Attributes:
        waiting, running: sequences at present; all else only grows.
        targets: sequences by (class, target, "kept" or "missed").
        latencies: by class.
        usage: of keys, by class and name. The board has the first ``MAX_USES`` of them, and the
            others in one.
    """

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.waiting = 0
        self.running = 0
        self.finished: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self.targets: Counter[str] = Counter()
        self.latencies: dict[str, Latencies] = {}
        self.usage: dict[str, Use] = {}

    def latencies_of(self, place: str) -> Latencies:
        """Of the class that has this place in the table."""
        return self.latencies.setdefault(place, Latencies())

    @staticmethod
    def bucket_key(place: int | str, kind: str, bucket: int) -> str:
        """The name in ``observed`` of a bucket of latencies of a class: ``ttft`` or ``tpot``."""
        return f"{place} {kind} {bucket}"

    def observed(self) -> Counter[str]:
        """What is compared with some minutes ago: ``targets``, and buckets of TTFT and TPOT."""
        found = Counter(self.targets)
        for place, latencies in self.latencies.items():
            for kind, histogram in (
                ("ttft", latencies.time_to_first_token),
                ("tpot", latencies.time_per_output_token),
            ):
                for bucket, count in enumerate(histogram.counts):
                    found[self.bucket_key(place, kind, bucket)] = count
        return found

    def add_use(self, name: str, more: Use) -> None:
        """Count what a key has used, by class and name."""
        old = self.usage.get(name, _NONE)
        self.usage[name] = Use(old[0] + more[0], old[1] + more[1], old[2] + more[2])

    def dump(self) -> dict[str, Any]:
        """As JSON values."""
        values = {name: getattr(self, name) for name in _NAMES}
        values["latencies"] = {place: found.dump() for place, found in self.latencies.items()}
        values["usage"] = {name: list(use) for name, use in _bounded(self.usage).items()}
        return values

    def add(self, dumped: dict[str, Any], *, gauges: bool = True) -> None:
        """Add what another one has dumped.

        Args:
            gauges: add what is so at present, too.
        """
        for name, value in dumped.items():
            own = getattr(self, name)
            if name == "latencies":
                for place, found in value.items():
                    self.latencies_of(place).add(found)
            elif name == "usage":
                for key, use in value.items():
                    self.add_use(key, Use(*use))
            elif isinstance(own, Counter):
                own.update(value)
            elif gauges or name not in ("waiting", "running"):
                setattr(self, name, own + value)


_NAMES = tuple(vars(Counts()))
_NONE = Use()


def _bounded(usage: dict[str, Use]) -> dict[str, Use]:
    """The first ones, and the sum of the others; no key has such a name."""
    if len(usage) <= MAX_USES:
        return usage
    found = dict(islice(usage.items(), MAX_USES))
    for name, use in islice(usage.items(), MAX_USES, None):
        place = name.split(" ", 1)[0]
        rest = found.get(f"{place} {OTHERS}", _NONE)
        found[f"{place} {OTHERS}"] = Use(*(a + b for a, b in zip(rest, use, strict=True)))
    return found


class Board:
    """Cells in shared memory, one for each request plane; each writes its own and reads all.

    Args:
        memory: of ``create_board``.
        own: number of the cell of this process.
    """

    def __init__(self, memory: int, own: int) -> None:
        self._map = mmap.mmap(memory, 0)
        self._own = own

    def write(self, counts: Counts) -> None:
        """Show these to the others."""
        data = orjson.dumps(counts.dump())
        if len(data) + _LENGTH.size > HALF_BYTES:
            raise InvariantError(f"{len(data)} bytes of counts are too many for the board")
        at = self._own * CELL_BYTES
        turn = self._turn(self._own) + 1
        half = at + HEAD_BYTES + turn % 2 * HALF_BYTES
        self._map[half : half + _LENGTH.size + len(data)] = _LENGTH.pack(len(data)) + data
        self._map[at : at + _LENGTH.size] = _LENGTH.pack(turn)
        self.sign(time.monotonic_ns())

    def sign(self, now_ns: int) -> None:
        """Record when this process was last alive, on the monotonic clock; 0 for not yet."""
        at = self._own * CELL_BYTES + _LENGTH.size
        self._map[at : at + _LENGTH.size] = _LENGTH.pack(now_ns)

    def signed_ns(self) -> int:
        """The latest value of ``sign``."""
        return int(_LENGTH.unpack_from(self._map, self._own * CELL_BYTES + _LENGTH.size)[0])

    def has_counts(self) -> bool:
        """Whether the plane, or a predecessor, has shown counts: it does while it serves."""
        return self._turn(self._own) > 0

    def read_own(self) -> dict[str, Any]:
        """The latest counts of this plane's predecessor; empty if there was none."""
        return self._read(self._own)

    def read_others(self) -> Iterable[dict[str, Any]]:
        """The latest counts of the other planes."""
        cells = range(len(self._map) // CELL_BYTES)
        return [self._read(cell) for cell in cells if cell != self._own]

    def _read(self, cell: int) -> dict[str, Any]:
        while True:
            turn = self._turn(cell)
            half = cell * CELL_BYTES + HEAD_BYTES + turn % 2 * HALF_BYTES
            (length,) = _LENGTH.unpack_from(self._map, half)
            data = self._map[half + _LENGTH.size : half + min(length + _LENGTH.size, HALF_BYTES)]
            if self._turn(cell) == turn:
                break  # the half was valid all the while
        found: dict[str, Any] = orjson.loads(data or b"{}")
        return found

    def _turn(self, cell: int) -> int:
        """The number of writes to the cell; its last bit selects the valid half."""
        return int(_LENGTH.unpack_from(self._map, cell * CELL_BYTES)[0])


def create_board(cells: int) -> int:
    """A descriptor of memory for so many request planes."""
    memory = os.memfd_create("weft-board", os.MFD_CLOEXEC)
    os.ftruncate(memory, cells * CELL_BYTES)
    return memory
