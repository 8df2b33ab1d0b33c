"""A data base that several processes open at once."""

from __future__ import annotations

import sqlite3
import threading

import pytest

from weft.server.wal import use_wal


def connect(path) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)


def test_it_waits_for_another_one_who_has_the_data_base(tmp_path):
    other, base = connect(tmp_path / "x.db"), connect(tmp_path / "x.db")
    other.execute("CREATE TABLE t (a)")
    other.execute("BEGIN EXCLUSIVE")
    threading.Timer(0.05, lambda: other.execute("COMMIT")).start()
    use_wal(base, 30.0)
    assert base.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_but_not_for_ever(tmp_path):
    other, base = connect(tmp_path / "x.db"), connect(tmp_path / "x.db")
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        use_wal(base, 0.02)
