"""Decode attention over KV in host memory: a mailbox of jobs, and the worker that computes them.

A row on its way through the layers has a slot. For each layer the client submits its q, k and v. A
worker writes k and v into the row's KV and attends, for all rows that wait in the layer in one
call. The client takes the results when it next executes the layer (OmniServe section 3.2), or waits
for those of a sub-batch (NEO section 3.1). The worker is threads of this process or a process of
its own (`host_process`).
"""

from __future__ import annotations

import functools
import math
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fcntl import F_ADD_SEALS, F_SEAL_GROW, F_SEAL_SEAL, F_SEAL_SHRINK, fcntl
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from weft.core.errors import ConfigError, HostWorkerError, InvariantError
from weft.core.kv_types import row_size
from weft.kernels.arrays import CODES, NAMES, Array, View, address, dtype_name, numpy_dtype, view
from weft.kernels.cpu import _native

STATES = ("empty", "submitted", "running", "done", "taken", "failed", "aborting")
# The numbers are those of `Fault` in mailbox.hpp.
FAULTS = (
    "none",
    "there is no such layer",
    "q, k or v do not have the shape of the layer",
    "the context is longer than the block table",
    "a block does not exist",
    "the kernel failed",
)

P = ParamSpec("P")
R = TypeVar("R")


def _checked(method: Callable[P, R]) -> Callable[P, R]:
    """Turn what the native part refuses into a typed error."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except ValueError as error:
            raise InvariantError(f"The host mailbox was misused: {error}.") from None

    return call


class SharedMemory:
    """Anonymous memory that other processes can map by its descriptor.

    It has no name, so the kernel frees it with the last process that holds it. Nobody can shrink it
    while it is mapped.
    """

    def __init__(self, fd: int) -> None:
        """Map all of a descriptor, which this object closes when it ends."""
        self._bytes = np.frombuffer(mmap.mmap(fd, 0), np.uint8)
        self.fd = fd

    @classmethod
    def create(cls, name: str, size_bytes: int) -> SharedMemory:
        """Make memory full of zeros; pages are taken as they are first written.

        Raises:
            ConfigError: there is not so much, or nothing is asked for.
        """
        if size_bytes < 1:
            raise ConfigError(f"The host's memory cannot have {size_bytes} bytes.")
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size_bytes)
            fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
            return cls(fd)
        except (OSError, OverflowError) as error:
            os.close(fd)
            raise ConfigError(
                f"{size_bytes} bytes of host memory cannot be mapped: {error}."
            ) from None

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)

    def __len__(self) -> int:
        return len(self._bytes)

    @property
    def address(self) -> int:
        """Where it begins in this process."""
        return address(self._bytes)

    def array(self, offset: int, shape: Sequence[int], dtype: str) -> NDArray[Any]:
        """Return the numbers from a byte on as an array.

        Raises:
            ConfigError: they do not lie within the memory.
        """
        kind = numpy_dtype(dtype)
        size = math.prod(shape) * kind.itemsize
        if not 0 <= offset <= len(self) - size:
            raise ConfigError(f"{size} bytes from {offset} on are not in {len(self)} bytes.")
        return self._bytes[offset : offset + size].view(kind).reshape(shape)


@dataclass(frozen=True)
class HostLayer:
    """The attention of a layer over the host's KV; see ``attention.paged_attention``.

    Attributes:
        k_cache: ``[num_blocks, Hkv, block_size, D]``, with 8-bit types ``D + 4``.
        v_cache: like ``k_cache``.
        heads: of the queries.
        group: which of a row's block tables it reads.
        writes: whether k and v come with each row; False if it reads the KV of another layer.
        sinks: a score for each query head, or none.

    Raises:
        ConfigError: there can be no such window or softcap.
    """

    k_cache: Array
    v_cache: Array
    heads: int
    scale: float
    group: int = 0
    window: int | None = None
    softcap: float | None = None
    writes: bool = True
    sinks: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ConfigError(f"A layer cannot have a window of {self.window}.")
        if self.softcap is not None and not self.softcap > 0:
            raise ConfigError(f"A layer cannot have a softcap of {self.softcap}.")

    @functools.cached_property
    def kv_heads(self) -> int:
        return int(self.k_cache.shape[1])

    @functools.cached_property
    def head_dim(self) -> int:
        return int(self.k_cache.shape[-1]) - row_size(dtype_name(self.k_cache.dtype), 0)

    def views(self) -> tuple[View, View]:
        """Return where the caches lie."""
        return view("k_cache", self.k_cache), view("v_cache", self.v_cache)

    def native(self, k_cache: View, v_cache: View) -> _native.HostLayer:
        """Return the layer as native workers take it, with its caches at these places."""
        return (
            k_cache, v_cache, self.heads, self.head_dim, self.group, self.writes, self.scale,
            self.window or 0, self.softcap or 0.0, self.sinks,
        )  # fmt: skip


class HostCounters(NamedTuple):
    """What a mailbox has counted since it was made, through all workers.

    Attributes:
        submitted: jobs handed to workers: one for each row and layer.
        taken: results taken, those put back included.
        calls: of paged attention.
        jobs: computed, those that were aborted meanwhile included.
        busy_ns: time that workers spent on jobs.
        round_trip_ns: sum over the jobs of the time between submission and result.
    """

    submitted: int
    taken: int
    put_back: int
    aborted: int
    calls: int
    jobs: int
    failed: int
    busy_ns: int
    round_trip_ns: int
    longest_round_trip_ns: int


class HostMailbox:
    """The client's side of a mailbox, for one thread; only those named for it wait for the worker.

    All methods but ``failed``, ``counters`` and ``states`` raise InvariantError, before anything is
    changed, if a slot does not exist, occurs twice or is in a state that the call is not for, or if
    an array does not fit.
    """

    def __init__(self, memory: SharedMemory, layers: Sequence[HostLayer], table_width: int) -> None:
        """Use a mailbox that ``create`` made for these layers, with tables of so many blocks.

        Raises:
            InvariantError: the memory does not hold a mailbox of this version.
        """
        self.memory, self.layers, self.table_width = memory, tuple(layers), table_width
        self.native = attach(memory)
        self._client = _native.MailboxClient(self.native)
        self._counts = np.empty(len(layers), np.int32)

    @classmethod
    def create(
        cls, layers: Sequence[HostLayer], *, slots: int, table_width: int, dtype: str
    ) -> HostMailbox:
        """Make an empty mailbox.

        Args:
            slots: rows that can be on their way at once.
            table_width: blocks of a sequence at most.
            dtype: of q, k, v and results.

        Raises:
            ConfigError: a size is out of bounds, or there is no memory.
        """
        sizes = [
            slots,
            len(layers),
            1 + max((layer.group for layer in layers), default=0),
            table_width,
            max((layer.heads * layer.head_dim for layer in layers), default=0),
            max((layer.kv_heads * layer.head_dim for layer in layers), default=0),
            CODES[dtype],
        ]
        try:
            size = _native.Mailbox.bytes_of(sizes)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"There can be no such host mailbox: {error}.") from None
        memory = SharedMemory.create("weft-mailbox", size)
        _native.Mailbox.format(memory.address, len(memory), sizes)
        return cls(memory, layers, table_width)

    @_checked
    def begin(
        self,
        slots: ArrayLike,
        contexts: ArrayLike,
        tables: Sequence[Array],
        places: NDArray[np.int32] | None = None,
    ) -> None:
        """Begin a token of rows in empty slots.

        Args:
            slots: [n].
            contexts: [n], tokens of each row, this one included; it is the last.
            tables: for each group the rows' block tables [n, any] int32. Entries before the sliding
                window are never read.
            places: [n], whose couriers take the rows' jobs; 0 is the host worker, as without them.
        """
        views = [view("block_tables", table) for table in tables]
        self._client.begin(_slots(slots), _slots(contexts), views, places)

    def carried(
        self,
        residuals: NDArray[Any],
        waits: NDArray[np.int32],
        angles: Sequence[tuple[NDArray[np.float32], NDArray[np.float32]]],
    ) -> _native.CarriedRows:
        """Return what a native pass needs of the rows that it carries; it points to the arrays.

        Args:
            residuals: [slots, C].
            waits: [slots], the layer in which each row waits; a pass writes it.
            angles: for each rope cos and sin [slots, R] of the rows' positions.
        """
        row_bytes = residuals.strides[0]
        carried = _native.CarriedRows(
            self._client, self.slots, address(residuals), row_bytes, address(waits)
        )
        for cos, sin in angles:
            carried.add_angles(address(cos), address(sin), cos.shape[1])
        return carried

    def lane(self) -> _native.Lane:
        """Return what takes a sub-batch through the layers; see ``CpuLane``."""
        return _native.Lane(self._client)

    @_checked
    def submit(
        self, slots: ArrayLike, layer: int, q: Array, k: Array | None = None, v: Array | None = None
    ) -> None:
        """Hand q [n, H, D] and k, v [n, Hkv, D] of a layer to the worker.

        The slots are empty, with a token begun, or taken. k and v are None exactly if the layer
        reads the KV of another one.
        """
        self._check_layer(layer)
        spec = self.layers[layer]
        if (k is not None) != spec.writes or (v is not None) != spec.writes:
            raise ValueError(f"layer {layer} {'needs' if spec.writes else 'has no'} k and v")
        _check_heads("q", q, spec.heads, spec.head_dim)
        for name, fresh in (("k", k), ("v", v)):
            if fresh is not None:
                _check_heads(name, fresh, spec.kv_heads, spec.head_dim)
        self._client.submit(
            _slots(slots),
            layer,
            view("q", q),
            None if k is None else view("k", k),
            None if v is None else view("v", v),
        )

    @_checked
    def done(self, layer: int, most: int) -> NDArray[np.int32]:
        """Return slots with a result of a layer, in the order of their submission."""
        self._check_layer(layer)
        room = np.empty(max(most, 0), np.int32)
        return room[: self._client.done(layer, room)]

    def done_counts(self) -> NDArray[np.int32]:
        """Return the number of results for each layer [layers]; the next call overwrites it."""
        self._client.done_counts(self._counts)
        return self._counts

    @_checked
    def take(self, slots: ArrayLike, layer: int, out: Array | None = None) -> Array:
        """Return the results of a layer [n, H, D]; the slots are taken until ``submit`` of their
        next layer, ``release``, or ``put_back``.

        Args:
            slots: [n], of ``done``.
            out: where to write them; None: to a new numpy array.
        """
        self._check_layer(layer)
        numbers, spec = _slots(slots), self.layers[layer]
        if out is None:
            out = np.empty((len(numbers), spec.heads, spec.head_dim), self.dtype)
        self._client.take(numbers, layer, view("out", out))
        return out

    @_checked
    def put_back(self, slots: ArrayLike) -> None:
        """Undo ``take``: a step that took these results is to be computed again."""
        self._client.put_back(_slots(slots))

    @_checked
    def release(self, slots: ArrayLike) -> None:
        """Empty taken or failed slots: their tokens are over."""
        self._client.release(_slots(slots))

    @_checked
    def abort(self, slots: ArrayLike) -> list[int]:
        """Empty slots in any state, without waiting.

        Returns those that the worker is computing just now. Until ``states`` calls them empty it
        may write to their blocks, which must not be used for anything else. That is after a call of
        paged attention at most, or when the worker's process has been killed.
        """
        return self._client.abort(_slots(slots))

    def failed(self) -> dict[int, str]:
        """Return the slots whose job failed, and why; ``release`` empties them."""
        return {slot: FAULTS[fault] for slot, fault in self._client.failed()}

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is a result to take or a failure; False if there is none in time."""
        return self._client.wait(int(timeout_s * 1e9))

    def wait_for_first(self, timeout_s: float) -> bool:
        """Wait until the job that was submitted first, of those not taken, is done or has failed.

        Clients of several mailboxes that submit and take the same rows so wait for the same one.
        """
        return self._client.wait_for_first(int(timeout_s * 1e9))

    @_checked
    def wait_for(self, slots: ArrayLike, timeout_s: float) -> bool:
        """Wait until no job of these slots is to be computed any more; False if not in time."""
        return self._client.wait_for(_slots(slots), int(timeout_s * 1e9))

    def states(self) -> list[str]:
        """Return the state of each slot: one of ``STATES``."""
        return [STATES[state] for state in self.state_numbers()]

    def state_numbers(self) -> NDArray[np.int32]:
        """Return the state of each slot [slots], as the place of its name in ``STATES``."""
        room = np.empty(self.slots, np.int32)
        self.native.states(room)
        return room

    @property
    def waiting(self) -> int:
        """Jobs that the host worker, not a remote place, has not begun; for any thread."""
        return self.native.waiting()

    def counters(self) -> HostCounters:
        """Return the counters, from any thread and without a lock."""
        return HostCounters(*self.native.counters())

    @property
    def slots(self) -> int:
        return self.native.slots

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of q, k, v and results."""
        return numpy_dtype(NAMES[self.native.type])

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < len(self.layers):
            raise ValueError(f"there is no layer {layer} of {len(self.layers)}")


def attach(memory: SharedMemory) -> _native.Mailbox:
    """Return the mailbox in shared memory, which must live as long.

    Raises:
        InvariantError: there is none, or one of another version.
    """
    try:
        return _native.Mailbox(memory.address, len(memory))
    except ValueError as error:
        raise InvariantError(f"There is no host mailbox: {error}.") from None


def _slots(numbers: ArrayLike) -> NDArray[np.int32]:
    return np.ascontiguousarray(numbers, np.int32)


def _check_heads(name: str, x: Array, heads: int, head_dim: int) -> None:
    if x.ndim != 3 or tuple(x.shape[1:]) != (heads, head_dim):
        raise ValueError(f"{name} is {list(x.shape)} and not [rows, {heads}, {head_dim}]")


def attached_worker(
    mailbox: _native.Mailbox, layers: list[_native.HostLayer], threads: int, cpus: Sequence[int]
) -> _native.HostWorker:
    """Return a worker that is to ``run``, and that alone may serve the mailbox.

    Raises:
        HostWorkerError: the layers do not fit the mailbox, or it has a worker.
    """
    try:
        worker = _native.HostWorker(mailbox, layers, threads, list(cpus))
        worker.attach()
    except (TypeError, ValueError) as error:
        raise HostWorkerError(f"The host worker cannot be started: {error}.") from None
    return worker


class HostWorker:
    """Threads of this process that serve a mailbox, without the interpreter lock.

    Attributes:
        error: why they have ended; None while they serve.
    """

    def __init__(self, mailbox: HostMailbox, *, threads: int = 1, cpus: Sequence[int] = ()) -> None:
        """Start them.

        Args:
            cpus: the processor that each thread stays on; none: they move.

        Raises:
            HostWorkerError: the layers do not fit the mailbox, or it has a worker.
        """
        self.error: HostWorkerError | None = None
        self._mailbox = mailbox  # the thread keeps its memory and that of the caches
        layers = [layer.native(*layer.views()) for layer in mailbox.layers]
        self._native = attached_worker(mailbox.native, layers, threads, cpus)
        self._thread = threading.Thread(target=self._serve, name="weft-host", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            self._native.run()
        except (MemoryError, RuntimeError) as error:
            self.error = HostWorkerError(f"The host worker has ended: {error}.")

    def close(self) -> None:
        """End them after the call that they are computing; other jobs wait for the next worker."""
        self._native.stop()
        self._thread.join()

    def __enter__(self) -> HostWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
