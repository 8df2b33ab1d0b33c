"""A courier: takes the jobs of one place out of a mailbox, and brings their results back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import InvariantError
from weft.kernels.cpu import _native
from weft.kernels.cpu.host import HostMailbox


@dataclass(frozen=True, slots=True)
class ClaimedJobs:
    """Claimed jobs of one layer, as bytes and numbers that can travel.

    Attributes:
        slots, orders: [n]; an order is of one submission, and never comes again.
        contexts: [n], where the tokens begin with these jobs; else None, as they were said before.
        tables: for each group [n, any] int32, with the contexts.
        q, k, v: [n, bytes]; of no bytes where the layer reads another one's k and v.
    """

    layer: int
    slots: NDArray[np.int32]
    orders: NDArray[np.uint64]
    contexts: NDArray[np.int32] | None
    tables: tuple[NDArray[np.int32], ...]
    q: NDArray[np.uint8]
    k: NDArray[np.uint8]
    v: NDArray[np.uint8]


class MailCourier:
    """See the module docstring. One call at a time, but ``wait`` and ``wake`` beside them."""

    def __init__(self, mailbox: HostMailbox, place: int) -> None:
        """Serve a place of a mailbox; it has no other courier."""
        try:
            self._native = _native.Courier(mailbox.native, place)
        except (TypeError, ValueError) as error:
            raise InvariantError(f"There can be no such courier: {error}.") from None
        self._mailbox = mailbox
        layers, slots, item = mailbox.layers, mailbox.slots, mailbox.dtype.itemsize
        self._q_bytes = [layer.heads * layer.head_dim * item for layer in layers]
        self._kv_bytes = [layer.kv_heads * layer.head_dim * item * layer.writes for layer in layers]
        self._groups = 1 + max(layer.group for layer in layers)
        records, tables, qkv, k, v, qkv_bytes, out, out_bytes = mailbox.native.layout()
        memory = mailbox.memory
        self._contexts = memory.array(records, (slots, 8), "int32")[:, 4]  # see JobRecord
        shape = (self._groups, slots, mailbox.table_width + 1)
        self._tables: NDArray[np.int32] = memory.array(tables, shape, "int32")
        self._qkv: NDArray[np.uint8] = memory.array(qkv, (slots, qkv_bytes), "uint8")
        self._out: NDArray[np.uint8] = memory.array(out, (slots, out_bytes), "uint8")
        self._k_at, self._v_at = k, v
        self._slots = np.empty(slots, np.int32)
        self._orders = np.empty(slots, np.uint64)
        self._seen = 0

    @property
    def row_bytes(self) -> int:
        """The most that one job takes."""
        tables = 4 * self._groups * (self._mailbox.table_width + 1)
        return 16 + tables + max(self._q_bytes) + 2 * max(self._kv_bytes)

    def claim(self, most: int) -> ClaimedJobs | None:
        """Claim jobs of the layer in which one waits longest; None if none waits.

        Args:
            most: jobs at once, 1 at least.
        """
        count, layer = self._native.claim(self._slots[:most], self._orders[:most])
        if not count:
            return None
        slots, orders = self._slots[:count].copy(), self._orders[:count].copy()
        contexts: NDArray[np.int32] | None = None
        tables: tuple[NDArray[np.int32], ...] = ()
        if layer == 0:
            contexts = self._contexts[slots]
            tables = tuple(self._used(table[slots]) for table in self._tables)
        rows, kv = self._qkv[slots], self._kv_bytes[layer]
        return ClaimedJobs(
            layer, slots, orders, contexts, tables,
            rows[:, : self._q_bytes[layer]],
            rows[:, self._k_at : self._k_at + kv],
            rows[:, self._v_at : self._v_at + kv],
        )  # fmt: skip

    @staticmethod
    def _used(rows: NDArray[np.int32]) -> NDArray[np.int32]:
        """Tables [n, any] of rows that have the number of their blocks before them."""
        width = int(rows[:, 0].max())
        return rows[:, 1 : 1 + width]

    def finish(
        self,
        layer: int,
        slots: NDArray[np.int32],
        orders: NDArray[np.uint64],
        out: NDArray[np.uint8],
    ) -> None:
        """Show results [n, bytes]; those whose job was aborted meanwhile are ignored.

        Raises:
            InvariantError: there is no such layer or slot, or the results have another size.
        """
        good = 0 <= layer < len(self._q_bytes) and out.shape[1] == self._q_bytes[layer]
        if not good or (len(slots) and not 0 <= slots.min() <= slots.max() < len(self._slots)):
            raise InvariantError("results do not fit the layer that they are for")
        pairs = zip(slots.tolist(), orders.tolist(), strict=True)
        held = np.array([self._native.holds(s, order, layer) for s, order in pairs], bool)
        mine = slots[held]
        self._out[mine, : out.shape[1]] = out[held]
        self._native.finish(np.ascontiguousarray(mine), layer)

    def forget(self, slots: NDArray[np.int32]) -> None:
        """Empty those of these slots whose job is claimed and aborted."""
        self._native.forget(slots)

    def give_up(self) -> None:
        """Put back what is claimed and has no result."""
        self._native.give_up()

    def wait(self, timeout_s: float) -> None:
        """Wait until there may be jobs, for ``wake``, or for the time. For one thread."""
        self._seen = self._native.wait(self._seen, int(timeout_s * 1e9))

    def wake(self) -> None:
        """End a wait, from any thread."""
        self._native.wake()

    @property
    def jobs(self) -> int:
        """Jobs that were answered."""
        return self._native.jobs

    @property
    def round_trip_ns(self) -> int:
        """Sum over them of the time between submission and result."""
        return self._native.round_trip_ns
