"""The file of usage: added up, kept through failures, paged, and forgotten."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from datetime import date, datetime, timedelta, tzinfo
from pathlib import Path

import pytest

from weft.core.errors import ConfigError
from weft.server.counts import Use
from weft.server.usage_store import Row, UsageQuery, UsageStore, UsageStoreError

ALICE, BOB = ("alice", "batch"), ("bob", "interactive")
TODAY = date(2026, 2, 27)


class Clock(datetime):
    """A clock that stands, so that no test runs over midnight."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:
        return datetime(TODAY.year, TODAY.month, TODAY.day, 12, tzinfo=tz)


@pytest.fixture(autouse=True)
def _noon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.server.usage_store.datetime", Clock)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "usage.db")


@pytest.fixture
def outside(path: str) -> Iterator[sqlite3.Connection]:
    """Another process's connection to the file."""
    UsageStore(path, 400).close({})
    base = sqlite3.connect(path, isolation_level=None)
    yield base
    base.close()


def rows(path: str, query: UsageQuery | None = None) -> list[Row]:
    async def read() -> list[Row]:
        store = UsageStore(path, 400)
        page = await store.read(query or UsageQuery())
        store.close({})
        return page.rows

    return asyncio.run(read())


def test_totals_are_written_as_what_has_come_to_them(path):
    first, second = UsageStore(path, 400), UsageStore(path, 400)
    first.keep({ALICE: Use(1, 10, 5)})
    second.keep({ALICE: Use(1, 1, 1)})
    first.keep({ALICE: Use(3, 30, 15)})
    first.close({ALICE: Use(4, 40, 20), BOB: Use(1, 2, 3)})
    second.close({})
    today = TODAY.isoformat()
    assert rows(path) == [(today, *ALICE, 5, 41, 21), (today, *BOB, 1, 2, 3)]
    successor = UsageStore(path, 400)  # it goes on from the totals of the one before it
    successor.start_from({ALICE: Use(4, 40, 20)})
    successor.close({ALICE: Use(5, 50, 25)})
    assert rows(path, UsageQuery(key="alice")) == [(today, *ALICE, 6, 51, 26)]


def test_what_cannot_be_written_is_written_later(path, outside, monkeypatch):
    async def fail() -> None:
        monkeypatch.setattr("weft.server.usage_store.BUSY_MS", 50)
        store = UsageStore(path, 400)
        outside.execute("BEGIN IMMEDIATE")
        for total in (1, 2, 3):
            store.keep({ALICE: Use(total, total, total)})
            await asyncio.sleep(0.1)
        store.keep({BOB: Use(1, 1, 1)})
        outside.execute("ROLLBACK")
        store.close({ALICE: Use(4, 4, 4)})

    asyncio.run(fail())
    today = TODAY.isoformat()
    assert rows(path) == [(today, *ALICE, 4, 4, 4), (today, *BOB, 1, 1, 1)]


def test_days_are_chosen_and_forgotten(path, outside):
    days = [TODAY - timedelta(days=ago) for ago in (500, 30, 29)]
    for day in days:
        row = (day.isoformat(), *ALICE, 1, 2, 3)
        outside.execute("INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?)", row)
    chosen = UsageQuery(first=days[1], last=days[1])
    assert [row[0] for row in rows(path, chosen)] == [days[1].isoformat()]
    assert len(rows(path, UsageQuery(last=date(2200, 1, 1)))) == 3
    store = UsageStore(path, 400)
    store.close({BOB: Use(1, 1, 1)})
    found = [row[0] for row in rows(path)]
    assert found == [days[1].isoformat(), days[2].isoformat(), TODAY.isoformat()]


def test_a_file_of_another_version_is_refused_and_one_that_breaks_is_said(path, outside):
    store = UsageStore(path, 400)
    outside.execute("DROP TABLE usage")
    with pytest.raises(UsageStoreError, match="no such table"):
        asyncio.run(store.read(UsageQuery()))
    store.close({})
    outside.execute("CREATE TABLE other (x)")
    outside.execute("PRAGMA user_version = 7")
    with pytest.raises(ConfigError, match="something else") as caught:
        UsageStore(path, 400)
    assert caught.value.param == "usage_db"


def test_only_the_owner_reads_it(path):
    UsageStore(path, 400).close({})
    assert Path(path).stat().st_mode & 0o077 == 0
