"""Tokens by day, API key and service class, in SQLite: one file that all request planes share."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import NamedTuple

from weft.core.errors import ConfigError, WeftError
from weft.server.counts import Use
from weft.server.rareline import RareLine
from weft.server.wal import use_wal

BUSY_MS = 5000  # to wait for another process that writes
VERSION = 1
APPLICATION = 0x77657574  # "weut": files of something else are not written

_TABLE = """CREATE TABLE usage (
    day TEXT NOT NULL,
    key TEXT NOT NULL,
    class TEXT NOT NULL,
    requests INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL,
    PRIMARY KEY (day, key, class)
) WITHOUT ROWID"""

Row = tuple[str, str, str, int, int, int]


class UsageStoreError(WeftError):
    """The file of usage cannot be read."""

    http_status = 503
    code = "store_unavailable"


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """Which rows are wanted; None for all.

    Attributes:
        first, last: days, both included.
        after: the row after which the page begins: (day, key, class).
        limit: rows of the page.
    """

    first: date | None = None
    last: date | None = None
    key: str | None = None
    service_class: str | None = None
    after: tuple[str, str, str] | None = None
    limit: int = 1000


class UsagePage(NamedTuple):
    """Rows by day, key and class, and whether more follow."""

    rows: list[Row]
    more: bool


class UsageStore:
    """Adds up what keys use; work on the file is done on a thread of its own.

    Args:
        path: of the SQLite file, made if need be; None keeps all in memory.
        keep_days: after which days are forgotten.

    Raises:
        ConfigError: the file cannot be opened, or is of something else.
    """

    def __init__(self, path: str | None, keep_days: int) -> None:
        self._keep_days = keep_days
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weft-usage")
        self._base = self._thread.submit(_open, path).result()
        self._tidied = ""
        self._kept: dict[tuple[str, str], Use] = {}
        self._asked: dict[tuple[str, str], Use] = {}
        self._unwritten: dict[tuple[str, str], Use] = {}
        self._writing: Future[None] | None = None
        self._unkept = RareLine("The usage of keys could not be written (%d; it is kept): %s")

    def start_from(self, uses: Mapping[tuple[str, str], Use]) -> None:
        """Take these totals, by key and class, for written: a predecessor has done so."""
        self._kept = dict(uses)

    def keep(self, uses: Mapping[tuple[str, str], Use]) -> None:
        """Write these totals, by key and class: what has come to them since they were last written.

        Returns at once. What cannot be written, as the last call is not done yet or has failed, is
        written at a later call.
        """
        self._unwritten |= uses
        if self._writing is not None and not self._writing.done():
            return
        self._settle()
        if self._unwritten:
            self._asked, self._unwritten = self._unwritten, {}
            rows = [(*pair, _since(self._kept.get(pair), use)) for pair, use in self._asked.items()]
            self._writing = self._thread.submit(self._write, rows)

    def _settle(self) -> None:
        """Take note of how the last writing has gone, once it is over."""
        if self._writing is None:
            return
        failure, self._writing = self._writing.exception(), None
        if failure is None:
            self._kept |= self._asked
        else:
            self._unwritten = self._asked | self._unwritten
            self._unkept.tell(failure)

    def _write(self, rows: list[tuple[str, str, Use]]) -> None:
        day = datetime.now(UTC).date()
        with self._base:
            self._base.execute("BEGIN IMMEDIATE")
            self._base.executemany(
                "INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
                "requests = requests + excluded.requests, "
                "prompt_tokens = prompt_tokens + excluded.prompt_tokens, "
                "completion_tokens = completion_tokens + excluded.completion_tokens",
                [(day.isoformat(), key, name, *use) for key, name, use in rows],
            )
            if self._tidied != day.isoformat():
                oldest = day - timedelta(days=self._keep_days)
                self._base.execute("DELETE FROM usage WHERE day < ?", (oldest.isoformat(),))
        self._tidied = day.isoformat()

    async def read(self, query: UsageQuery) -> UsagePage:
        """The rows that are wanted, as all request planes have written them.

        Raises:
            UsageStoreError: the file cannot be read.
        """
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, self._read, query)
        except sqlite3.Error as error:
            raise UsageStoreError(f"The usage of keys cannot be read: {error}.") from error

    def _read(self, query: UsageQuery) -> UsagePage:
        bounds: list[tuple[str, object]] = [
            ("day >= ?", query.first and query.first.isoformat()),
            ("day <= ?", query.last and query.last.isoformat()),
            ("key = ?", query.key),
            ("class = ?", query.service_class),
        ]
        chosen = [(text, value) for text, value in bounds if value is not None]
        values = [value for _, value in chosen]
        texts = [text for text, _ in chosen]
        if query.after is not None:
            texts.append("(day, key, class) > (?, ?, ?)")
            values += query.after
        where = f"WHERE {' AND '.join(texts)} " if texts else ""
        rows = self._base.execute(
            f"SELECT * FROM usage {where}ORDER BY day, key, class LIMIT ?",
            (*values, query.limit + 1),
        ).fetchall()
        return UsagePage(rows[: query.limit], len(rows) > query.limit)

    def close(self, uses: Mapping[tuple[str, str], Use]) -> None:
        """Write what is left, and close the file."""
        for totals in (uses, {}):
            if self._writing is not None:
                self._writing.exception()  # waits for it
            self.keep(totals)
        self._thread.submit(self._base.close)
        self._thread.shutdown()


def _since(before: Use | None, now: Use) -> Use:
    """What has come to a total."""
    return now if before is None else Use(*(a - b for a, b in zip(now, before, strict=True)))


def check_usage_store(path: str) -> None:
    """Open the file and close it again. Raises ConfigError as `UsageStore`."""
    _open(path).close()


def _open(path: str | None) -> sqlite3.Connection:
    """The data base; a file is only for its owner to read."""
    try:
        if path is not None:
            os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        base = sqlite3.connect(path or ":memory:", timeout=BUSY_MS / 1000, check_same_thread=False)
        use_wal(base, BUSY_MS / 1000)
        base.execute("PRAGMA synchronous = NORMAL")
        _prepare(base)
    except (OSError, sqlite3.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        message = f"Cannot open the usage of keys in '{path}': {reason}."
        raise ConfigError(message, param="usage_db") from None
    return base


def _prepare(base: sqlite3.Connection) -> None:
    """Make the table of an empty file; several processes may do that at once."""
    base.execute("BEGIN IMMEDIATE")
    with base:
        [version] = base.execute("PRAGMA user_version").fetchone()
        [application] = base.execute("PRAGMA application_id").fetchone()
        [tables] = base.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
        if tables and (version, application) != (VERSION, APPLICATION):
            raise sqlite3.DatabaseError("it is the file of something else, or of another weft")
        if not tables:
            base.execute(_TABLE)
            base.execute(f"PRAGMA user_version = {VERSION}")
            base.execute(f"PRAGMA application_id = {APPLICATION}")
