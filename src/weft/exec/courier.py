"""The courier between the lanes of a device and the host worker: a thread that carries both ways.

It looks for new tickets in memory of the host, which steps write as they compute, and hands q, k
and v behind them to the worker's mailbox. Results of the worker go to the device beside its steps,
and their tickets behind them, so that a step reads nothing but memory of the device.

Steps with lanes wait for nobody. Overlapped sub-batches do, so that all that they ask for must be
answered: rows for which the worker fails get zeros, and whoever waits is told if there is no worker
any more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np
import torch
from numpy.typing import NDArray

from weft.core.errors import HostWorkerError
from weft.exec.device import Device
from weft.exec.exchange import HostExchange
from weft.exec.host_attention import HostAttention
from weft.kernels.arrays import Array, to_numpy
from weft.kernels.cpu.host import HostLayer
from weft.kernels.lanes import AT_ONCE

POLL_S = 0.0001  # a layer of a large model takes as long
NO_TOKEN = 2**62  # larger than any ticket
ANSWER_S = 60.0  # that a job may take which a step waits for
CHECK_S = 0.1  # between looks at whether there still is a worker

Rows = NDArray[np.int32]


class Courier:
    """See the module docstring; the one client of the mailbox, for any thread.

    Attributes:
        news: set when results have gone to the device, or the thread has failed.
    """

    def __init__(
        self, host: HostAttention, lanes: HostExchange, device: Device, *, awaited: bool = False
    ) -> None:
        """Start the thread.

        Args:
            awaited: whether steps wait for results.
        """
        self._host, self._mailbox = host, host.mailbox
        self._lanes, self._device = lanes, device
        self._tickets = lanes.tickets.numpy()
        self._outbox = to_numpy(lanes.outbox.memory)
        rows = len(self._outbox)
        self._since = np.full(rows, NO_TOKEN, np.int64)  # first ticket of each row's token
        self._seen = np.zeros(rows, np.int64)  # the latest ticket of each row
        self._delivered = np.zeros(rows, np.int64)  # the latest one with a result on the device
        self._staging = _Staging(lanes, device, min(rows, AT_ONCE))
        self._awaited = awaited
        self._lost: dict[int, str] = {}  # rows that get zeros, and why
        self._asked_s = np.zeros(rows)  # when a step asked for the result of each row
        if awaited:
            self._staging.warm_up()
        self.news = threading.Event()
        self._error: BaseException | None = None
        self._lock, self._busy = threading.RLock(), threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="weft-courier", daemon=True)
        self._thread.start()

    # -- rows -------------------------------------------------------------------------------------

    def begin(self, rows: Rows, contexts: Array, tables: Seq[Array], serial: int) -> None:
        """Expect jobs of the rows' next tokens from a step on; see ``HostMailbox.begin``."""
        with self._lock:
            self._mailbox.begin(rows, contexts, tables)
            self._since[rows] = self._lanes.rule.first(serial)
        self._busy.set()

    def release(self, rows: Rows | Seq[int]) -> dict[int, str]:
        """The tokens of rows whose last result was taken, or whose job has failed, are over.

        Returns:
            why rows got zeros, where steps wait for results.
        """
        with self._lock:
            lost = {row: self._lost.pop(row) for row in map(int, rows) if row in self._lost}
            self._mailbox.release([row for row in rows if row not in lost])
            self._since[rows] = NO_TOKEN
        return lost

    def abort(self, rows: Seq[int]) -> list[int]:
        """Forget rows; return those that the worker computes; see ``HostMailbox.abort``."""
        with self._lock:
            self._since[list(rows)] = NO_TOKEN
            for row in rows:
                self._lost.pop(row, None)
            return self._mailbox.abort(rows)

    def check(self) -> None:
        """Raise HostWorkerError if nobody attends or carries any more."""
        self._host.check()
        if isinstance(self._error, HostWorkerError):
            raise self._error
        if self._error is not None:
            raise HostWorkerError(f"The courier has ended: {self._error}.") from self._error

    def wait(self, rows: Rows, ticket: int) -> None:
        """Wait until results of rows with a ticket are on the device.

        Raises:
            HostWorkerError: there is no worker any more.
        """
        while True:
            self.news.clear()
            if (self._delivered[rows] >= ticket).all():
                break
            self.news.wait(CHECK_S)
            self.check()
        self._staging.wait()

    def failed(self) -> dict[int, str]:
        """Rows whose job has failed, and why; ``release`` ends their tokens.

        Raises:
            HostWorkerError: there is no worker any more.
        """
        self.check()
        with self._lock:
            return self._mailbox.failed()

    def layers(self, rows: Rows) -> NDArray[np.int64]:
        """The layers in which rows wait, as steps have told; those that no step has told, in 0."""
        tickets = np.abs(self._tickets[rows])
        told = tickets >= self._since[rows]
        return np.where(told, self._lanes.rule.layer_of(tickets), 0)

    def has_results(self, rows: Rows) -> bool:
        """Whether results of some of these rows are on the device, and no step took them yet.

        While steps are in flight it may say so of some that are taken just now.
        """
        mine = self._delivered[rows]
        return bool(((mine == self._tickets[rows]) & (mine >= self._since[rows])).any())

    # -- both ways --------------------------------------------------------------------------------

    def pump(self) -> bool:
        """Carry what there is; whether there was anything."""
        with self._lock:
            submitted = self._submit()
            layers = np.flatnonzero(self._mailbox.done_counts()).tolist()
            for layer in layers:
                self._deliver(layer)
            answered = self._awaited and self._answer_lost()
        if layers or answered:
            self.news.set()
        return submitted or bool(layers) or answered

    def _submit(self) -> bool:
        """Hand new jobs to the worker, those of a layer together and the oldest first."""
        tickets = self._tickets[:-1].copy()
        (rows,) = np.nonzero((tickets > self._seen) & (tickets >= self._since))
        if not len(rows):
            return False
        rows = rows[np.argsort(tickets[rows])]
        self._seen[rows] = tickets[rows]
        if self._awaited:
            self._asked_s[rows] = time.monotonic()
            rows = rows[[row not in self._lost for row in rows.tolist()]]
        layers = self._lanes.rule.layer_of(tickets[rows])
        for layer in np.unique(layers).tolist():
            some = rows[layers == layer]
            self._mailbox.submit(some, layer, *self._parts(some, self._mailbox.layers[layer]))
        return True

    def _parts(self, rows: Array, layer: HostLayer) -> tuple[Array, Array | None, Array | None]:
        """Return q, k and v of rows, in memory of their own."""

        def part(start: int, heads: int) -> Array:
            stop = start + heads * layer.head_dim
            return self._outbox[rows, start:stop].reshape(len(rows), heads, layer.head_dim)

        box = self._lanes.outbox
        q = part(0, layer.heads)
        if not layer.writes:
            return q, None, None
        return q, part(box.keys, layer.kv_heads), part(box.values, layer.kv_heads)

    def _deliver(self, layer: int) -> None:
        """Send results of a layer to the device."""
        rows = self._mailbox.done(layer, self._staging.most)
        spec = self._mailbox.layers[layer]
        results = self._staging.results(len(rows), spec.heads, spec.head_dim)
        self._mailbox.take(rows, layer, out=results)
        self._staging.send(rows, self._seen[rows], spec.heads * spec.head_dim)
        self._delivered[rows] = self._seen[rows]

    def _answer_lost(self) -> bool:
        """Send zeros for rows whose job has failed, in this layer and all later ones.

        Raises:
            HostWorkerError: there is no worker any more, or a job takes too long.
        """
        failed = self._mailbox.failed()
        if failed:
            self._mailbox.release(list(failed))
            self._lost |= failed
        (asked,) = np.nonzero((self._seen > self._delivered) & (self._seen >= self._since))
        rows = asked[[row in self._lost for row in asked.tolist()]][: self._staging.most]
        if len(rows):
            width = self._lanes.state.results.shape[1]
            self._staging.results(len(rows), 1, width)[:] = 0
            self._staging.send(rows, self._seen[rows], width)
            self._delivered[rows] = self._seen[rows]
        self._host.check()
        if len(asked) and time.monotonic() - self._asked_s[asked].min() > ANSWER_S:
            raise HostWorkerError(f"The host has not attended within {ANSWER_S:.0f} s.")
        return bool(len(rows))

    # -- the thread -------------------------------------------------------------------------------

    def _serve(self) -> None:
        pause = threading.Event()
        try:
            while not self._closing:
                if (self._since == NO_TOKEN).all():
                    self._busy.wait()
                    self._busy.clear()
                elif self.pump():
                    continue
                elif self._awaited:
                    self._mailbox.wait(POLL_S)  # reads nothing that other threads write
                else:
                    pause.wait(POLL_S)
        except BaseException as error:
            self._error = error
            if self._awaited:
                self._staging.end_waits()
            self.news.set()

    def close(self) -> None:
        """End the thread. May be called twice."""
        self._closing = True
        self._busy.set()
        self._thread.join()


class _Staging:
    """Results on their way to the device: first the numbers, then where they belong and tickets."""

    def __init__(self, lanes: HostExchange, device: Device, most: int) -> None:
        self.most = most
        self._device, self._state = device, lanes.state
        width, where = lanes.state.results.shape[1], device.where
        kind = lanes.state.results.dtype
        self._host = device.exchange_memory(most * width, kind)
        self._numbers = to_numpy(self._host)
        self._names = device.exchange_memory(2 * most, torch.int64)
        self._results = torch.empty(most * width, dtype=kind, device=where)
        self._places = torch.empty(2 * most, dtype=torch.int64, device=where)
        self._arrived = device.delivered()

    def wait(self) -> None:
        """Wait until all that was sent is on the device."""
        self._arrived.wait()

    def warm_up(self) -> None:
        """Load what ``send`` needs: once something waits on the device, it might be too late."""
        none = np.array([len(self._state.jobs) - 1])
        width = self._state.results.shape[1]
        self.results(1, 1, width)[:] = 0
        self.send(none, np.zeros(1, np.int64), width)
        self._arrived.wait()

    def end_waits(self) -> None:
        """Have everything that waits on the device give up."""
        none = np.array([len(self._state.jobs) - 1])
        self.results(1, 1, 1)
        self.send(none, np.array([NO_TOKEN]), 1)

    def results(self, count: int, heads: int, dim: int) -> Array:
        """Return where to write the results [count, heads, dim], once the last ones have left."""
        self._arrived.wait()
        return self._numbers[: count * heads * dim].reshape(count, heads, dim)

    def send(self, rows: Array, tickets: Array, width: int) -> None:
        """Order the copy of the results of rows, and of their tickets behind them."""
        count, most, device = len(rows), self.most, self._device
        names = self._names.numpy()
        names[:count], names[most : most + count] = rows, tickets
        with device.beside(), torch.inference_mode():
            device.deliver(self._host[: count * width], self._results[: count * width])
            device.deliver(self._names, self._places)
            places = self._places[:count]
            found = self._results[: count * width].view(count, width)
            self._state.results[:, :width].index_copy_(0, places, found)
            self._state.arrived.index_copy_(0, places, self._places[most : most + count])
        self._arrived = device.delivered()


def rows_of(numbers: Iterable[int]) -> Rows:
    """Return executor rows as the mailbox takes them."""
    return np.fromiter(numbers, np.int32)
