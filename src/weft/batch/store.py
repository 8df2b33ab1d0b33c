"""Files and batches in one data folder: a SQLite data base, and the bytes beside it.

All request planes and the batch process use it at once, and so do several servers. What a method
has done outlives any kill and any loss of power: commits are synchronised, bytes before their row.
Which lines of a batch are done stands in its journal, not here (``weft.batch.session``).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Seq
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import orjson

from weft.batch import points
from weft.batch.database import BASE, OPEN, open_base
from weft.batch.folder import FileFolder, StorageFullError, Upload
from weft.batch.kept_lengths import SavedNode, load_lengths, save_nodes
from weft.batch.records import (
    BATCH_COLUMNS,
    FILE_COLUMNS,
    OUTPUT,
    BatchRecord,
    FileRecord,
    Status,
)
from weft.blend.lengths import LengthTable
from weft.core.errors import ParameterError, WeftError

FILES, BELL = "files", "bell"


class FileNotThereError(WeftError):
    """There is no such file, or it is another key's."""

    http_status = 404
    code = "file_not_found"


class BatchNotFoundError(WeftError):
    """There is no such batch, or it is another key's."""

    http_status = 404
    code = "batch_not_found"


class FileInUseError(WeftError):
    """A batch that is not finished reads the file."""

    http_status = 409
    code = "file_in_use"


class BatchOverError(WeftError):
    """The batch has ended, or is about to: nothing is left to be cancelled."""

    http_status = 409
    code = "batch_not_cancellable"


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Bounds on what is kept.

    Attributes:
        file_bytes, key_bytes: of one file, and of all files that one key has uploaded.
        reserve_bytes: of the disk that stay free.
    """

    file_bytes: int = 2**30
    key_bytes: int = 10 * 2**30
    reserve_bytes: int = 2**30


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


class BatchStore:
    """The data folder. Its methods may block; call them on one thread at a time.

    Args:
        folder: made if need be.
        clock: the time of day.

    Raises:
        ConfigError: the folder cannot be used, or its data base is of something else.
    """

    def __init__(
        self, folder: Path, limits: StoreLimits, clock: Callable[[], float] = time.time
    ) -> None:
        self.limits = limits
        self.files_folder = FileFolder(folder / FILES, limits.reserve_bytes)
        self._bell = folder / BELL
        self._clock = clock
        self._base = open_base(folder / BASE)
        self._seen = -1
        self.sweep()

    def close(self) -> None:
        """Close the data base; nothing may be asked for any more."""
        self._base.close()

    # -- files --------------------------------------------------------------------------------

    def begin_upload(self, owner: bytes) -> Upload:
        """Start a file. Raises StorageFullError if the key, or the disk, has no room."""
        left = self.limits.key_bytes - self.used_bytes(owner)
        if left <= 0:
            raise self._key_full()
        return self.files_folder.begin(f"file-{secrets.token_hex(16)}", self.limits.file_bytes)

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
            if self.used_bytes(owner) + upload.size > self.limits.key_bytes:
                raise self._key_full()
            self._insert_file(record)
        points.reached("upload committed")
        upload.close()
        return record

    def used_bytes(self, owner: bytes) -> int:
        """Bytes of what a key has uploaded."""
        statement = "SELECT TOTAL(bytes) FROM files WHERE owner = ? AND purpose != ?"
        return int(self._one(statement, owner, OUTPUT)[0])

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
        return self._page("files", where, values, after, limit, order)

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
        window: str,
        window_s: int,
        model: str,
        served: str,
        metadata: object = None,
        output_expires_s: int | None = None,
    ) -> BatchRecord:
        """Queue a batch.

        Raises:
            FileNotThereError: there is no such file.
            ParameterError: it was uploaded for something else.
        """
        now = self._now()
        record = BatchRecord(
            id=f"batch_{secrets.token_hex(16)}",
            owner=owner,
            endpoint=endpoint,
            model=model,
            served=served,
            input_file_id=input_file_id,
            window=window,
            status="validating",
            created_at=now,
            expires_at=now + window_s,
            metadata=orjson.dumps(metadata),
            output_expires_s=output_expires_s,
        )
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
            places = ", ".join("?" * len(BATCH_COLUMNS))
            self._base.execute(f"INSERT INTO batches ({_BATCH}) VALUES ({places})", astuple(record))
        points.reached("batch created")
        self.ring_bell()
        return record

    def batch(self, owner: bytes, batch_id: str) -> BatchRecord:
        """Return a batch. Raises BatchNotFoundError."""
        row = self._one(f"SELECT {_BATCH} FROM batches WHERE id = ? AND owner = ?", batch_id, owner)
        if row is None:
            message = f"There is no batch with the id '{batch_id[:100]}'."
            raise BatchNotFoundError(message, param="batch_id")
        return BatchRecord(*row)

    def list_batches(self, owner: bytes, *, after: str | None = None, limit: int = 20) -> Page:
        """A page of the batches of a key, the newest first. Raises as `list_files`."""
        return self._page("batches", "owner = ?", [owner], after, limit, "desc")

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
        self.ring_bell()
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

    def update(self, batch_id: str, *, before: Collection[Status] = (), **columns: Any) -> bool:
        """Set columns of a batch; False if its status is none of ``before`` any more."""
        names = ", ".join(f"{name} = ?" for name in columns)
        where, values = "id = ?", [*columns.values(), batch_id]
        if before:
            where += f" AND status IN ({', '.join('?' * len(before))})"
            values += before
        with self._writing():
            done = self._base.execute(f"UPDATE batches SET {names} WHERE {where}", values)
        return done.rowcount > 0

    def show_progress(self, progress: Collection[tuple[str, dict[str, Any]]]) -> None:
        """Set columns of several batches at once."""
        with self._writing():
            for batch_id, columns in progress:
                names = ", ".join(f"{name} = ?" for name in columns)
                self._base.execute(
                    f"UPDATE batches SET {names} WHERE id = ?", (*columns.values(), batch_id)
                )

    def finish(self, record: BatchRecord, status: Status, **columns: Any) -> None:
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
        with self._writing():
            for column, file_id in files.items():
                filename = f"{record.id}_{column.removesuffix('_file_id')}.jsonl"
                expires_at = None if expires_after_s is None else now + expires_after_s
                size, owner = sizes[column], record.owner
                self._insert_file(
                    FileRecord(file_id, owner, OUTPUT, filename, size, now, expires_at)
                )
            settings = ", ".join(f"{name} = ?" for name in columns)
            self._base.execute(
                f"UPDATE batches SET {settings} WHERE id = ?", (*columns.values(), record.id)
            )
        points.reached("batch finished")
        for column, name in names.items():
            if not sizes[column]:
                self.files_folder.remove(name)

    def ring_bell(self) -> None:
        """Let supervisors know that there is something to do, who may have no batch process."""
        fd = os.open(self._bell, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.utime(fd)
        os.close(fd)

    def save_lengths(self, served: str, nodes: list[SavedNode]) -> None:
        """Keep what is known of a model's output lengths."""
        with self._writing():
            save_nodes(self._base, served, nodes, self._now())

    def load_lengths(self, served: str) -> LengthTable:
        """What is known of a model's output lengths."""
        return load_lengths(self._base, served)

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

    def _insert_file(self, record: FileRecord) -> None:
        places = ", ".join("?" * len(FILE_COLUMNS))
        self._base.execute(f"INSERT INTO files ({_FILE}) VALUES ({places})", astuple(record))

    def _page(
        self, table: str, where: str, values: list[Any], after: str | None, limit: int, order: str
    ) -> Page:
        kind, columns = _KINDS[table]
        if after is not None:
            owner = values[0]
            found = self._one(f"SELECT place FROM {table} WHERE id = ? AND owner = ?", after, owner)
            if found is None:
                raise ParameterError(f"There is no '{after[:100]}' to go on after.", param="after")
            where += f" AND place {'>' if order == 'asc' else '<'} ?"
            values = [*values, found[0]]
        rows = self._base.execute(
            f"SELECT {columns} FROM {table} WHERE {where} "
            f"ORDER BY place {'ASC' if order == 'asc' else 'DESC'} LIMIT ?",
            (*values, limit + 1),
        ).fetchall()
        return Page([kind(*row) for row in rows[:limit]], len(rows) > limit)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """A transaction that begins at once, so that what it reads stays so."""
        self._base.execute("BEGIN IMMEDIATE")
        with self._base:
            yield


_FILE, _BATCH = ", ".join(FILE_COLUMNS), ", ".join(BATCH_COLUMNS)
_KINDS: dict[str, tuple[type[FileRecord] | type[BatchRecord], str]] = {
    "files": (FileRecord, _FILE),
    "batches": (BatchRecord, _BATCH),
}
_FRESH = (
    "(expires_at IS NULL OR expires_at > ? OR "
    f"id IN (SELECT input_file_id FROM batches WHERE status IN {OPEN}))"
)


def bell_stamp(folder: Path) -> int:
    """Changes when the bell of a data folder is rung; 0 before the first time."""
    with contextlib.suppress(OSError):
        return (folder / BELL).stat().st_mtime_ns
    return 0


def default_folder() -> Path:
    """Where data is kept if no folder is named."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "weft"
