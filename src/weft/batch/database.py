"""The SQLite data base of files and batches: its tables, and what may be wrong with it."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from pathlib import Path

from weft.batch.folder import StorageFullError
from weft.batch.outbox import DELIVERY_COLUMNS, Outbox
from weft.batch.records import BATCH_COLUMNS, UNFINISHED
from weft.core.errors import ConfigError, WeftError

BASE = "weft.db"
BUSY_MS = 10_000  # to wait for another process that writes
OPEN = f"({', '.join(repr(status) for status in UNFINISHED)})"

_FORECAST = (  # columns of batches, and what old ones have there
    ("predicted_from", "NULL"),
    ("promotable", "'flex'"),
    ("promotions", "x'5B5D'"),
    ("account", "x''"),
    ("queued_limit", "NULL"),
    ("demand_lines", "0"),
    ("demand_input", "0"),
    ("demand_output", "0"),
)
_ADDED = ("given_up", "payer", *(name for name, _ in _FORECAST))  # that came later
_FIRST = (
    """CREATE TABLE files (
        place INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        owner BLOB NOT NULL,
        purpose TEXT NOT NULL,
        filename TEXT NOT NULL,
        bytes INTEGER NOT NULL,
        created_at INTEGER NOT NULL,
        expires_at INTEGER
    )""",
    "CREATE INDEX files_by_owner ON files (owner, place)",
    f"""CREATE TABLE batches (
        place INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        owner BLOB NOT NULL,
        status TEXT NOT NULL,
        {", ".join(n for n in BATCH_COLUMNS if n not in ("id", "owner", "status", *_ADDED))}
    )""",
    "CREATE INDEX batches_by_owner ON batches (owner, place)",
    f"CREATE INDEX batches_unfinished ON batches (status) WHERE status IN {OPEN}",
)
_LENGTHS = """CREATE TABLE lengths (
    served TEXT NOT NULL,
    hash BLOB NOT NULL,
    parent BLOB NOT NULL,
    ended BLOB NOT NULL,
    censored BLOB NOT NULL,
    used_at INTEGER NOT NULL,
    PRIMARY KEY (served, hash)
) WITHOUT ROWID"""
# What brings a data base from each version to the next.
_STEPS: tuple[tuple[str, ...], ...] = (
    _FIRST,
    ("ALTER TABLE batches ADD COLUMN given_up INTEGER NOT NULL DEFAULT 0",),
    ("ALTER TABLE batches ADD COLUMN payer TEXT NOT NULL DEFAULT ''",),
    (
        f"""CREATE TABLE outbox (
            place INTEGER PRIMARY KEY AUTOINCREMENT,
            {", ".join(f"{name} NOT NULL" for name in DELIVERY_COLUMNS)},
            UNIQUE (id)
        )""",
        "CREATE INDEX outbox_due ON outbox (url, due_at)",
    ),
    (
        *(f"ALTER TABLE batches ADD COLUMN {name} DEFAULT {text}" for name, text in _FORECAST),
        """CREATE TABLE paces (
            place INTEGER PRIMARY KEY AUTOINCREMENT,
            served TEXT NOT NULL,
            seconds REAL NOT NULL,
            lines REAL NOT NULL,
            input_tokens REAL NOT NULL,
            output_tokens REAL NOT NULL
        )""",
        "CREATE INDEX paces_by_model ON paces (served, place)",
    ),
    (_LENGTHS,),
)
VERSION = len(_STEPS)


class DataFolderError(WeftError):
    """The data folder cannot be read or written at present."""

    http_status = 503
    code = "store_unavailable"
    retry_after_s = 5


def open_base(path: Path) -> sqlite3.Connection:
    """The data base, only for its owner to read, brought to this version."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        base = sqlite3.connect(path, timeout=BUSY_MS / 1000, check_same_thread=False)
        with contextlib.closing(base.execute("PRAGMA journal_mode = WAL")):
            base.execute("PRAGMA synchronous = FULL")
            base.execute("PRAGMA temp_store = MEMORY")
        base.isolation_level = None  # transactions begin where the code says so
        _prepare(base)
    except (OSError, sqlite3.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        message = f"Cannot open files and batches in '{path}': {reason}."
        raise ConfigError(message, param="data_dir") from None
    return base


def _prepare(base: sqlite3.Connection) -> None:
    """Bring an empty file to this version; several processes may do that at once."""
    base.execute("BEGIN IMMEDIATE")
    with base:
        [version] = base.execute("PRAGMA user_version").fetchone()
        [tables] = base.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
        if version > VERSION or (version == 0) != (tables == 0):
            raise sqlite3.DatabaseError("it is the file of something else, or of another weft")
        for step in _STEPS[version:]:
            for statement in step:
                base.execute(statement)
        if version < VERSION:  # a disk that is full can be read still
            base.execute(f"PRAGMA user_version = {VERSION}")


@contextlib.contextmanager
def reachable() -> Iterator[None]:
    """Turn what SQLite and the system say into typed errors.

    Raises:
        StorageFullError: the disk is full.
        DataFolderError: anything else.
    """
    try:
        yield
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            raise StorageFullError("The disk of the server is full; try again later.") from None
        raise DataFolderError(f"Files and batches cannot be reached: {error}.") from error
    except OSError as error:
        message = f"Files and batches cannot be reached: {error.strerror}."
        raise DataFolderError(message) from error


def _reading(folder: Path) -> contextlib.closing[sqlite3.Connection]:
    """The database of a data folder, only to be read."""
    uri = f"{(folder / BASE).absolute().as_uri()}?mode=ro"
    return contextlib.closing(sqlite3.connect(uri, uri=True, timeout=1))


def waiting_models(folder: Path) -> list[str]:
    """The identities of models that have batches which have not ended."""
    if not (folder / BASE).exists():
        return []
    with _reading(folder) as base:
        if base.execute("PRAGMA user_version").fetchone()[0] < VERSION:
            return []
        found = base.execute(f"SELECT DISTINCT served FROM batches WHERE status IN {OPEN}")
        return [identity for (identity,) in found]


def work_within(folder: Path, identity: str, urls: Seq[str] = ()) -> float | None:
    """Seconds until a server has something to do in a data folder; None if it has nothing.

    Args:
        folder: need not be there.
        identity: of its model. Whoever comes first ends those that are cancelled or too late.
        urls: that it tells of events.
    """
    if not (folder / BASE).exists():
        return None
    with _reading(folder) as base:
        if base.execute("PRAGMA user_version").fetchone()[0] < VERSION:
            return 0.0  # whoever looks for work brings it to this version
        statement = (
            f"SELECT 1 FROM batches WHERE status IN {OPEN} "
            "AND (served = ? OR status = 'cancelling' OR expires_at <= ?) LIMIT 1"
        )
        if base.execute(statement, (identity, time.time())).fetchone() is not None:
            return 0.0
        due_at = Outbox(base, urls).next_due()
    return None if due_at is None else max(0.0, due_at - time.time())
