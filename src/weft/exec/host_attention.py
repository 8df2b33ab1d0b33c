"""Attention over the host tier's KV: what a host worker attends in, and the worker that serves it.

The worker is threads of this process or the process ``weft-host`` (``kernels.cpu``). Only decodes
are attended there: rows that are piggybacked through the layers of later steps (``piggyback``).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from weft.exec.input_batch import InputBatch
from weft.exec.places import RemotePlaces
from weft.exec.store import KVStore
from weft.kernels.arrays import Array
from weft.kernels.cpu.host import HostLayer, HostMailbox, HostWorker, SharedMemory
from weft.kernels.cpu.host_process import HostProcess
from weft.models.decoder import Decoder

ALIGNMENT = 4096  # bytes between arrays in shared memory


@dataclass(frozen=True)
class WorkerThreads:
    """The threads of a host worker.

    Attributes:
        cpus: the processor that each stays on; none if they are not pinned.
    """

    count: int = 1
    cpus: tuple[int, ...] = ()


class HostAttention:
    """A mailbox with a slot for each executor row, and the worker that attends.

    Attributes:
        mailbox: for the thread that computes steps; its counters are for any thread.
        places: remote hosts that attend as well, for rows whose KV is there; None without any.
    """

    def __init__(
        self,
        decoder: Decoder,
        host: KVStore,
        table: InputBatch,
        threads: WorkerThreads,
        memory: SharedMemory | None = None,
    ) -> None:
        """Start the worker.

        Args:
            memory: holds ``host`` where the worker is a process of its own; None: threads of this
                process serve.

        Raises:
            HostWorkerError: the worker cannot be started.
        """
        self.places: RemotePlaces | None = None
        self.mailbox = HostMailbox.create(
            _layers(decoder, host),
            slots=len(table.sequence_ids),
            table_width=max(blocks.shape[1] for blocks in table.tables),
            dtype=decoder.dtype,
        )
        self._worker: HostWorker | HostProcess
        if memory is None:
            self._worker = HostWorker(self.mailbox, threads=threads.count, cpus=threads.cpus)
        else:
            self._worker = HostProcess(
                self.mailbox, memory, threads=threads.count, cpus=threads.cpus
            )

    @property
    def restarts(self) -> int:
        """Worker processes that have followed a dead one."""
        return self._worker.restarts if isinstance(self._worker, HostProcess) else 0

    def check(self) -> None:
        """Raise HostWorkerError if nobody serves the mailbox any more."""
        if self._worker.error is not None:
            raise self._worker.error

    def interrupt(self) -> None:
        """End a call that takes too long, if that can be done: kill the process; another follows.

        Threads end their call by themselves.
        """
        if isinstance(self._worker, HostProcess):
            self._worker.restart()

    def close(self) -> None:
        """End the worker and the links. May be called twice."""
        if self.places is not None:
            self.places.close()
        self._worker.close()


def _layers(decoder: Decoder, host: KVStore) -> list[HostLayer]:
    """Attention of each layer, over the host's KV."""
    layers = []
    for number, layer in enumerate(decoder.spec.layers):
        at = decoder.attention_params(number)
        layers.append(
            HostLayer(
                host.keys[at.group][at.index],
                host.values[at.group][at.index],
                decoder.spec.num_heads,
                at.scale,
                at.group,
                at.window,
                at.softcap,
                writes=layer.kv_source is None,
            )
        )
    return layers


def shared_store(store: KVStore, num_blocks: Seq[int]) -> tuple[KVStore, SharedMemory]:
    """Return a store like another one, with so many blocks of each group, and the memory it has.

    Raises:
        ConfigError: there is not so much memory.
    """
    sizes = [
        _padded(tensor.nbytes // len(tensor) * blocks)
        for group, blocks in enumerate(num_blocks)
        for tensor in store.tensors(group)
    ]
    shared, used = SharedMemory.create("weft-host-kv", sum(sizes)), 0

    def memory(shape: Seq[int], dtype: str) -> Array:
        nonlocal used
        array = shared.array(used, shape, dtype)
        used += _padded(array.nbytes)
        return array

    return store.like(num_blocks, memory), shared


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
