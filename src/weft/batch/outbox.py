"""The outbox of a data folder: events that somebody has still to be told."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection
from dataclasses import dataclass, fields
from hashlib import sha256

import orjson

from weft.batch.records import BatchRecord
from weft.core.states import BatchStatus

KEPT_S = 72 * 3600  # after which nobody is told any more
FORGOTTEN_S = KEPT_S + 86400  # the same of addresses that no server has in its settings


@dataclass(frozen=True, slots=True)
class Delivery:
    """An event, and an address that has not confirmed it.

    Attributes:
        id: the same in every try.
        tries: that have begun.
        due_at: Unix time of the next.
    """

    id: str
    url: str
    body: bytes
    created_at: float
    due_at: float
    tries: int = 0


DELIVERY_COLUMNS = tuple(column.name for column in fields(Delivery))


class Outbox:
    """Deliveries in the data base of a folder. What is written outlives any kill.

    Args:
        urls: addresses that are told of every event.
    """

    def __init__(self, base: sqlite3.Connection, urls: Collection[str]) -> None:
        self._base = base
        self._urls = tuple(urls)
        self._mine = f"url IN ({', '.join('?' * len(self._urls))})"

    def add(self, record: BatchRecord, status: BatchStatus, now: int) -> None:
        """A batch ends; to be called within the transaction that ends it."""
        number = _digest(f"{record.id} {status}")
        event = {
            "id": f"evt_{number}",
            "object": "event",
            "created_at": now,
            "type": f"batch.{status}",
            "data": {"id": record.id},
        }
        for url in self._urls:
            name = f"wh_{_digest(f'{number} {url}')}"
            self._base.execute(
                f"INSERT INTO outbox ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, 0)",
                (name, url, orjson.dumps(event), now, now),
            )

    def due(self, now: float, most: int) -> list[Delivery]:
        """Deliveries to be tried now, the longest due first; at most so many to each address."""
        found = []
        for url in self._urls:
            rows = self._base.execute(
                f"SELECT {_COLUMNS} FROM outbox WHERE url = ? AND due_at <= ? "
                "ORDER BY due_at LIMIT ?",
                (url, now, most),
            )
            found += [Delivery(*row) for row in rows]
        return sorted(found, key=lambda delivery: delivery.due_at)

    def next_due(self) -> float | None:
        """When the next delivery is due; None if there is none."""
        statement = f"SELECT MIN(due_at) FROM outbox WHERE {self._mine}"
        due_at: float | None = self._base.execute(statement, self._urls).fetchone()[0]
        return due_at

    def claim(self, delivery: Delivery, due_at: float) -> bool:
        """Begin a try, and say when the next one would be due; False if somebody else was first."""
        done = self._base.execute(
            "UPDATE outbox SET due_at = ?, tries = tries + 1 WHERE id = ? AND tries = ?",
            (due_at, delivery.id, delivery.tries),
        )
        return done.rowcount > 0

    def remove(self, delivery: Delivery) -> None:
        """It has arrived, or is given up."""
        self._base.execute("DELETE FROM outbox WHERE id = ?", (delivery.id,))

    def sweep(self, now: float) -> None:
        """Remove what no server could deliver."""
        self._base.execute("DELETE FROM outbox WHERE created_at < ?", (now - FORGOTTEN_S,))


_COLUMNS = ", ".join(DELIVERY_COLUMNS)


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:32]
