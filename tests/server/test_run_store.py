"""Runs: each has one keeper that can write it, and another one when that is dead."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import orjson
import pytest

from weft.core.errors import ConfigError
from weft.server import run_store
from weft.server.life import Life, open_life
from weft.server.response_store import ResponseNotFoundError, ResponseStore, Stored
from weft.server.run_store import Chunk, Run, RunLostError, RunStore

ME, YOU = b"m" * 32, b"y" * 32
WAITING = orjson.dumps({"background": True, "status": "queued", "output": []})
DONE = orjson.dumps({"background": True, "status": "completed", "output": []})
LIMIT = 2**20


class Plane:
    """What one request plane has of the store; its coroutines are run to their end."""

    def __init__(self, path: Path, served: str = "model 1", others: Seq[str] = ()) -> None:
        self._dead = False
        self.life = open_life(str(path))
        self.store = ResponseStore(str(path), LIMIT, 3600.0)
        self.runs = RunStore(self.store, self.life, served, 100, LIMIT, others)

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **more: asyncio.run(getattr(self.runs, name)(*given, **more))

    def start(self, number: str) -> None:
        run = Run(number, None, b"request", WAITING)
        stored = Stored(number, ME, None, b"[]", WAITING)
        self.begin(stored, run, Chunk(0, 2, b"a\n\nb\n\n"))

    def die(self) -> None:
        self.life.close()
        if not self._dead:
            self.store.close()
        self._dead = True


@pytest.fixture
def planes(tmp_path) -> Iterator[tuple[Plane, Plane]]:
    pair = Plane(tmp_path / "r.db"), Plane(tmp_path / "r.db")
    yield pair
    for plane in pair:
        plane.die()


def test_a_lock_shows_who_lives(tmp_path):
    path = str(tmp_path / "planes")
    one, other, alone = Life(path), Life(path), Life(None)
    assert one.alive(one.number)
    assert one.alive(other.number)
    assert other.alive(one.number)
    assert not one.alive(alone.number)
    assert alone.alive(alone.number)
    assert not alone.alive(one.number)
    one.close()
    assert not other.alive(one.number)
    other.close()
    with pytest.raises(ConfigError, match="beside"):
        open_life(str(tmp_path / "no" / "r.db"))


def test_only_the_keeper_of_a_run_writes_it(planes):
    one, other = planes
    one.start("a")
    with pytest.raises(RunLostError):
        other.append("a", Chunk(2, 1, b"c\n\n"))
    with pytest.raises(RunLostError):
        other.finish("a", Chunk(2, 1, b"c\n\n"), DONE)
    assert other.look(()) == ([], [], set(), True)
    one.append("a", Chunk(2, 1, b"c\n\n", b"made"))
    assert other.events(ME, "a", -1) == (b"a\n\nb\n\nc\n\n", 2, False)
    assert other.events(ME, "a", 1) == (b"c\n\n", 2, False)
    one.finish("a", Chunk(3, 1, b"d\n\n"), DONE)
    assert other.look(()) == ([], [], set(), False)
    assert other.events(ME, "a", 2) == (b"d\n\n", 3, True)
    assert other.events(ME, "a", 9) == (b"", 9, True)
    with pytest.raises(ResponseNotFoundError):
        other.events(YOU, "a", -1)


def test_tokens_may_come_without_events(planes):
    """Part of a character, say: it is made from tokens, but cannot be told yet."""
    one, other = planes
    one.start("a")
    for made in (b"1", b"2"):
        one.append("a", Chunk(2, 0, b"", made))
    assert one.events(ME, "a", -1) == (b"a\n\nb\n\n", 1, False)
    assert one.events(ME, "a", 1) == (b"", 1, False)
    one.append("a", Chunk(2, 1, b"c\n\n", b"3"))
    one.append("a", Chunk(3, 0, b"", b"4"))
    assert one.events(ME, "a", 0) == (b"b\n\nc\n\n", 2, False)
    one.die()
    [run] = other.look(()).adopted
    assert (run.num_events, run.progress) == (3, [b"", b"1", b"2", b"3", b"4"])
    other.finish("a", Chunk(3, 1, b"d\n\n"), DONE)
    assert other.events(ME, "a", 1) == (b"c\n\nd\n\n", 3, True)


def test_a_run_whose_keeper_is_dead_is_taken_once(planes, tmp_path):
    one, other = planes
    third = Plane(tmp_path / "r.db")
    one.start("a")
    one.append("a", Chunk(2, 1, b"c\n\n", b"made"))
    one.die()
    assert other.look((), adopting=False).adopted == []
    [run] = other.look(()).adopted
    assert (run.request, run.response, run.num_events, run.attempts, run.served_here) == (
        b"request",
        WAITING,
        3,
        1,
        True,
    )
    assert run.progress == [b"", b"made"]
    assert third.look(()).adopted == []
    third.die()
    assert other.look({"a"}) == ([], [], set(), True)
    other.append("a", Chunk(3, 1, b"d\n\n"))


def test_attempts_count_until_a_run_gets_ahead(planes, tmp_path):
    one, other = planes
    one.start("a")
    one.die()
    [run] = other.look(()).adopted
    other.die()
    third = Plane(tmp_path / "r.db")
    [run] = third.look(()).adopted
    assert run.attempts == 2
    third.append("a", Chunk(2, 1, b"c\n\n"))
    [run] = third.look(()).adopted  # it was left after an error of the store: nobody has died
    assert (run.attempts, run.num_events) == (0, 3)
    third.die()


def test_the_runs_of_another_model_are_left_until_nobody_comes(planes, tmp_path, monkeypatch):
    one, _ = planes
    one.start("a")
    one.die()
    stranger = Plane(tmp_path / "r.db", "another")
    assert stranger.look(()).adopted == []
    monkeypatch.setattr(run_store, "ABANDONED_S", -1.0)
    neighbour = Plane(tmp_path / "r.db", "another", ["model"])
    assert neighbour.look(()).adopted == []  # this server has that model, which may be asleep
    neighbour.die()
    [run] = stranger.look(()).adopted
    assert not run.served_here
    stranger.die()


def test_what_is_not_complete_goes_last(planes):
    one, _ = planes
    one.start("a")
    for i in range(40):
        stored = Stored(f"r{i}", ME, None, b" " * 100_000, DONE)
        asyncio.run(one.store.save(stored))
    assert one.events(ME, "a", -1).last == 1
    with pytest.raises(ResponseNotFoundError):
        asyncio.run(one.store.load(ME, "r0"))


def test_what_is_complete_counts_what_is_kept_of_it(planes):
    one, _ = planes
    run = Run("a", None, b"r" * 100_000, WAITING)
    stored = Stored("a", ME, None, b"[]", WAITING)
    one.begin(stored, run, Chunk(0, 2, b"a\n\nb\n\n"))
    one.append("a", Chunk(2, 1, b"c\n\n", random.Random(1).randbytes(50_000)))
    one.finish("a", Chunk(3, 1, b"d\n\n", b"made"), DONE)
    base = one.store._base
    [[counted]] = base.execute("SELECT bytes FROM responses").fetchall()
    [[kept]] = base.execute(
        "SELECT length(items) + length(response) + (SELECT SUM(length(events)) FROM events) "
        "FROM responses"
    ).fetchall()
    assert counted == kept < 1000


def test_a_deleted_run_is_lost(planes):
    one, other = planes
    one.start("a")
    asyncio.run(other.store.delete(ME, "a"))
    assert one.look({"a"}).lost == {"a"}
    with pytest.raises(RunLostError):
        one.append("a", Chunk(2, 1, b"c\n\n"))
    base = one.store._base
    assert base.execute("SELECT COUNT(*) FROM events").fetchone() == (0,)


OLD = """
CREATE TABLE responses (id TEXT PRIMARY KEY, owner BLOB NOT NULL, previous TEXT,
    used_at REAL NOT NULL, bytes INTEGER NOT NULL, items BLOB NOT NULL, response BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX by_use ON responses (used_at, bytes);
PRAGMA user_version = 1;
"""


def test_a_file_of_the_first_version_is_brought_up_to_date(tmp_path):
    path = tmp_path / "r.db"
    base = sqlite3.connect(path)
    base.executescript(OLD)
    values = ("old", ME, None, 4e9, 6, b"[]", DONE)
    base.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)", values)
    base.commit()
    base.close()
    for _ in range(2):
        plane = Plane(path)
        found = asyncio.run(plane.store.load(ME, "old"))
        assert found == Stored("old", ME, None, b"[]", DONE)
        plane.die()
    plane = Plane(path)
    plane.start("new")
    plane.die()
