"""The rows of overlapped sub-batches that the host attends for, of an executor on a device."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from weft.core.errors import HostWorkerError
from weft.core.plan import SubBatch
from weft.exec.courier import Courier, Rows, rows_of
from weft.exec.device import Device
from weft.exec.exchange import HostExchange
from weft.exec.host_attention import HostAttention
from weft.exec.input_batch import InputBatch
from weft.exec.piggyback import attention_failed


class OverlappedRows:
    """Begins and ends what the courier carries for a step. For one thread, beside the courier's.

    Attributes:
        courier: carries between the device and the host worker.
    """

    def __init__(
        self, table: InputBatch, host: HostAttention, exchange: HostExchange, device: Device
    ) -> None:
        self.host = host
        self.courier = Courier(host, exchange, device, awaited=True)
        self._table, self._rule = table, exchange.rule
        self._serial = 0
        self._rows: list[Rows] = [rows_of(())]  # of each sub-batch

    def next_step(self) -> int:
        """The number of the step that is packed now.

        Raises:
            HostWorkerError: there is no worker any more.
        """
        self.courier.check()
        self._serial += 1
        return self._serial

    def begin(self, hosted: Seq[SubBatch]) -> None:
        """Expect jobs of the step: of each sub-batch, of the rows that the host attends for."""
        self._rows = [rows_of(some.rows) for some in hosted]
        rows = np.concatenate(self._rows)
        if len(rows):
            contexts = 1 + np.concatenate([np.array(some.starts, np.int64) for some in hosted])
            self.courier.begin(rows, contexts, self._table.tables_of(rows), self._serial)

    def wait(self, number: int, layer: int) -> None:
        """Wait until the results of a layer are on the device, for the rows of a sub-batch.

        Raises:
            HostWorkerError: there is no worker any more.
        """
        self.courier.wait(self._rows[number], self._rule.first(self._serial) + layer)

    def end(self) -> dict[int, HostWorkerError]:
        """The step has been computed; return why its tokens mean nothing, by row."""
        lost = self.courier.release(np.concatenate(self._rows))
        return {row: attention_failed(why) for row, why in lost.items()}

    def give_up(self) -> None:
        """Leave nothing of a step that was not computed with the host, so that its rows can be run
        again.

        Raises:
            HostWorkerError: there is no worker any more.
        """
        self.host.await_aborted(self.courier.abort(np.concatenate(self._rows).tolist()))

    def close(self) -> None:
        """End courier and worker. May be called twice."""
        self.courier.close()
        self.host.close()
