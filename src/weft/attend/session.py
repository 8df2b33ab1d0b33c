"""One engine's session at a place: its KV, and the host worker that attends over it."""

from __future__ import annotations

import contextlib
import threading
import time
from operator import mul

import numpy as np
from numpy.typing import NDArray

from weft.attend.channel import Transport
from weft.attend.frames import (
    CHUNK_BYTES,
    Frame,
    FrameKind,
    JobResults,
    KVBlocks,
    pack_ready,
    pack_refusal,
    pack_results,
    unpack_jobs,
    unpack_kv,
    unpack_slots,
)
from weft.attend.geometry import Geometry
from weft.core.errors import InvariantError, PlaceError
from weft.kernels.arrays import Array, numpy_dtype
from weft.kernels.cpu.courier import ClaimedJobs
from weft.kernels.cpu.host import HostLayer, HostMailbox, HostWorker, SharedMemory

ALIGNMENT = 4096  # bytes between tensors
PING_S = 1.0  # without other frames
POLL_S = 0.0002


class PlaceKV:
    """The KV of an engine's sequences: for each group keys, then values of its layers.

    Attributes:
        blocks: of each group.
    """

    def __init__(self, geometry: Geometry, memory_bytes: int) -> None:
        """Take at most so much memory; its pages come as they are written.

        Raises:
            PlaceRefusedError: it does not hold a block of each group.
            ConfigError: there is not so much.
        """
        self.blocks = geometry.split(memory_bytes)
        sizes = [
            -(-count * geometry.tensor_bytes(group) // ALIGNMENT) * ALIGNMENT
            for group, count in enumerate(self.blocks)
        ]
        tensors = [2 * group.layers for group in geometry.groups]
        total = sum(map(mul, sizes, tensors))
        self._memory = SharedMemory.create("weft-place-kv", total)
        self.tensors: list[list[Array]] = []
        self._bytes: list[list[NDArray[np.uint8]]] = []
        at = 0
        for group, (count, size, number) in enumerate(
            zip(self.blocks, sizes, tensors, strict=True)
        ):
            shape, flat = geometry.block_shape(group), (count, geometry.tensor_bytes(group))
            places = range(at, at + size * number, size)
            self.tensors.append(
                [self._memory.array(i, (count, *shape), geometry.kv_dtype) for i in places]
            )
            self._bytes.append([self._memory.array(i, flat, "uint8") for i in places])
            at += size * number

    def write(self, content: KVBlocks) -> None:
        """Write blocks. Raises PlaceError if there are no such ones."""
        group, tensor, blocks, rows = content
        if group >= len(self._bytes) or tensor >= len(self._bytes[group]):
            raise PlaceError(f"There is no tensor {tensor} of group {group}.")
        kept = self._bytes[group][tensor]
        if len(blocks) and not 0 <= blocks.min() <= blocks.max() < len(kept):
            raise PlaceError(f"A KV block is not one of the {len(kept)} of group {group}.")
        if rows.shape[1] != kept.shape[1]:
            raise PlaceError(f"A KV block has {rows.shape[1]} bytes, not {kept.shape[1]}.")
        kept[blocks] = rows


def _layers(geometry: Geometry, kv: PlaceKV) -> list[HostLayer]:
    layers = []
    for layer in geometry.layers:
        tensors = kv.tensors[layer.group]
        values = geometry.groups[layer.group].layers
        layers.append(
            HostLayer(
                tensors[layer.index],
                tensors[values + layer.index],
                layer.heads,
                layer.scale,
                layer.group,
                layer.window,
                layer.softcap,
                writes=layer.writes,
                sinks=layer.sinks,
            )
        )
    return layers


class EngineSession:
    """Serves an engine until the link breaks or either side breaks the protocol.

    One thread applies what the engine sends, another one sends results. What the engine writes is
    applied only when no job that came before it can still write: ``FREE`` waits for those.
    """

    def __init__(
        self, transport: Transport, geometry: Geometry, memory_bytes: int, threads: int
    ) -> None:
        """Take the memory and start the worker.

        Raises:
            PlaceRefusedError: memory or kernels do not fit the engine's model.
        """
        self._transport, self._geometry = transport, geometry
        self._kv = PlaceKV(geometry, memory_bytes)
        self._dtype = numpy_dtype(geometry.dtype)
        self._mailbox = HostMailbox.create(
            _layers(geometry, self._kv),
            slots=geometry.slots,
            table_width=geometry.table_width,
            dtype=geometry.dtype,
        )
        self._orders = np.zeros(geometry.slots, np.uint64)  # of the job in each slot
        self._lock = threading.Lock()  # of the mailbox's client
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._worker = HostWorker(self._mailbox, threads=threads)

    def run(self) -> None:
        """Serve. Returns never.

        Raises:
            PlaceError: why it has ended.
        """
        sender = threading.Thread(target=self._send_results, name="weft-results", daemon=True)
        try:
            self._transport.send(FrameKind.READY, *pack_ready(self._kv.blocks))
            sender.start()
            while True:
                self._apply(self._transport.receive())
        except PlaceError as error:
            raise self._error or error from None
        except InvariantError as error:
            raise PlaceError(f"The engine broke the protocol: {error.message}") from None
        finally:
            self._ended.set()
            if sender.ident is not None:
                sender.join()
            self._worker.close()

    def _apply(self, frame: Frame) -> None:
        if frame.kind is FrameKind.KV:
            self._kv.write(unpack_kv(frame.body))
        elif frame.kind is FrameKind.JOB:
            self._submit(unpack_jobs(frame.body))
        elif frame.kind is FrameKind.FREE:
            self._empty(unpack_slots(frame.body))
        elif frame.kind is not FrameKind.PING:
            raise PlaceError(f"An engine sends no {frame.kind.name}.")

    def _submit(self, jobs: ClaimedJobs) -> None:
        layers, slots = self._mailbox.layers, jobs.slots
        self._check(slots)
        if jobs.layer >= len(layers):
            raise PlaceError(f"There is no layer {jobs.layer}.")
        layer = layers[jobs.layer]
        q = self._heads(jobs.q, layer.heads, layer.head_dim)
        k = v = None
        if layer.writes:
            k = self._heads(jobs.k, layer.kv_heads, layer.head_dim)
            v = self._heads(jobs.v, layer.kv_heads, layer.head_dim)
        if jobs.contexts is not None:
            self._empty(slots)
        with self._lock:
            if jobs.contexts is not None:
                tables = [np.ascontiguousarray(table) for table in jobs.tables]
                self._mailbox.begin(slots, jobs.contexts, tables)
            self._orders[slots] = jobs.orders
            self._mailbox.submit(slots, jobs.layer, q, k, v)

    def _heads(self, rows: NDArray[np.uint8], heads: int, head_dim: int) -> Array:
        """Bytes [n, any] as [n, heads, D]."""
        if rows.shape[1] != heads * head_dim * self._dtype.itemsize:
            raise PlaceError("The rows of a job do not have the shape of its layer.")
        return np.ascontiguousarray(rows).view(self._dtype).reshape(len(rows), heads, head_dim)

    def _check(self, slots: NDArray[np.int32]) -> None:
        if len(slots) and not 0 <= slots.min() <= slots.max() < self._mailbox.slots:
            raise PlaceError(f"A slot is not one of {self._mailbox.slots}.")

    def _empty(self, slots: NDArray[np.int32]) -> None:
        """Drop the tokens of slots, and wait until nobody writes to their blocks any more."""
        self._check(slots)
        with self._lock:
            running = self._mailbox.abort(slots)
        while running and self._worker.error is None:
            states = self._mailbox.states()
            running = [slot for slot in running if states[slot] == "aborting"]
            if running:
                time.sleep(POLL_S)

    def _send_results(self) -> None:
        sent_at = time.monotonic()
        try:
            while not self._ended.is_set():
                self._mailbox.wait(PING_S / 4)
                frames = self._results()
                for results in frames:
                    self._transport.send(FrameKind.RESULT, *pack_results(results))
                if frames:
                    sent_at = time.monotonic()
                elif time.monotonic() - sent_at > PING_S:
                    self._transport.send(FrameKind.PING)
                    sent_at = time.monotonic()
        except Exception as error:
            self._error = error if isinstance(error, PlaceError) else PlaceError(str(error))
            with contextlib.suppress(PlaceError):
                self._transport.send(FrameKind.REFUSE, *pack_refusal(str(error), final=False))
            self._transport.close()

    def _results(self) -> list[JobResults]:
        """Take everything that is done."""
        if self._worker.error is not None:
            raise self._worker.error
        found = []
        with self._lock:
            if failed := self._mailbox.failed():
                raise PlaceError(f"It cannot attend: {next(iter(failed.values()))}.")
            for layer in np.flatnonzero(self._mailbox.done_counts()).tolist():
                spec = self._mailbox.layers[layer]
                row = spec.heads * spec.head_dim * self._dtype.itemsize
                slots = self._mailbox.done(layer, max(1, CHUNK_BYTES // (row + 12)))
                out = self._mailbox.take(slots, layer).reshape(len(slots), -1).view(np.uint8)
                found.append(JobResults(layer, slots.copy(), self._orders[slots], out))
        return found
