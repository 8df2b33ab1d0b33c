"""Unfinished background responses: the events of each, and the process that runs it."""

from __future__ import annotations

import sqlite3
import time
import zlib
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

import orjson

from weft.api.response_events import events_after
from weft.core.errors import ParameterError, WeftError
from weft.server.life import Life
from weft.server.response_store import ResponseStore, Stored, insert, not_found

MAX_SHARE = 8  # of the room of all responses, one of this may be taken by a background response
ABANDONED_S = 600.0  # after which a run whose model is no longer served fails
ROWS_AT_ONCE = 64
RETRY_S = 5


class TooManyRunsError(WeftError):
    """As many background responses are in progress as there may be."""

    http_status = 429
    code = "too_many_requests"
    retry_after_s = RETRY_S


class RunLostError(WeftError):
    """A background response was deleted, or another process has resumed it."""

    http_status = 404
    code = "response_not_found"


class ResponseTooLargeError(WeftError):
    """The stored events of one response are too large."""

    http_status = 413
    code = "response_too_large"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive events of a background response, and what they were made from.

    Attributes:
        first: number of the first one, also if there is none yet.
        events: as they are sent.
        progress: what another process needs to go on behind them, in the writer's own form.
    """

    first: int
    count: int
    events: bytes
    progress: bytes = b""


@dataclass(frozen=True, slots=True)
class Run:
    """A background response in progress, as who makes it or takes it up gets it.

    Attributes:
        deadline: Unix time after which it has failed; None for no such time.
        request: what is to be computed, in the writer's own form.
        response: the response object as it is now, as JSON.
        progress: of its chunks so far, in order.
        num_events: that there are so far.
        attempts: processes that have taken it up without getting ahead.
        served_here: whether this server has its model.
    """

    id: str
    deadline: float | None
    request: bytes
    response: bytes
    progress: list[bytes] = field(default_factory=list)
    num_events: int = 0
    attempts: int = 0
    served_here: bool = True

    def left_s(self) -> float | None:
        """Seconds until the deadline, below 0 after it; None without one."""
        return None if self.deadline is None else self.deadline - time.time()


class Look(NamedTuple):
    """The state of runs.

    Attributes:
        adopted: had no living process, and are this one's now.
        cancelled: of this one's, those that are to end.
        lost: of this one's, those that are not its own any more.
        unfinished: whether any process has runs that are not complete.
    """

    adopted: list[Run]
    cancelled: list[str]
    lost: set[str]
    unfinished: bool


class Events(NamedTuple):
    """Events, the number of the last one, and whether they are complete."""

    events: bytes
    last: int
    complete: bool


class RunStore:
    """The part of a `ResponseStore` that has the background responses.

    A run belongs to one process, its keeper, and only that can write it. When the keeper dies
    another process takes it; a keeper that only seemed dead finds that it has lost it.

    Args:
        life: this process's own.
        served: what the model is; only processes that serve the same go on with each other's runs.
        most: runs at once.
        max_bytes: of all responses together.
        others: names of other models of this server, whose runs wait for them.
    """

    def __init__(
        self,
        store: ResponseStore,
        life: Life,
        served: str,
        most: int,
        max_bytes: int,
        others: Collection[str] = (),
    ) -> None:
        self._store = store
        self._life = life
        self._served = served
        self._most = most
        self._max_bytes = max_bytes // MAX_SHARE
        self._others = tuple(f"{name} " for name in others)  # how what they serve begins

    async def begin(
        self, stored: Stored, run: Run, chunk: Chunk, most_of_key: int | None = None
    ) -> None:
        """Keep a new run. Raises TooManyRunsError, StoreError.

        Args:
            most_of_key: runs that its owner may have at once; None for any number.
        """

        def work(base: sqlite3.Connection) -> None:
            with base:
                base.execute("BEGIN IMMEDIATE")  # so that nobody counts at the same time
                self._check_room(base, stored.owner, most_of_key)
                insert(base, stored)
                base.execute(
                    "INSERT INTO runs VALUES (?, ?, ?, 0, 0, ?, ?)",
                    (run.id, self._life.number, self._served, run.deadline, run.request),
                )
                _put(base, run.id, chunk, len(run.request))
            self._store.saved()

        await self._store.run(work)

    def _check_room(self, base: sqlite3.Connection, owner: bytes, most_of_key: int | None) -> None:
        [every] = base.execute("SELECT COUNT(*) FROM runs").fetchone()
        if every >= self._most:
            message = f"{every} background responses are in progress, which is the server's limit."
            raise TooManyRunsError(message)
        if most_of_key is None:
            return
        [own] = base.execute(
            "SELECT COUNT(*) FROM runs JOIN responses USING (id) WHERE owner = ?", (owner,)
        ).fetchone()
        if own >= most_of_key:
            message = (
                f"This API key has {own} background responses in progress, which is its limit."
            )
            raise TooManyRunsError(message)

    async def append(self, run_id: str, chunk: Chunk, response: bytes | None = None) -> None:
        """Append a run's events, and optionally the current response.

        Raises:
            RunLostError: the run is not this process's any more.
            ResponseTooLargeError: there is too much of it; nothing was kept.
            StoreError: the file cannot be written.
        """

        def work(base: sqlite3.Connection) -> None:
            with base:
                self._own(base, run_id)
                self._check_size(base, run_id, chunk)
                _put(base, run_id, chunk)
                if response is not None:
                    _replace(base, run_id, response)

        await self._store.run(work)

    async def finish(self, run_id: str, chunk: Chunk, response: bytes) -> None:
        """Keep the end of a run. Raises RunLostError, StoreError."""

        def work(base: sqlite3.Connection) -> None:
            with base:
                self._own(base, run_id)
                _put(base, run_id, chunk)
                _replace(base, run_id, response)
                _drop_progress(base, run_id)
            self._store.saved()

        await self._store.run(work)

    def _own(self, base: sqlite3.Connection, run_id: str) -> None:
        """Check that this process owns the run, and note its progress."""
        done = base.execute(
            "UPDATE runs SET attempts = 0 WHERE id = ? AND keeper = ?", (run_id, self._life.number)
        )
        if not done.rowcount:
            raise RunLostError("The response was deleted, or another process has resumed it.")

    def _check_size(self, base: sqlite3.Connection, run_id: str, chunk: Chunk) -> None:
        query = "SELECT bytes FROM responses WHERE id = ?"
        [size] = base.execute(query, (run_id,)).fetchone()
        if size > self._max_bytes:
            raise ResponseTooLargeError(
                f"The stored events of one background response may have {self._max_bytes} "
                f"bytes; this one exceeded that after {chunk.first} events."
            )

    async def look(self, active: Collection[str], *, adopting: bool = True) -> Look:
        """Check the ``active`` runs, and adopt those whose process is dead.

        Raises:
            StoreError: the file cannot be read or written.
            OSError: it cannot be known who lives.
        """
        return await self._store.run(lambda base: self._look(base, active, adopting))

    def _look(self, base: sqlite3.Connection, active: Collection[str], adopting: bool) -> Look:
        found = base.execute("SELECT id, keeper, cancelled, served FROM runs").fetchall()
        own = {run_id: bool(ended) for run_id, keeper, ended, _ in found if self._has(keeper)}
        adopted = [
            run
            for run_id, keeper, _, served in found
            if adopting and (served == self._served or not served.startswith(self._others))
            if run_id not in active and (self._has(keeper) or not self._life.alive(keeper))
            if (run := self._adopt(base, run_id, keeper)) is not None
        ]
        cancelled = [run_id for run_id in active if own.get(run_id)]
        return Look(adopted, cancelled, set(active) - set(own), bool(found))

    def _has(self, keeper: int) -> bool:
        return keeper == self._life.number

    def _adopt(self, base: sqlite3.Connection, run_id: str, keeper: int) -> Run | None:
        """The run, if it can be adopted; None if another process has it."""
        with base:
            done = base.execute(
                "UPDATE runs SET keeper = ?1, attempts = attempts + (keeper != ?1) "
                "WHERE id = ?2 AND keeper = ?3 "
                "AND (served = ?4 OR ?5 > (SELECT used_at FROM responses WHERE id = runs.id))",
                (self._life.number, run_id, keeper, self._served, time.time() - ABANDONED_S),
            )
            if not done.rowcount:
                return None
            row = base.execute(
                "SELECT deadline, request, response, attempts, served FROM runs "
                "JOIN responses USING (id) WHERE id = ?",
                (run_id,),
            ).fetchone()
            chunks = base.execute(
                "SELECT first, count, made FROM events WHERE id = ? ORDER BY place", (run_id,)
            ).fetchall()
        deadline, request, response, attempts, served = row
        progress = [zlib.decompress(data) for _, _, data in chunks]
        num_events = chunks[-1][0] + chunks[-1][1] if chunks else 0
        return Run(
            run_id,
            deadline,
            request,
            response,
            progress,
            num_events,
            attempts,
            served == self._served,
        )

    async def cancel(self, owner: bytes, run_id: str) -> None:
        """Ask for the end of a run; one that is complete stays as it is.

        Raises:
            ResponseNotFoundError: there is none.
            ParameterError: the response is no background response.
            StoreError: the file cannot be written.
        """
        stored = await self._store.load(owner, run_id)
        if not orjson.loads(stored.response)["background"]:
            raise ParameterError(
                "Only background responses can be cancelled. To end another one while it is made, "
                "close its connection.",
                param="response_id",
            )

        def work(base: sqlite3.Connection) -> None:
            with base:
                base.execute("UPDATE runs SET cancelled = 1 WHERE id = ?", (run_id,))

        await self._store.run(work)

    async def events(self, owner: bytes, run_id: str, after: int) -> Events:
        """Some of the events after this number. Raises ResponseNotFoundError, StoreError."""

        def work(base: sqlite3.Connection) -> Events:
            there = "SELECT 1 FROM responses WHERE id = ? AND owner = ?"
            if base.execute(there, (run_id, owner)).fetchone() is None:
                raise not_found(run_id)
            going_on = base.execute("SELECT 1 FROM runs WHERE id = ?", (run_id,)).fetchone()
            rows = base.execute(
                "SELECT first, count, events FROM events WHERE id = ? AND first + count - 1 > ? "
                "AND count > 0 ORDER BY first LIMIT ?",
                (run_id, after, ROWS_AT_ONCE),
            ).fetchall()
            events = [events_after(zlib.decompress(data), first, after) for first, _, data in rows]
            last = rows[-1][0] + rows[-1][1] - 1 if rows else after
            return Events(b"".join(events), last, going_on is None and len(rows) < ROWS_AT_ONCE)

        return await self._store.run(work)


def _put(base: sqlite3.Connection, run_id: str, chunk: Chunk, more_bytes: int = 0) -> None:
    """Add a chunk, and count its bytes and others."""
    events, progress = zlib.compress(chunk.events, 1), zlib.compress(chunk.progress, 1)
    base.execute(
        "INSERT INTO events (id, first, count, events, made) VALUES (?, ?, ?, ?, ?)",
        (run_id, chunk.first, chunk.count, events, progress),
    )
    base.execute(
        "UPDATE responses SET used_at = ?, bytes = bytes + ? WHERE id = ?",
        (time.time(), len(events) + len(progress) + more_bytes, run_id),
    )


def _replace(base: sqlite3.Connection, run_id: str, response: bytes) -> None:
    base.execute(
        "UPDATE responses SET bytes = bytes + ? - length(response), response = ? WHERE id = ?",
        (len(response), response, run_id),
    )


def _drop_progress(base: sqlite3.Connection, run_id: str) -> None:
    """Delete the data that only a resuming process needs, also from the size."""
    base.execute(
        "UPDATE responses SET bytes = bytes "
        "- (SELECT length(request) FROM runs WHERE runs.id = responses.id) "
        "- (SELECT SUM(length(made)) FROM events WHERE events.id = responses.id) WHERE id = ?",
        (run_id,),
    )
    base.execute("DELETE FROM runs WHERE id = ?", (run_id,))
    base.execute("UPDATE events SET made = NULL WHERE id = ?", (run_id,))
