"""Stored responses: found by their owner only, kept over restarts, forgotten in time."""

from __future__ import annotations

import asyncio
import sqlite3
import stat
import subprocess
import sys
from typing import Any

import orjson
import pytest

from weft.core.errors import ConfigError, PromptTooLongError
from weft.server import response_store
from weft.server.listen import listen
from weft.server.options import ServerOptions
from weft.server.response_store import (
    TIDY_EVERY,
    ResponseNotFoundError,
    ResponseStore,
    Stored,
    StoreError,
)

ME, YOU = b"m" * 32, b"y" * 32


def stored(number: str, previous: str | None = None, owner: bytes = ME, size: int = 0) -> Stored:
    items = orjson.dumps([{"id": f"in_{number}", "text": "x" * size}])
    response = orjson.dumps(
        {"id": number, "status": "completed", "output": [{"id": f"out_{number}"}]}
    )
    return Stored(number, owner, previous, items, response)


class Keeping:
    """A store whose coroutines are run to their end."""

    def __init__(self, path: Any = None, max_bytes: int = 2**20, keep_s: float = 60.0) -> None:
        self.store = ResponseStore(None if path is None else str(path), max_bytes, keep_s)

    def __getattr__(self, name: str) -> Any:
        return lambda *given: asyncio.run(getattr(self.store, name)(*given))

    def has(self, number: str) -> bool:
        try:
            self.load(ME, number)
        except ResponseNotFoundError:
            return False
        return True

    def __enter__(self) -> Keeping:
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()


@pytest.fixture
def keeping():
    with Keeping() as keeping:
        yield keeping


def test_a_response_is_its_owner_s(keeping):
    keeping.save(stored("a"))
    assert keeping.load(ME, "a") == stored("a")
    for look in (keeping.load, keeping.delete, keeping.conversation):
        with pytest.raises(ResponseNotFoundError):
            look(YOU, "a")
        with pytest.raises(ResponseNotFoundError):
            look(ME, "b")
    keeping.delete(ME, "a")
    assert not keeping.has("a")


def test_a_conversation_has_all_items_in_order(keeping):
    keeping.save(stored("a"))
    keeping.save(stored("b", "a"))
    keeping.save(stored("c", "b"))
    keeping.save(stored("other", "a"))
    ids = [item["id"] for item in keeping.conversation(ME, "c")]
    assert ids == ["in_a", "out_a", "in_b", "out_b", "in_c", "out_c"]
    keeping.delete(ME, "b")
    with pytest.raises(ResponseNotFoundError, match="'b'") as caught:
        keeping.conversation(ME, "c")
    assert caught.value.param == "previous_response_id"


def test_a_conversation_of_two_owners_is_not_read(keeping):
    keeping.save(stored("a", owner=YOU))
    keeping.save(stored("b", "a"))
    with pytest.raises(ResponseNotFoundError):
        keeping.conversation(ME, "b")


def test_a_conversation_may_be_too_long(keeping, monkeypatch):
    keeping.save(stored("a"))
    keeping.save(stored("b", "a", size=1000))
    monkeypatch.setattr(response_store, "MAX_CONVERSATION_BYTES", 1000)
    with pytest.raises(PromptTooLongError):
        keeping.conversation(ME, "b")
    monkeypatch.undo()
    monkeypatch.setattr(response_store, "MAX_TURNS", 1)
    with pytest.raises(PromptTooLongError):
        keeping.conversation(ME, "b")


def test_what_was_not_used_for_long_is_forgotten(tmp_path, monkeypatch):
    path = tmp_path / "r.db"
    clock = 1000.0
    monkeypatch.setattr(response_store.time, "time", lambda: clock)
    with Keeping(path) as keeping:
        for number, previous in (("a", None), ("b", "a"), ("c", None)):
            keeping.save(stored(number, previous))
        clock += 50
        keeping.conversation(ME, "b")  # uses a, too
        clock += 50
        for i in range(TIDY_EVERY):
            keeping.save(stored(f"new{i}"))
        assert [keeping.has(number) for number in "abc"] == [True, True, False]
    clock += 100
    with Keeping(path) as keeping:
        assert [keeping.has(number) for number in "abc"] == [False] * 3


def test_the_least_recently_used_go_when_there_is_too_much(tmp_path):
    path = tmp_path / "r.db"
    with Keeping(path) as keeping:
        for i in range(10):
            keeping.save(stored(f"r{i}", size=1000))
        keeping.conversation(ME, "r0")
    with Keeping(path, max_bytes=3500) as keeping:
        assert [i for i in range(10) if keeping.has(f"r{i}")] == [0, 8, 9]
    assert b"in_r5" not in path.read_bytes()


def test_a_file_is_private_and_outlives_its_process(tmp_path):
    path = tmp_path / "r.db"
    with Keeping(path) as keeping:
        keeping.save(stored("a"))
        modes = {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
        assert modes == {0o600}
        with Keeping(path) as other:  # as another request plane would
            other.save(stored("b", "a"))
        assert len(keeping.conversation(ME, "b")) == 4
    with Keeping(path) as keeping:
        assert keeping.load(ME, "b") == stored("b", "a")


WRITER = """
import asyncio, sys
from weft.server.response_store import ResponseStore, Stored
async def main():
    store = ResponseStore(sys.argv[1], 2**20, 60)
    print("ready", flush=True)
    for i in range(10**6):
        await store.save(Stored(f"r{i}", b"m" * 32, None, b"[]", b'{"output":[]}'))
        print(i, flush=True)
asyncio.run(main())
"""


def test_what_was_saved_survives_a_kill(tmp_path):
    path = tmp_path / "r.db"
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        seen = [writer.stdout.readline() for _ in range(20)]
        writer.kill()
    assert seen[0] == "ready\n"
    with Keeping(path) as keeping:
        assert keeping.has(f"r{int(seen[-1])}")


def test_wrong_files_are_refused_at_the_start(tmp_path):
    text = tmp_path / "text"
    text.write_text("these are no responses" * 100)
    foreign = tmp_path / "foreign.db"
    base = sqlite3.connect(foreign)
    base.execute("CREATE TABLE t (x)")
    base.commit()
    base.close()
    for path in (text, foreign, tmp_path, tmp_path / "no" / "folder.db"):
        with pytest.raises(ConfigError) as caught:
            listen(ServerOptions(port=0, responses_db=str(path)))
        assert caught.value.param == "responses_db"
        assert caught.value.message.count(str(path)) == 1
        assert "Errno" not in caught.value.message
    with pytest.raises(ConfigError, match="name a file that all request planes share"):
        ServerOptions(responses_db=":memory:")


def test_a_file_that_goes_bad_is_a_clear_error(tmp_path):
    path = tmp_path / "r.db"
    with Keeping(path) as keeping:
        keeping.save(stored("a"))
        base = sqlite3.connect(path)
        base.execute("DROP TABLE responses")
        base.close()
        with pytest.raises(StoreError):
            keeping.load(ME, "a")
