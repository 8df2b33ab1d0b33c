"""SQLite's write-ahead log, switched on by several processes at once."""

from __future__ import annotations

import sqlite3
import time

RETRY_S = 0.01


def use_wal(base: sqlite3.Connection, patience_s: float) -> None:
    """Switch the log on; SQLite itself does not wait for others who do so at the same time.

    Raises:
        sqlite3.OperationalError: another one has kept the data base for longer than this.
    """
    end = time.monotonic() + patience_s
    while True:
        try:
            base.execute("PRAGMA journal_mode = WAL").close()
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > end:
                raise
            time.sleep(RETRY_S)
        else:
            return
