"""Data bases of files and batches as older versions left them."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from weft.batch import database


def write_older_base(path: Path, without: str, *statements: str) -> None:
    """Write the data base from before it got a table, and run statements on it."""
    steps = database._STEPS
    version = next(n for n, step in enumerate(steps) if f"TABLE {without}" in " ".join(step))
    with closing(sqlite3.connect(path)) as base, base:
        for statement in (*(text for step in steps[:version] for text in step), *statements):
            base.execute(statement)
        base.execute(f"PRAGMA user_version = {version}")
