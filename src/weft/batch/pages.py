"""Pages of lists of files and of batches."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Literal

from weft.batch.records import BATCH_COLUMNS, FILE_COLUMNS, BatchRecord, FileRecord
from weft.core.errors import ParameterError


@dataclass(frozen=True, slots=True)
class Page:
    """Some records of a list, and whether more follow."""

    records: Seq[FileRecord | BatchRecord]
    has_more: bool

    def to_object(self) -> dict[str, Any]:
        """OpenAI's list object."""
        data = [record.to_object() for record in self.records]
        return {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else "",
            "last_id": data[-1]["id"] if data else "",
            "has_more": self.has_more,
        }


_KINDS: dict[str, tuple[type[FileRecord] | type[BatchRecord], str]] = {
    "files": (FileRecord, ", ".join(FILE_COLUMNS)),
    "batches": (BatchRecord, ", ".join(BATCH_COLUMNS)),
}


def read_page(
    base: sqlite3.Connection,
    table: Literal["files", "batches"],
    where: str,
    values: Seq[Any],
    cursor: str | None,
    limit: int,
    newest_first: bool = True,
) -> Page:
    """Records of a table that follow one another.

    Args:
        values: of ``where``; the first is the owner.
        cursor: the id of the record before the first one of the page, in its order.

    Raises:
        ParameterError: there is no such record.
    """
    kind, columns = _KINDS[table]
    sign, order = ("<", "DESC") if newest_first else (">", "ASC")
    if cursor is not None:
        statement = f"SELECT place FROM {table} WHERE id = ? AND owner = ?"
        found = base.execute(statement, (cursor, values[0])).fetchone()
        if found is None:
            raise ParameterError(f"There is no '{cursor[:100]}' to go on after.", param="after")
        where += f" AND place {sign} ?"
        values = [*values, found[0]]
    rows = base.execute(
        f"SELECT {columns} FROM {table} WHERE {where} ORDER BY place {order} LIMIT ?",
        (*values, limit + 1),
    ).fetchall()
    return Page([kind(*row) for row in rows[:limit]], len(rows) > limit)
