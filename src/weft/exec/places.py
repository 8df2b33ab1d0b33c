"""Rows whose KV lies with remote places, and the links to these (OmniServe section 3.2).

A place that cannot be reached costs the rows that it has: they are lost, and computed again where
the scheduler wants them. Nothing here waits for a place.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from weft.attend.frames import CHUNK_BYTES, FRAME_BYTES, KVBlocks
from weft.attend.geometry import Geometry, GroupGeometry, LayerGeometry
from weft.attend.link import PlaceAccess, PlaceLink
from weft.core.errors import ConfigError
from weft.core.plan import KVMove, PlaceSession, PlaceStatus, StepPlan, Tier
from weft.exec.input_batch import InputBatch
from weft.exec.store import KVStore
from weft.kernels.arrays import Array, dtype_name
from weft.kernels.cpu import attention
from weft.kernels.cpu.host import HostMailbox
from weft.models.decoder import Decoder


class RemotePlaces:
    """The links of an executor, and where the KV of its rows lies. For one thread.

    Attributes:
        links: place ``i + 1`` is ``links[i]``; their counters are for any thread.
        of_rows: [R] the place of each row; 0 is the own host, or none.
    """

    def __init__(self, links: Seq[PlaceLink], store: KVStore, table: InputBatch) -> None:
        self.links = tuple(links)
        self.of_rows = np.zeros(len(table.sequence_ids), np.int32)
        self._sessions: dict[int, PlaceSession] = {}  # of rows with remote KV
        self._lost: set[int] = set()  # those of them whose KV is gone
        self._lost_ids: list[int] = []  # of their sequences, to be reported
        self._table = table
        self._tensors = [store.tensors(group) for group in range(len(store.keys))]
        self._status = tuple(link.status() for link in self.links)
        self._active = [0] * len(self.links)

    def start(self) -> None:
        """Begin to connect."""
        for link in self.links:
            link.start()

    # -- between steps -----------------------------------------------------------------------------

    def refresh(self, dropped: Seq[int]) -> list[int]:
        """See which places are there; return the rows that have been lost since.

        Args:
            dropped: rows that the scheduler has given up already: nothing of them is lost.
        """
        status = tuple(link.status() for link in self.links)
        if status == self._status:
            return []
        self._status = status
        gone = [
            row for row, where in self._sessions.items()
            if row not in self._lost and row not in dropped and not self._is_there(where)
        ]  # fmt: skip
        for row in gone:
            self._lose(row)
        return gone

    def resume(self) -> None:
        """All tokens of lost rows are dropped: sessions that are new may have jobs."""
        for index, (link, status) in enumerate(zip(self.links, self._status, strict=True)):
            if status.blocks and self._active[index] != status.session:
                self._active[index] = status.session
                link.activate(status.session)

    def free(self, rows: Iterable[int]) -> list[int]:
        """Drop what places compute for rows; return the others, which are not with a place."""
        own: list[int] = []
        theirs: dict[int, list[int]] = {}
        for row in rows:
            place = int(self.of_rows[row])
            (theirs.setdefault(place, []) if place else own).append(row)
        for place, slots in theirs.items():
            self.links[place - 1].free(np.array(slots, np.int32))
        return own

    def leave(self, rows: Iterable[int]) -> None:
        """Rows are dropped; nothing of them is at a place any more."""
        for row in rows:
            self.of_rows[row] = 0
            self._sessions.pop(row, None)
            self._lost.discard(row)

    def present(self, rows: Seq[int]) -> list[int]:
        """Those of these rows whose KV is not lost."""
        return [row for row in rows if row not in self._lost]

    def take_lost(self) -> tuple[int, ...]:
        """The sequences that have been lost since the last call."""
        lost, self._lost_ids = tuple(self._lost_ids), []
        return lost

    @property
    def status(self) -> tuple[PlaceStatus, ...]:
        """What each place offers, as ``refresh`` has found it."""
        return self._status

    # -- moving ------------------------------------------------------------------------------------

    def before(self, plan: StepPlan) -> None:
        """Send the KV that a plan moves to places, and zeros."""
        for where, group, block in plan.zero_places:
            if self._is_there(where):
                self._link(where).write(where.number, self._zeros(group, block))
        for move in plan.moves:
            if move.to is Tier.HOST and move.host.place:
                self._send(move)

    def _send(self, move: KVMove) -> None:
        row, where = move.row, move.host
        self.of_rows[row] = where.place
        self._sessions[row] = where
        if not self._is_there(where) or not self._link(where).write(
            where.number, self._contents(move)
        ):
            self._lose(row)

    def _contents(self, move: KVMove) -> Iterator[KVBlocks]:
        """Copies of what a move takes to a place."""
        for group, (source, target) in enumerate(zip(move.source, move.target, strict=True)):
            pairs = [(a, b) for a, b in zip(source, target, strict=True) if a >= 0]
            if not pairs:
                continue
            origin, to = np.array(pairs, np.int32).T
            for number, tensor in enumerate(self._tensors[group]):
                at_once = max(1, CHUNK_BYTES // (tensor.nbytes // len(tensor)))
                for first in range(0, len(pairs), at_once):
                    some = slice(first, first + at_once)
                    yield KVBlocks(group, number, to[some], _rows(tensor, origin[some]))

    def _zeros(self, group: int, block: int) -> Iterator[KVBlocks]:
        blocks = np.array([block], np.int32)
        for number, tensor in enumerate(self._tensors[group]):
            content = np.zeros((1, tensor.nbytes // len(tensor)), np.uint8)
            yield KVBlocks(group, number, blocks, content)

    def _is_there(self, where: PlaceSession) -> bool:
        status = self._status[where.place - 1]
        return bool(status.blocks) and status.session == where.number

    def _link(self, where: PlaceSession) -> PlaceLink:
        return self.links[where.place - 1]

    def _lose(self, row: int) -> None:
        self._lost.add(row)
        self._lost_ids.append(self._table.sequence_ids[row])

    def close(self) -> None:
        """End the links. May be called twice."""
        for link in self.links:
            link.close()


def _rows(tensor: Array, blocks: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Copy blocks of a tensor as bytes [n, any]."""
    return np.ascontiguousarray(tensor[blocks]).view(np.uint8).reshape(len(blocks), -1)


def link_places(
    accesses: Seq[PlaceAccess],
    decoder: Decoder,
    store: KVStore,
    table: InputBatch,
    mailbox: HostMailbox,
) -> RemotePlaces:
    """Return the links to places for rows of a store of the device; ``start`` connects them.

    Raises:
        ConfigError: an address is malformed, or a row of the model does not fit a frame.
    """
    geometry = geometry_of(decoder, store, table, accesses[0].timeout_s)
    links = [
        PlaceLink(access, number, geometry, mailbox) for number, access in enumerate(accesses, 1)
    ]
    return RemotePlaces(links, store, table)


def geometry_of(decoder: Decoder, store: KVStore, table: InputBatch, timeout_s: float) -> Geometry:
    """What a place must know of a model and its KV.

    Raises:
        ConfigError: a row or a block does not fit a frame.
    """
    layers = []
    for number, layer in enumerate(decoder.spec.layers):
        at = decoder.attention_params(number)
        heads, writes = decoder.spec.heads(layer), layer.kv_source is None
        layers.append(
            LayerGeometry(
                at.group,
                at.index,
                heads,
                at.scale,
                at.window,
                at.softcap,
                writes,
                decoder.sink_numbers(number),
            )
        )
    groups = []
    for group, (keys, spec) in enumerate(zip(store.keys, decoder.spec.kv_groups, strict=True)):
        count, size = len(keys[0]), keys[0].nbytes // len(keys[0])
        if size > FRAME_BYTES // 2:
            raise ConfigError(
                f"A KV block of group {group} has {size} bytes, too many for a remote place; set "
                "block_size to less.",
                param="block_size",
            )
        groups.append(GroupGeometry(len(keys), spec.num_kv_heads, spec.head_dim, count, size))
    kept = dtype_name(store.keys[0][0].dtype)
    return Geometry(
        secrets.token_hex(16), attention.isa(), decoder.dtype, kept, store.block_size,
        len(table.sequence_ids), max(blocks.shape[1] for blocks in table.tables), timeout_s,
        tuple(groups), tuple(layers),
    )  # fmt: skip
