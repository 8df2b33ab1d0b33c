"""Attention over the host tier's KV: what a host worker attends in, and the worker that serves it.

The worker is threads of this process or the process ``weft-host`` (``kernels.cpu``). Only decodes
are attended there: rows that are piggybacked through the layers of later steps (``piggyback``), or
rows of a sub-batch that waits for them in each layer (``overlap``).
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.exec.input_batch import InputBatch
from weft.exec.memory import Arena
from weft.exec.places import RemotePlaces
from weft.exec.store import KVStore
from weft.kernels.cpu.host import HostLayer, HostMailbox, HostWorker, SharedMemory
from weft.kernels.cpu.host_process import HostProcess
from weft.models.decoder import Decoder

ABORT_S = 1.0  # that a call which computes aborted rows may take, before its process is killed
CALL_S = 5.0  # that the results of a layer may take at first, before its process is killed
CHECK_S = 0.1  # between looks at whether there still is a worker


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

    @property
    def stopped(self) -> bool:
        """Whether the worker is a process that somebody has stopped."""
        return isinstance(self._worker, HostProcess) and self._worker.stopped

    def interrupt(self) -> None:
        """End a call that takes too long, if that can be done: kill the process; another follows.

        Threads end their call by themselves.
        """
        if isinstance(self._worker, HostProcess):
            self._worker.restart()

    def await_results(self, rows: NDArray[np.int32]) -> None:
        """Wait until all jobs of rows that were submitted are done or have failed.

        A process that computes none of them for long is killed, as it may hang; the next one has
        twice the time.

        Raises:
            HostWorkerError: there is no worker any more.
        """
        patience_s, end = CALL_S, time.monotonic() + CALL_S
        while not self.mailbox.wait_for(rows, CHECK_S):
            self.check()
            if time.monotonic() > end:
                self.interrupt()
                patience_s *= 2
                end = time.monotonic() + patience_s

    def await_aborted(self, rows: Seq[int]) -> None:
        """Wait until the worker writes to no block of aborted rows any more.

        Those blocks may be another row's now. A process that hangs is killed, one that is stopped
        at once, as steps with rows of the device wait here, too.

        Args:
            rows: that the worker was computing as they were aborted.

        Raises:
            HostWorkerError: there is no worker any more.
        """
        patience = time.monotonic() + ABORT_S
        while rows:
            states = self.mailbox.states()
            rows = [row for row in rows if states[row] == "aborting"]
            if not rows:
                return
            self.check()
            if time.monotonic() > patience or self.stopped:
                self.interrupt()
                patience += ABORT_S
            time.sleep(0.0005)

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
                decoder.spec.heads(layer),
                at.scale,
                at.group,
                at.window,
                at.softcap,
                writes=layer.kv_source is None,
                sinks=decoder.sink_numbers(number),
            )
        )
    return layers


def shared_store(store: KVStore, num_blocks: Seq[int]) -> tuple[KVStore, SharedMemory]:
    """Return a store like another one, with so many blocks of each group, and the memory it has.

    Raises:
        ConfigError: there is not so much memory.
    """
    sizes = [
        tensor.nbytes // len(tensor) * blocks
        for group, blocks in enumerate(num_blocks)
        for tensor in store.tensors(group)
    ]
    shared = SharedMemory.create("weft-host-kv", Arena.room(sizes))
    return store.like(num_blocks, Arena(shared.array(0, (len(shared),), "uint8"))), shared
