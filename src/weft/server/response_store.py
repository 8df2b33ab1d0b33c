"""Stored responses, in SQLite: one file for all request planes, or the memory of this one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson

from weft.core.errors import ConfigError, PromptTooLongError, WeftError

VERSION = 1
BUSY_MS = 5000  # to wait for another process that writes
TIDY_EVERY = 32  # saves
MAX_TURNS = 1000
MAX_CONVERSATION_BYTES = 32 * 2**20

_SCHEMA = f"""
CREATE TABLE responses (
    id TEXT PRIMARY KEY,
    owner BLOB NOT NULL,
    previous TEXT,
    used_at REAL NOT NULL,
    bytes INTEGER NOT NULL,
    items BLOB NOT NULL,
    response BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX by_use ON responses (used_at, bytes);
PRAGMA user_version = {VERSION};
"""

Result = TypeVar("Result")


class ResponseNotFoundError(WeftError):
    """There is no such response, or it is another key's."""

    http_status = 404
    code = "response_not_found"


class StoreError(WeftError):
    """The file of stored responses cannot be read or written."""

    http_status = 503
    code = "store_unavailable"


@dataclass(frozen=True, slots=True)
class Stored:
    """One response as it is kept.

    Attributes:
        owner: digest of the key whose it is; nobody else finds it.
        previous: id of the response that it continues.
        items: its own input items, as a JSON list.
        response: the response object, as JSON.
    """

    id: str
    owner: bytes
    previous: str | None
    items: bytes
    response: bytes


class ResponseStore:
    """Keeps responses until nobody has used them for long, or they take too much room.

    All work is done on a thread of its own. A response counts as used when it is stored and when a
    conversation goes on from it or from one of its successors. The least recently used go first.

    Args:
        path: of the SQLite file, made if need be; None keeps all in memory.
        max_bytes: of all stored items and responses together.
        keep_s: seconds after the last use.

    Raises:
        ConfigError: the file cannot be opened, or is of something else.
    """

    def __init__(self, path: str | None, max_bytes: int, keep_s: float) -> None:
        self._max_bytes = max_bytes
        self._keep_s = keep_s
        self._saves = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weft-store")
        self._base = self._thread.submit(_open, path).result()
        self._thread.submit(self._tidy).result()

    async def save(self, stored: Stored) -> None:
        """Keep a response; it can be found once this returns. Raises StoreError."""
        await self._run(lambda: self._save(stored))

    async def load(self, owner: bytes, response_id: str) -> Stored:
        """Return a response. Raises ResponseNotFoundError, StoreError."""
        return await self._run(lambda: self._load(owner, response_id, "response_id"))

    async def delete(self, owner: bytes, response_id: str) -> None:
        """Forget a response; its content is overwritten. Raises as `load`."""
        await self._run(lambda: self._delete(owner, response_id))

    async def conversation(self, owner: bytes, response_id: str) -> list[dict[str, Any]]:
        """Return the items of a response and of all before it, oldest first.

        Raises:
            ResponseNotFoundError: it, or one that it continues, is not there.
            PromptTooLongError: the conversation is too long to be read.
            StoreError: the file cannot be read.
        """
        return await self._run(lambda: self._conversation(owner, response_id))

    def close(self) -> None:
        """Close the file; nothing may be asked for any more."""
        self._thread.submit(self._base.close)
        self._thread.shutdown()

    async def _run(self, work: Callable[[], Result]) -> Result:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except sqlite3.Error as error:
            message = f"The stored responses cannot be reached: {error}."
            raise StoreError(message, param="store") from error

    def _save(self, stored: Stored) -> None:
        size = len(stored.items) + len(stored.response)
        with self._base:
            self._base.execute(
                "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    stored.id,
                    stored.owner,
                    stored.previous,
                    time.time(),
                    size,
                    stored.items,
                    stored.response,
                ),
            )
        self._saves += 1
        if self._saves % TIDY_EVERY == 0:
            self._tidy()

    def _load(self, owner: bytes, response_id: str, param: str) -> Stored:
        row = self._base.execute(
            "SELECT id, owner, previous, items, response FROM responses WHERE id = ? AND owner = ?",
            (response_id, owner),
        ).fetchone()
        if row is None:
            message = f"There is no response with the id '{response_id[:100]}'."
            raise ResponseNotFoundError(message, param=param)
        return Stored(*row)

    def _delete(self, owner: bytes, response_id: str) -> None:
        self._load(owner, response_id, "response_id")
        with self._base:
            self._base.execute("DELETE FROM responses WHERE id = ?", (response_id,))

    def _conversation(self, owner: bytes, response_id: str) -> list[dict[str, Any]]:
        turns: list[Stored] = []
        size = 0
        following: str | None = response_id
        while following is not None:
            turns.append(self._load(owner, following, "previous_response_id"))
            size += len(turns[-1].items) + len(turns[-1].response)
            if len(turns) > MAX_TURNS or size > MAX_CONVERSATION_BYTES:
                raise PromptTooLongError(
                    f"The conversation before has more than {MAX_TURNS} responses or "
                    f"{MAX_CONVERSATION_BYTES} bytes.",
                    param="previous_response_id",
                )
            following = turns[-1].previous
        with self._base:
            self._base.executemany(
                "UPDATE responses SET used_at = ? WHERE id = ?",
                [(time.time(), turn.id) for turn in turns],
            )
        items: list[dict[str, Any]] = []
        for turn in reversed(turns):
            items += orjson.loads(turn.items) + orjson.loads(turn.response)["output"]
        return items

    def _tidy(self) -> None:
        """Forget what is too old, and the oldest while there is too much."""
        with self._base:
            self._base.execute(
                "DELETE FROM responses WHERE used_at < ?", (time.time() - self._keep_s,)
            )
            self._base.execute(
                "DELETE FROM responses WHERE id IN (SELECT id FROM (SELECT id, "
                "SUM(bytes) OVER (ORDER BY used_at DESC, id) AS total FROM responses) "
                "WHERE total > ?)",
                (self._max_bytes,),
            )


def check_store(path: str) -> None:
    """Open the file and close it again. Raises ConfigError as `ResponseStore`."""
    _open(path).close()


def _open(path: str | None) -> sqlite3.Connection:
    """The data base; a file is only for its owner to read."""
    try:
        if path is not None:
            os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        base = sqlite3.connect(path or ":memory:", timeout=BUSY_MS / 1000, check_same_thread=False)
        with contextlib.closing(base.execute("PRAGMA journal_mode = WAL")):
            base.execute("PRAGMA synchronous = NORMAL")
            base.execute("PRAGMA secure_delete = ON")
        _prepare(base)
    except (OSError, sqlite3.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        message = f"Cannot open the stored responses in '{path}': {reason}."
        raise ConfigError(message, param="responses_db") from None
    return base


def _prepare(base: sqlite3.Connection) -> None:
    """Make the table in an empty file; several processes may do that at once."""
    base.execute("BEGIN IMMEDIATE")
    with base:
        [version] = base.execute("PRAGMA user_version").fetchone()
        [tables] = base.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
        if version == 0 and tables == 0:
            for statement in filter(None, map(str.strip, _SCHEMA.split(";"))):
                base.execute(statement)
        elif version != VERSION:
            raise sqlite3.DatabaseError("it is the file of something else, or of another weft")
