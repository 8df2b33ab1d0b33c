"""Keeps what is known of output lengths, from batch to batch, in the data base.

Request planes have a store, too, but no use for lengths: numpy is imported when there are any.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from weft.blend.lengths import LengthTable, Row

MOST_ROWS = 4 * 4096  # of all models, four full tables; those that were used last
KEPT_S = 90 * 86400


class ChangedNode(NamedTuple):
    """A node of a table that is to be saved, as it was at a moment.

    Attributes:
        number: in the table.
        ended, censored: (columns,) requests.
    """

    number: int
    hash: bytes
    parent: bytes
    ended: Row
    censored: Row


class SavedNode(NamedTuple):
    """A node of a table, as it is kept."""

    hash: bytes
    parent: bytes
    ended: bytes
    censored: bytes


def changed_nodes(table: LengthTable) -> list[ChangedNode]:
    """Nodes that have changed since the last call, with what runs there as censored.

    So if this process is killed, what it ran is not forgotten: it was no shorter than that. What
    goes on is saved with its end later.
    """
    import numpy as np

    touched, table.touched = table.touched, set()
    known = table.snapshot()
    nodes = touched.union(np.flatnonzero(known.running).tolist())
    for node in list(nodes):  # those above say where it belongs
        while (node := table.parents[node]) > 0:
            nodes.add(node)
    return [
        ChangedNode(
            node,
            _key(table.hashes[node]),
            _key(table.hashes[max(0, table.parents[node])]),
            known.ended[node],
            known.censored[node],
        )
        for node in sorted(nodes)
    ]


class KeptLengths:
    """Nodes of tables, by model, in the data base of a `BatchStore`.

    Args:
        writing: begins a transaction.
        now: Unix time.
    """

    def __init__(
        self,
        base: sqlite3.Connection,
        writing: Callable[[], AbstractContextManager[None]],
        now: Callable[[], int],
    ) -> None:
        self._base = base
        self._writing = writing
        self._now = now

    def save(self, served: str, nodes: list[ChangedNode]) -> None:
        """Write nodes of a model; forget rows unused for long, and those beyond a number."""
        now = self._now()
        rows = [
            (served, node.hash, node.parent, _packed(node.ended), _packed(node.censored), now)
            for node in nodes
        ]
        with self._writing():
            self._base.executemany("INSERT OR REPLACE INTO lengths VALUES (?, ?, ?, ?, ?, ?)", rows)
            self._base.execute("DELETE FROM lengths WHERE used_at < ?", (now - KEPT_S,))
            self._base.execute(
                "DELETE FROM lengths WHERE (served, hash) IN "
                "(SELECT served, hash FROM lengths ORDER BY used_at DESC LIMIT -1 OFFSET ?)",
                (MOST_ROWS,),
            )

    def load(self, served: str) -> LengthTable:
        """What is known of a model."""
        from weft.blend.lengths import MOST_NODES, LengthTable

        rows = self._base.execute(
            "SELECT hash, parent, ended, censored FROM lengths WHERE served = ? "
            "ORDER BY used_at DESC LIMIT ?",
            (served, MOST_NODES // 2),  # the rest is for what is new
        ).fetchall()
        nodes = {row[0]: SavedNode(*row) for row in rows}
        table, done = LengthTable(), set[bytes]()

        def restore(node: SavedNode) -> None:
            if node.hash in done:
                return
            done.add(node.hash)
            if node.parent in nodes:
                restore(nodes[node.parent])
            ended, censored = _unpacked(node.ended), _unpacked(node.censored)
            if ended is not None and censored is not None:
                parent = int.from_bytes(node.parent, "little")
                table.restore(int.from_bytes(node.hash, "little"), parent, ended, censored)

        for node in nodes.values():
            restore(node)
        return table


def _key(value: int) -> bytes:
    return value.to_bytes(8, "little")


def _packed(row: Row) -> bytes:
    return zlib.compress(row.astype("<f4").tobytes(), 1)


def _unpacked(data: bytes) -> Row | None:
    """None if it was kept by a version with other bins."""
    import numpy as np

    from weft.blend.lengths import COLUMNS

    try:
        row = np.frombuffer(zlib.decompress(data), "<f4")
    except (zlib.error, ValueError):
        return None
    good = len(row) == COLUMNS and bool(np.isfinite(row).all()) and bool((row >= 0).all())
    return row.astype(np.float32) if good else None
