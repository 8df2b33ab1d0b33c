"""The frames between an engine and a place that attends for it, and what they hold.

    OPEN    engine -> place   geometry of the model, as JSON; answered by READY or REFUSE
    READY   place -> engine   blocks of each KV group, as JSON
    REFUSE  either way        why the link ends, as JSON
    KV      engine -> place   content of blocks in one tensor of a group
    JOB     engine -> place   q, k, v of rows in one layer; with the first layer contexts and tables
    RESULT  place -> engine   attention of rows in one layer
    FREE    engine -> place   rows whose token is dropped
    PING    either way        nothing, so that the other side is known to be there

All are applied in the order in which they were sent. Numbers are little-endian. A frame has a
bounded size, which is checked before memory is taken for it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import PlaceError, short
from weft.kernels.cpu.courier import ClaimedJobs

FRAME_BYTES = 4 * 2**20  # of a body at most
CHUNK_BYTES = 2**20  # that several rows or blocks fill at most, so that a ping need not wait long
Part: TypeAlias = bytes | memoryview


class FrameKind(IntEnum):
    """The kind of a frame."""

    OPEN = 1
    READY = 2
    REFUSE = 3
    KV = 4
    JOB = 5
    RESULT = 6
    FREE = 7
    PING = 8


class Frame(NamedTuple):
    """A frame that has come whole and unchanged."""

    kind: FrameKind
    body: memoryview


class KVBlocks(NamedTuple):
    """Content of blocks [n] in one tensor of a group, as bytes [n, any]."""

    group: int
    tensor: int
    blocks: NDArray[np.int32]
    content: NDArray[np.uint8]


class JobResults(NamedTuple):
    """Attention of rows in a layer, as bytes [n, any]; see ``ClaimedJobs``."""

    layer: int
    slots: NDArray[np.int32]
    orders: NDArray[np.uint64]
    out: NDArray[np.uint8]


class _Reader:
    """Takes numbers and arrays from a body; PlaceError if it ends too early or too late."""

    def __init__(self, body: memoryview) -> None:
        self._body, self._at = body, 0

    def numbers(self, form: str) -> tuple[int, ...]:
        return struct.unpack(f"<{form}", self._take(struct.calcsize(f"<{form}")))

    def array(self, count: int, dtype: str) -> NDArray[Any]:
        return np.frombuffer(self._take(count * np.dtype(dtype).itemsize), dtype)

    def rest(self, rows: int) -> NDArray[np.uint8]:
        """What is left, as rows [rows, any]."""
        left = len(self._body) - self._at
        if rows == 0 or left % rows:
            raise PlaceError("A frame does not hold what it says.")
        return self.array(left, "u1").reshape(rows, -1)

    def end(self) -> None:
        if self._at != len(self._body):
            raise PlaceError("A frame holds more than it says.")

    def _take(self, size: int) -> memoryview:
        if self._at + size > len(self._body):
            raise PlaceError("A frame holds less than it says.")
        self._at += size
        return self._body[self._at - size : self._at]


def pack_kv(content: KVBlocks) -> tuple[Part, ...]:
    """The body of KV."""
    head = struct.pack("<HHI", content.group, content.tensor, len(content.blocks))
    return head, _bytes(content.blocks), _bytes(content.content)


def unpack_kv(body: memoryview) -> KVBlocks:
    """Read the body of KV. Raises PlaceError if it is malformed."""
    reader = _Reader(body)
    group, tensor, count = reader.numbers("HHI")
    return KVBlocks(group, tensor, reader.array(count, "<i4"), reader.rest(count))


def pack_jobs(jobs: ClaimedJobs) -> tuple[Part, ...]:
    """The body of JOB."""
    begins = jobs.contexts is not None
    widths = [table.shape[1] for table in jobs.tables]
    sizes = [jobs.layer, len(jobs.slots), begins, len(widths), jobs.q.shape[1], jobs.k.shape[1]]
    parts: list[Part] = [struct.pack("<HIBHII", *sizes), _bytes(jobs.slots), _bytes(jobs.orders)]
    if jobs.contexts is not None:
        parts.append(_bytes(jobs.contexts))
        parts.append(struct.pack(f"<{len(widths)}I", *widths))
        parts += [_bytes(table) for table in jobs.tables]
    return (*parts, _bytes(jobs.q), _bytes(jobs.k), _bytes(jobs.v))


def unpack_jobs(body: memoryview) -> ClaimedJobs:
    """Read the body of JOB. Raises PlaceError if it is malformed."""
    reader = _Reader(body)
    layer, count, begins, groups, q_bytes, kv_bytes = reader.numbers("HIBHII")
    slots, orders = reader.array(count, "<i4"), reader.array(count, "<u8")
    contexts: NDArray[np.int32] | None = None
    tables: tuple[NDArray[np.int32], ...] = ()
    if begins:
        contexts = reader.array(count, "<i4")
        widths = reader.numbers(f"{groups}I")
        tables = tuple(reader.array(count * w, "<i4").reshape(count, w) for w in widths)
    q, k, v = (
        reader.array(count * size, "u1").reshape(count, size)
        for size in (q_bytes, kv_bytes, kv_bytes)
    )
    reader.end()
    return ClaimedJobs(layer, slots, orders, contexts, tables, q, k, v)


def pack_results(results: JobResults) -> tuple[Part, ...]:
    """The body of RESULT."""
    head = struct.pack("<HI", results.layer, len(results.slots))
    return head, _bytes(results.slots), _bytes(results.orders), _bytes(results.out)


def unpack_results(body: memoryview) -> JobResults:
    """Read the body of RESULT. Raises PlaceError if it is malformed."""
    reader = _Reader(body)
    layer, count = reader.numbers("HI")
    slots, orders = reader.array(count, "<i4"), reader.array(count, "<u8")
    return JobResults(layer, slots, orders, reader.rest(count))


def pack_slots(slots: NDArray[np.int32]) -> tuple[Part, ...]:
    """The body of FREE."""
    return (_bytes(slots),)


def unpack_slots(body: memoryview) -> NDArray[np.int32]:
    """Read the body of FREE. Raises PlaceError if it is malformed."""
    if len(body) % 4:
        raise PlaceError("A frame does not hold what it says.")
    return np.frombuffer(body, "<i4")


def pack_ready(blocks: Sequence[int]) -> tuple[Part, ...]:
    """The body of READY."""
    return (json.dumps({"blocks": list(blocks)}).encode(),)


def unpack_ready(body: memoryview, groups: int) -> tuple[int, ...]:
    """Read the body of READY: blocks of each group. Raises PlaceError if it is malformed."""
    try:
        blocks = json.loads(bytes(body))["blocks"]
        good = isinstance(blocks, list) and len(blocks) == groups
        if not good or not all(type(count) is int and 1 <= count <= 2**24 for count in blocks):
            raise ValueError(short(blocks))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise PlaceError(f"The place's blocks are malformed: {short(error)}.") from None
    return tuple(blocks)


def pack_refusal(message: str, *, final: bool) -> tuple[Part, ...]:
    """The body of REFUSE.

    Args:
        final: the two do not go together, so that it is of no use to ask again unchanged.
    """
    return (json.dumps({"message": short(message, 500), "final": final}).encode(),)


def unpack_refusal(body: memoryview) -> tuple[str, bool]:
    """Read the body of REFUSE; one that is malformed has no reason."""
    try:
        given = json.loads(bytes(body))
        return short(given["message"], 500), given["final"] is True
    except (ValueError, TypeError, KeyError, RecursionError):
        return "it does not say why", False


def _bytes(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
