"""Stored responses in SQLite: one file for all request planes, or the memory of this one."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson

from weft.core.errors import ConfigError, ParameterError, PromptTooLongError, WeftError
from weft.server.wal import use_wal

BUSY_MS = 5000  # to wait for another process that writes
TIDY_EVERY = 32  # saves
UNFINISHED = ("queued", "in_progress")
MAX_TURNS = 1000
MAX_CONVERSATION_BYTES = 32 * 2**20

# What leads to each version from the one before it.
_STEPS = (
    (
        """CREATE TABLE responses (
            id TEXT PRIMARY KEY,
            owner BLOB NOT NULL,
            previous TEXT,
            used_at REAL NOT NULL,
            bytes INTEGER NOT NULL,
            items BLOB NOT NULL,
            response BLOB NOT NULL
        ) WITHOUT ROWID""",
        "CREATE INDEX by_use ON responses (used_at, bytes)",
    ),
    (
        "ALTER TABLE responses ADD COLUMN cuts BLOB",
        # Background responses that are not complete.
        """CREATE TABLE runs (
            id TEXT PRIMARY KEY REFERENCES responses ON DELETE CASCADE,
            keeper INTEGER NOT NULL,
            served TEXT NOT NULL,
            attempts INTEGER NOT NULL,
            cancelled INTEGER NOT NULL,
            deadline REAL,
            request BLOB NOT NULL
        ) WITHOUT ROWID""",
        # What background responses have told; "made" is kept as long as they are not complete.
        """CREATE TABLE events (
            place INTEGER PRIMARY KEY,
            id TEXT NOT NULL REFERENCES responses ON DELETE CASCADE,
            first INTEGER NOT NULL,
            count INTEGER NOT NULL,
            events BLOB NOT NULL,
            made BLOB
        )""",
        "CREATE INDEX by_response ON events (id, first, count)",
    ),
)
VERSION = len(_STEPS)

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
    """One stored response.

    Attributes:
        owner: digest of the API key that owns it; no other key finds it.
        previous: id of the response that it continues.
        items: its own input items, as a JSON list.
        response: the response object, as JSON.
        cuts: how its text came, as JSON; None if it was not streamed, or its events are kept.
    """

    id: str
    owner: bytes
    previous: str | None
    items: bytes
    response: bytes
    cuts: bytes | None = None


class ResponseStore:
    """Keeps responses until they are unused for long, or take too much memory.

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
        await self.run(lambda base: self._save(base, stored))

    async def load(self, owner: bytes, response_id: str) -> Stored:
        """Return a response. Raises ResponseNotFoundError, StoreError."""
        return await self.run(lambda _: self._load(owner, response_id, "response_id"))

    async def delete(self, owner: bytes, response_id: str) -> None:
        """Forget a response; its content is overwritten. Raises as `load`."""
        await self.run(lambda _: self._delete(owner, response_id))

    async def conversation(self, owner: bytes, response_id: str) -> list[dict[str, Any]]:
        """Return the items of a response and of all before it, oldest first.

        Raises:
            ResponseNotFoundError: it, or one that it continues, is not there.
            ParameterError: one of them is not complete.
            PromptTooLongError: the conversation is too long to be read.
            StoreError: the file cannot be read.
        """
        return await self.run(lambda _: self._conversation(owner, response_id))

    def close(self) -> None:
        """Close the file; no calls may follow."""
        self._thread.submit(self._base.close)
        self._thread.shutdown()

    async def run(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """Run work on the data base's thread. Raises StoreError."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, work, self._base)
        except sqlite3.Error as error:
            message = f"The stored responses cannot be reached: {error}."
            raise StoreError(message, param="store") from error

    def _save(self, base: sqlite3.Connection, stored: Stored) -> None:
        with base:
            insert(base, stored)
        self.saved()

    def saved(self) -> None:
        """Something was stored; called on the thread, outside of transactions."""
        self._saves += 1
        if self._saves % TIDY_EVERY == 0:
            self._tidy()

    def _load(self, owner: bytes, response_id: str, param: str) -> Stored:
        row = self._base.execute(
            "SELECT id, owner, previous, items, response, cuts FROM responses "
            "WHERE id = ? AND owner = ?",
            (response_id, owner),
        ).fetchone()
        if row is None:
            raise not_found(response_id, param)
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
            response = orjson.loads(turn.response)
            if response["status"] in UNFINISHED:
                message = f"The response '{turn.id}' is not complete yet."
                raise ParameterError(message, param="previous_response_id")
            items += orjson.loads(turn.items) + response["output"]
        return items

    def _tidy(self) -> None:
        """Forget what is too old, and the oldest while there is too much.

        What is not complete goes last, and only if it is too much by itself.
        """
        with self._base:
            self._base.execute(
                "DELETE FROM responses WHERE used_at < ? AND id NOT IN (SELECT id FROM runs)",
                (time.time() - self._keep_s,),
            )
            self._base.execute(
                "DELETE FROM responses WHERE id IN (SELECT id FROM (SELECT id, "
                "SUM(bytes) OVER (ORDER BY id IN (SELECT id FROM runs) DESC, used_at DESC, id) "
                "AS total FROM responses) WHERE total > ?)",
                (self._max_bytes,),
            )


def check_store(path: str) -> None:
    """Open the file and close it again. Raises ConfigError as `ResponseStore`."""
    _open(path).close()


def not_found(response_id: str, param: str = "response_id") -> ResponseNotFoundError:
    """The error for an unknown id."""
    message = f"There is no response with the id '{response_id[:100]}'."
    return ResponseNotFoundError(message, param=param)


def insert(base: sqlite3.Connection, stored: Stored) -> None:
    """Add a response, within a transaction."""
    size = len(stored.items) + len(stored.response) + len(stored.cuts or b"")
    base.execute(
        "INSERT INTO responses (id, owner, previous, used_at, bytes, items, response, cuts) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (
            stored.id,
            stored.owner,
            stored.previous,
            time.time(),
            size,
            stored.items,
            stored.response,
            stored.cuts,
        ),
    )


def _open(path: str | None) -> sqlite3.Connection:
    """The data base; a file is only for its owner to read."""
    try:
        if path is not None:
            os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        base = sqlite3.connect(path or ":memory:", timeout=BUSY_MS / 1000, check_same_thread=False)
        use_wal(base, BUSY_MS / 1000)
        base.execute("PRAGMA synchronous = NORMAL")
        base.execute("PRAGMA secure_delete = ON")
        base.execute("PRAGMA foreign_keys = ON")
        base.execute("PRAGMA temp_store = MEMORY")  # no temporary files on disk
        _prepare(base)
    except (OSError, sqlite3.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        message = f"Cannot open the stored responses in '{path}': {reason}."
        raise ConfigError(message, param="responses_db") from None
    return base


def _prepare(base: sqlite3.Connection) -> None:
    """Bring a file to this version, or an empty one; several processes may do that at once."""
    base.execute("BEGIN IMMEDIATE")
    with base:
        [version] = base.execute("PRAGMA user_version").fetchone()
        [tables] = base.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
        if version > VERSION or (version == 0) != (tables == 0):
            raise sqlite3.DatabaseError("it is the file of something else, or of another weft")
        for statement in (statement for step in _STEPS[version:] for statement in step):
            base.execute(statement)
        base.execute(f"PRAGMA user_version = {VERSION}")
