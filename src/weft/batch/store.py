"""Files and batches in one data folder: a SQLite data base, and the bytes beside it.

All request planes and the batch process use it at once, and so do several servers. What a method
has done outlives any kill and any loss of power: commits are synchronised, bytes before their row.
Which lines of a batch are done stands in its journal, not here (``weft.batch.session``).
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import orjson

from weft.batch import points
from weft.batch.bell import ring_bell
from weft.batch.database import BASE, OPEN, open_base
from weft.batch.errors import (
    BatchNotFoundError,
    BatchNotOverError,
    BatchOverError,
    FileInUseError,
    FileNotThereError,
)
from weft.batch.folder import FileFolder, StorageFullError, StoreLimits, Upload
from weft.batch.kept_lengths import KeptLengths
from weft.batch.outbox import Outbox
from weft.batch.pace import PaceTable
from weft.batch.pages import Page, read_page
from weft.batch.records import (
    BATCH_COLUMNS,
    BATCH_PREFIX,
    FILE_COLUMNS,
    HIDDEN,
    MESSAGES_IN,
    MESSAGES_OUT,
    MESSAGES_PREFIX,
    OUTPUT,
    UNFINISHED,
    BatchRecord,
    FileRecord,
)
from weft.core.errors import ParameterError
from weft.core.states import BatchStatus

FILES = "files"


class BatchStore:
    """The data folder. Its methods may block; call them on one thread at a time.

    Args:
        folder: made if need be.
        clock: the time of day.
        webhook_urls: are told when a batch ends.

    Attributes:
        outbox: events that they have not confirmed.
        paces: how fast batches were answered lately.
        lengths: what is known of output lengths.

    Raises:
        ConfigError: the folder cannot be used, or its data base is of something else.
    """

    def __init__(
        self,
        folder: Path,
        limits: StoreLimits,
        clock: Callable[[], float] = time.time,
        webhook_urls: Collection[str] = (),
    ) -> None:
        self.limits = limits
        self.files_folder = FileFolder(folder / FILES, limits.reserve_bytes)
        self._folder = folder
        self._clock = clock
        self._base = open_base(folder / BASE)
        self.paces = PaceTable(self._base, self._writing)
        self.lengths = KeptLengths(self._base, self._writing, self._now)
        self.outbox = Outbox(self._base, webhook_urls)
        self._seen = -1
        self.sweep()

    def close(self) -> None:
        """Close the data base; nothing may be asked for any more."""
        self._base.close()

    # -- files --------------------------------------------------------------------------------

    def begin_upload(self, owner: bytes, more_bytes: int = 0) -> Upload:
        """Start a file. Raises StorageFullError if the key, or the disk, has no room.

        Args:
            more_bytes: that it may have beyond the limit of a file.
        """
        left = self.limits.key_bytes - self.used_bytes(owner)
        if left <= 0:
            raise self._key_full()
        most = self.limits.file_bytes + more_bytes
        return self.files_folder.begin(f"file-{secrets.token_hex(16)}", most)

    def add_file(
        self,
        upload: Upload,
        owner: bytes,
        purpose: str,
        filename: str,
        expires_after_s: int | None,
    ) -> FileRecord:
        """Give an upload its row; ``upload.keep`` has been called.

        Raises:
            StorageFullError: the key, or the disk, has no room.
        """
        now = self._now()
        expires_at = None if expires_after_s is None else now + expires_after_s
        record = FileRecord(upload.id, owner, purpose, filename, upload.size, now, expires_at)
        with self._writing():
            self._insert_upload(record)
        points.reached("upload committed")
        upload.close()
        return record

    def used_bytes(self, owner: bytes) -> int:
        """Bytes of what a key has uploaded."""
        statement = "SELECT TOTAL(bytes) FROM files WHERE owner = ? AND purpose NOT IN (?, ?)"
        return int(self._one(statement, owner, OUTPUT, MESSAGES_OUT)[0])

    def file(self, owner: bytes, file_id: str) -> FileRecord:
        """Return a file. Raises FileNotThereError."""
        row = self._one(
            f"SELECT {_FILE} FROM files WHERE id = ? AND owner = ? AND {_FRESH}",
            *(file_id, owner, self._now()),
        )
        if row is None:
            message = f"There is no file with the id '{file_id[:100]}'."
            raise FileNotThereError(message, param="file_id")
        return FileRecord(*row)

    def list_files(
        self,
        owner: bytes,
        *,
        after: str | None = None,
        limit: int = 10_000,
        order: str = "desc",
        purpose: str | None = None,
    ) -> Page:
        """A page of the files of a key, the newest first unless the order is ``asc``.

        Raises:
            ParameterError: there is no file to go on after.
        """
        where, values = f"owner = ? AND {_FRESH}", [owner, self._now()]
        if purpose is not None:
            where += " AND purpose = ?"
            values.append(purpose)
        newest_first = order != "asc"
        return read_page(self._base, "files", where, values, after, limit, newest_first)

    def delete_file(self, owner: bytes, file_id: str) -> None:
        """Forget a file.

        Raises:
            FileNotThereError: it is not there.
            FileInUseError: a batch that is not finished reads it.
        """
        with self._writing():
            self.file(owner, file_id)
            user = self._one(
                f"SELECT id FROM batches WHERE input_file_id = ? AND status IN {OPEN}", file_id
            )
            if user is not None:
                message = f"The batch '{user[0]}' reads this file; cancel it, or wait for its end."
                raise FileInUseError(message, param="file_id")
            self._base.execute("DELETE FROM files WHERE id = ?", (file_id,))
        points.reached("file forgotten")
        self.files_folder.remove(file_id)

    def sweep(self) -> None:
        """Remove files that have expired, and what processes that died have left."""
        unused = f"id NOT IN (SELECT input_file_id FROM batches WHERE status IN {OPEN})"
        with self._writing():
            gone = self._base.execute(
                f"DELETE FROM files WHERE expires_at <= ? AND {unused} RETURNING id", (self._now(),)
            ).fetchall()
        if gone:
            points.reached("files expired")
        for (file_id,) in gone:
            self.files_folder.remove(file_id)
        self.files_folder.sweep(self._known)

    def _known(self) -> Collection[str]:
        """Ids of files that have a row, or that unfinished batches write."""
        known = {row[0] for row in self._base.execute("SELECT id FROM files")}
        for record in self.unfinished():
            known |= {record.output_name, record.errors_name}
        return known

    # -- batches ------------------------------------------------------------------------------

    def create_batch(
        self,
        owner: bytes,
        endpoint: str,
        input_file_id: str,
        *,
        metadata: object = None,
        judge: Callable[[BatchRecord], BatchRecord] = lambda record: record,
        **columns: Any,
    ) -> BatchRecord:
        """Queue a batch.

        Args:
            judge: gives the record its last form while no other batch can come; may refuse it.
            columns: of its row, with ``window_s``, ``window``, ``model`` and ``served``.

        Raises:
            FileNotThereError: there is no such file.
            ParameterError: it was uploaded for something else.
        """
        columns["metadata"] = orjson.dumps(metadata)
        record = self._new_batch(BATCH_PREFIX, owner, endpoint, input_file_id, **columns)
        with self._writing():
            try:
                found = self.file(owner, input_file_id)
            except FileNotThereError as error:
                raise FileNotThereError(error.message, param="input_file_id") from None
            if found.purpose != "batch":
                raise ParameterError(
                    f"The file '{input_file_id}' was uploaded for '{found.purpose}', not for "
                    "'batch'.",
                    param="input_file_id",
                )
            record = judge(record)
            self._insert_batch(record)
        points.reached("batch created")
        ring_bell(self._folder)
        return record

    def create_message_batch(
        self,
        upload: Upload,
        owner: bytes,
        *,
        lines: int,
        keep_s: int,
        judge: Callable[[BatchRecord], BatchRecord] = lambda record: record,
        **columns: Any,
    ) -> BatchRecord:
        """Queue a batch of Anthropic's API; ``upload.keep`` has been called on its requests.

        Args:
            keep_s: after its end its results are kept for so long.
            judge, columns: as of other batches.

        Raises:
            StorageFullError: the key, or the disk, has no room.
        """
        columns |= {"total": lines, "output_expires_s": keep_s}
        record = self._new_batch(MESSAGES_PREFIX, owner, "/v1/messages", upload.id, **columns)
        size, now = upload.size, record.created_at
        with self._writing():
            record = judge(record)
            self._insert_upload(
                FileRecord(upload.id, owner, MESSAGES_IN, upload.id, size, now, None)
            )
            self._insert_batch(record)
        points.reached("batch created")
        upload.close()
        ring_bell(self._folder)
        return record

    def _new_batch(
        self, prefix: str, owner: bytes, endpoint: str, file_id: str, *, window_s: int, **more: Any
    ) -> BatchRecord:
        now, batch_id = self._now(), f"{prefix}{secrets.token_hex(16)}"
        more |= {"input_file_id": file_id, "status": "validating"}
        more |= {"created_at": now, "expires_at": now + window_s}
        return BatchRecord(batch_id, owner, endpoint, **more)

    def batch(self, owner: bytes, batch_id: str) -> BatchRecord:
        """Return a batch. Raises BatchNotFoundError."""
        row = self._one(f"SELECT {_BATCH} FROM batches WHERE id = ? AND owner = ?", batch_id, owner)
        if row is None:
            message = f"There is no batch with the id '{batch_id[:100]}'."
            raise BatchNotFoundError(message, param="batch_id")
        return BatchRecord(*row)

    def list_batches(
        self,
        owner: bytes,
        *,
        prefix: str = BATCH_PREFIX,
        after: str | None = None,
        before: str | None = None,
        limit: int = 20,
    ) -> Page:
        """A page of the batches of a key, the newest first. Raises as `list_files`.

        Args:
            prefix: of their ids.
            before: one that the page ends before; not with ``after``.
        """
        where = "owner = ? AND substr(id, 1, ?) = ?"
        values: list[Any] = [owner, len(prefix), prefix]
        if before is None:
            return read_page(self._base, "batches", where, values, after, limit)
        page = read_page(self._base, "batches", where, values, before, limit, False)
        return Page(page.records[::-1], page.has_more)

    def recent_batches(self, owner: bytes | None, since: int, most: int) -> list[BatchRecord]:
        """The newest batches that have not ended, or not before ``since``.

        Args:
            owner: whose they are; None for everybody's.
        """
        ended = "COALESCE(completed_at, failed_at, expired_at, cancelled_at, 0)"
        rows = self._base.execute(
            f"SELECT {_BATCH} FROM batches WHERE (?1 IS NULL OR owner = ?1) "
            f"AND (status IN {OPEN} OR {ended} >= ?2) ORDER BY place DESC LIMIT ?3",
            (owner, since, most),
        )
        return [BatchRecord(*row) for row in rows]

    def delete_batch(self, owner: bytes, batch_id: str) -> None:
        """Forget a batch that has ended, and its results.

        Raises:
            BatchNotFoundError: it is not there.
            BatchNotOverError: it has not ended.
        """
        with self._writing():
            found = self.batch(owner, batch_id)
            if found.status in UNFINISHED:
                message = f"The batch '{batch_id}' has not ended; cancel it, or wait for its end."
                raise BatchNotOverError(message, param="batch_id")
            self._base.execute("DELETE FROM batches WHERE id = ?", (batch_id,))
            names = (found.output_name, found.errors_name)
            self._base.execute("DELETE FROM files WHERE id IN (?, ?)", names)
        points.reached("batch forgotten")
        for name in names:
            self.files_folder.remove(name)

    def cancel_batch(self, owner: bytes, batch_id: str) -> BatchRecord:
        """Ask for the end of a batch; one that is cancelled already stays so.

        Raises:
            BatchNotFoundError: it is not there.
            BatchOverError: it has ended otherwise, or is about to.
        """
        with self._writing():
            found = self.batch(owner, batch_id)
            if found.status not in ("validating", "in_progress", "cancelling", "cancelled"):
                message = f"The batch cannot be cancelled any more: it is '{found.status}'."
                raise BatchOverError(message, param="batch_id")
            if found.status in ("validating", "in_progress"):
                self._base.execute(
                    "UPDATE batches SET status = 'cancelling', cancelling_at = ? WHERE id = ?",
                    (self._now(), batch_id),
                )
        points.reached("batch cancelling")
        ring_bell(self._folder)
        return self.batch(owner, batch_id)

    # -- for whoever answers them -------------------------------------------------------------

    def unfinished(self) -> list[BatchRecord]:
        """All batches that have not ended, by the time at which they are due."""
        rows = self._base.execute(
            f"SELECT {_BATCH} FROM batches WHERE status IN {OPEN} ORDER BY expires_at, place"
        )
        return [BatchRecord(*row) for row in rows]

    def changed(self) -> bool:
        """Whether another process has written since the last call."""
        before, self._seen = self._seen, int(self._one("PRAGMA data_version")[0])
        return before != self._seen

    def reload(self, batch_id: str) -> BatchRecord:
        """A batch as it is now, whoever's it is."""
        row = self._one(f"SELECT {_BATCH} FROM batches WHERE id = ?", batch_id)
        if row is None:
            raise BatchNotFoundError(f"There is no batch with the id '{batch_id}'.")
        return BatchRecord(*row)

    def update(
        self,
        batch_id: str,
        *,
        before: Collection[BatchStatus] = (),
        check: Callable[[], None] = lambda: None,
        **columns: Any,
    ) -> bool:
        """Set columns of a batch; False if its status is none of ``before`` any more.

        Args:
            check: may refuse what is done by what it raises, while no other batch can change.
        """
        names = ", ".join(f"{name} = ?" for name in columns)
        where, values = "id = ?", [*columns.values(), batch_id]
        if before:
            where += f" AND status IN ({', '.join('?' * len(before))})"
            values += before
        with self._writing():
            changed = self._base.execute(f"UPDATE batches SET {names} WHERE {where}", values)
            if changed.rowcount:
                check()
        return changed.rowcount > 0

    def show_progress(self, progress: Collection[tuple[str, dict[str, Any]]]) -> None:
        """Set columns of several batches at once."""
        with self._writing():
            for batch_id, columns in progress:
                names = ", ".join(f"{name} = ?" for name in columns)
                self._base.execute(
                    f"UPDATE batches SET {names} WHERE id = ?", (*columns.values(), batch_id)
                )

    def finish(self, record: BatchRecord, status: BatchStatus, **columns: Any) -> None:
        """End a batch: its files of results, which are on the disk, get their rows with its end.

        Args:
            columns: further ones of its row.
        """
        now = self._now()
        names = {"output_file_id": record.output_name, "error_file_id": record.errors_name}
        sizes = {column: self.files_folder.size(name) for column, name in names.items()}
        files = {column: names[column] for column, size in sizes.items() if size}
        columns |= {"status": status, f"{status}_at": now, **files}
        expires_after_s = record.output_expires_s
        purpose = MESSAGES_OUT if record.of_messages else OUTPUT
        with self._writing():
            for column, file_id in files.items():
                filename = f"{record.id}_{column.removesuffix('_file_id')}.jsonl"
                expires_at = None if expires_after_s is None else now + expires_after_s
                size, owner = sizes[column], record.owner
                self._insert_file(
                    FileRecord(file_id, owner, purpose, filename, size, now, expires_at)
                )
            if record.of_messages:
                self._base.execute("DELETE FROM files WHERE id = ?", (record.input_file_id,))
            settings = ", ".join(f"{name} = ?" for name in columns)
            self._base.execute(
                f"UPDATE batches SET {settings} WHERE id = ?", (*columns.values(), record.id)
            )
            self.outbox.add(record, status, now)
        points.reached("batch finished")
        for column, name in names.items():
            if not sizes[column]:
                self.files_folder.remove(name)
        if record.of_messages:  # nobody else could read them
            self.files_folder.remove(record.input_file_id)

    # -- the data base ------------------------------------------------------------------------

    def _now(self) -> int:
        return int(self._clock())

    def _key_full(self) -> StorageFullError:
        return StorageFullError(
            f"Your files may have {self.limits.key_bytes} bytes together; delete some.",
            param="file",
        )

    def _one(self, statement: str, *values: object) -> Any:
        return self._base.execute(statement, values).fetchone()

    def _insert_upload(self, record: FileRecord) -> None:
        """Raises StorageFullError if the key has no room for it."""
        if self.used_bytes(record.owner) + record.bytes > self.limits.key_bytes:
            raise self._key_full()
        self._insert_file(record)

    def _insert_file(self, record: FileRecord) -> None:
        places = ", ".join("?" * len(FILE_COLUMNS))
        self._base.execute(f"INSERT INTO files ({_FILE}) VALUES ({places})", astuple(record))

    def _insert_batch(self, record: BatchRecord) -> None:
        places = ", ".join("?" * len(BATCH_COLUMNS))
        self._base.execute(f"INSERT INTO batches ({_BATCH}) VALUES ({places})", astuple(record))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """A transaction that begins at once, so that what it reads stays so."""
        self._base.execute("BEGIN IMMEDIATE")
        with self._base:
            yield


_FILE, _BATCH = ", ".join(FILE_COLUMNS), ", ".join(BATCH_COLUMNS)
_FRESH = (
    f"purpose NOT IN {HIDDEN} AND (expires_at IS NULL OR expires_at > ? OR "
    f"id IN (SELECT input_file_id FROM batches WHERE status IN {OPEN}))"
)
