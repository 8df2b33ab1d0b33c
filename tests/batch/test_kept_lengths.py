"""Learnt output lengths outlive the process that learnt them, even if that is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from older import write_older_base

from weft.batch import kept_lengths
from weft.batch.database import BASE
from weft.batch.folder import StoreLimits
from weft.batch.kept_lengths import changed_nodes
from weft.batch.store import BatchStore
from weft.blend.lengths import MOST_NODES, NEVER, LengthCurves, LengthTable, Running

LIMITS = StoreLimits(reserve_bytes=0)
PROMPTS = [[kind] * 40 + [number] for kind in (1, 2) for number in range(20)]


@pytest.fixture
def clock():
    return [1000.0]


@pytest.fixture
def store(tmp_path, clock):
    made = BatchStore(tmp_path, LIMITS, lambda: clock[0])
    yield made
    made.close()


class Open:
    """An order that runs something at one node."""

    def __init__(self, node: int, *ages: int) -> None:
        self.node, self.ages = node, ages

    def running(self) -> Running:
        count = len(self.ages)
        return Running(np.full(count, self.node), np.array(self.ages), np.full(count, NEVER))


def expected(table: LengthTable, scope: bytes = b"/v1/completions") -> list[float]:
    nodes = table.places(PROMPTS, scope)
    return LengthCurves(table.snapshot()).expected(nodes)[[0, 20]].tolist()


def filled() -> LengthTable:
    table = LengthTable()
    nodes = table.places(PROMPTS, b"/v1/completions")
    for output, at in ((30, 0), (300, 20)):
        for _ in range(100):
            table.add(int(nodes[at]), output)
    return table


def test_the_next_process_knows_what_the_last_one_learnt(store):
    table = filled()
    before = expected(table)
    store.lengths.save("model", changed_nodes(table))
    assert changed_nodes(table) == []
    after = store.lengths.load("model")
    assert expected(after) == pytest.approx(before)
    assert before == pytest.approx([30, 300], rel=0.1)
    assert expected(after, b"/v1/responses") != pytest.approx(before, rel=0.5)
    assert len(store.lengths.load("another model")) == 1


def test_only_what_has_changed_is_written(store):
    table = filled()
    store.lengths.save("model", changed_nodes(table))
    node = int(table.places(PROMPTS, b"/v1/completions")[0])
    table.add(node, 5)
    saved = [int.from_bytes(one.hash, "little") for one in changed_nodes(table)]
    assert saved == [table.hashes[table.parents[node]], table.hashes[node]]


def test_what_runs_is_saved_as_it_is_and_not_twice(store):
    """Half of the answers have 10 tokens, half many: those run when the process is killed."""
    table = LengthTable()
    node = int(table.places(PROMPTS, b"/v1/completions")[0])
    for _ in range(100):
        table.add(node, 10)
    running = Open(node, *[200] * 100)
    table.watch(running)
    for _ in range(3):  # each time in place of the time before
        store.lengths.save("model", changed_nodes(table))
    after = store.lengths.load("model")
    alive = LengthCurves(after.snapshot())
    again = after.places(PROMPTS, b"/v1/completions")[:1]
    up_to_200 = alive.expected(again, 0, np.array([200]))[0]
    assert up_to_200 == pytest.approx(0.5 * 10 + 0.5 * 200, rel=0.05)


def test_a_table_that_is_read_has_room_for_what_is_new(store):
    table = LengthTable()
    for start in range(0, 40_000, 2000):
        found = [[n] * 40 + [q] for n in range(1 + start, 2001 + start) for q in range(8)]
        for node in set(table.places(found, b"chats").tolist()):
            table.add(node, 10)
    assert len(table) > 0.9 * MOST_NODES
    store.lengths.save("model", changed_nodes(table))
    after = store.lengths.load("model")
    assert MOST_NODES // 2 <= len(after) <= MOST_NODES // 2 + 1


def test_rows_are_bounded_and_age(store, clock, monkeypatch):
    monkeypatch.setattr(kept_lengths, "MOST_ROWS", 4)
    for number in range(6):
        clock[0] += 10
        store.lengths.save(f"model {number}", changed_nodes(filled())[:1])
    counts = [len(store.lengths.load(f"model {number}")) for number in range(6)]
    rows = store._base.execute("SELECT COUNT(*) FROM lengths").fetchone()
    assert rows == (4,)
    assert counts == [1, 1, 2, 2, 2, 2], "those that were used last stay; all have a root"
    clock[0] += kept_lengths.KEPT_S + 1
    store.lengths.save("model 9", changed_nodes(filled())[:1])
    assert store._base.execute("SELECT COUNT(*) FROM lengths").fetchone() == (1,)


@pytest.mark.parametrize("damage", [b"", b"x", b"\x78\x9c\x03\x00\x00\x00\x00\x01"])
def test_rows_that_cannot_be_read_are_as_if_they_were_not_there(store, damage):
    store.lengths.save("model", changed_nodes(filled()))
    with store._base:
        store._base.execute("UPDATE lengths SET ended = ?", (damage,))
    table = store.lengths.load("model")
    assert expected(table)[0] == expected(table)[1], "nothing is known"


def test_an_older_data_base_gets_the_table(tmp_path):
    write_older_base(tmp_path / BASE, "lengths")
    again = BatchStore(tmp_path, LIMITS)
    again.lengths.save("model", changed_nodes(filled()))
    assert len(again.lengths.load("model")) == 4
    again.close()


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from test_kept_lengths import LIMITS, changed_nodes, filled
from weft.batch.store import BatchStore
store = BatchStore(Path(sys.argv[1]), LIMITS)
store.lengths.save("model", changed_nodes(filled()))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_saved_outlives_a_kill(tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(Path(__file__).parent)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    store = BatchStore(tmp_path, LIMITS)
    assert expected(store.lengths.load("model")) == pytest.approx([30, 300], rel=0.1)
    store.close()


def test_four_full_tables_are_kept():
    """The number stands where numpy is not imported for it."""
    assert kept_lengths.MOST_ROWS == 4 * MOST_NODES
