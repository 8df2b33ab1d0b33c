"""Quotas in memory that request planes share: exact over processes, and given back by the dead."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.errors import ParameterError
from weft.server import quota_board
from weft.server.quota import (
    MINUTE_NS,
    Level,
    Quota,
    after_taking,
    duration,
    level,
    seconds_up,
    wait_ns,
)
from weft.server.quota_board import (
    LOCK_TRIES,
    QuotaBoard,
    TooManyKeysError,
    create_quota_board,
    release_plane,
)

ALICE, BOB = b"a" * 32, b"b" * 32
S = 10**9


@pytest.fixture
def memory() -> Iterator[int]:
    fd = create_quota_board(3)
    yield fd
    os.close(fd)


# -- buckets --------------------------------------------------------------------------------------


def test_a_bucket_holds_a_minute_s_worth_and_fills_evenly():
    now = 1000 * S
    full = after_taking(60, 0, now, 1)
    assert level(60, full, now) == Level(60, 59, S)
    full = after_taking(60, full, now, 59)
    assert level(60, full, now) == Level(60, 0, 60 * S)
    assert wait_ns(60, full, now, 1) == S
    assert wait_ns(60, full, now + S, 1) == 0
    assert level(60, full, now + 30 * S) == Level(60, 30, 30 * S)
    assert wait_ns(60, full, now, 61) is None
    assert level(60, after_taking(60, full, now, -10), now).remaining == 10


@given(
    st.integers(1, 10**6),
    st.lists(st.tuples(st.integers(0, 10 * S), st.integers(1, 10**4)), max_size=50),
)
def test_no_minute_gives_more_than_twice_the_limit_and_what_waits_is_served(limit, asked):
    """A full bucket and a minute's worth: the bound of every token bucket."""
    now, full, taken = MINUTE_NS, 0, []
    for pause, amount in asked:
        now += pause
        wait = wait_ns(limit, full, now, amount)
        if wait:
            assert wait_ns(limit, full, now + wait, amount) == 0
            assert wait_ns(limit, full, now + wait - 1, amount) != 0
        elif wait == 0:
            before = level(limit, full, now).remaining
            full = after_taking(limit, full, now, amount)
            assert level(limit, full, now).remaining <= max(0, before - amount) + 1
            taken.append((now, amount))
    for start, _ in taken:
        assert sum(n for at, n in taken if start <= at < start + MINUTE_NS) <= 2 * limit


@pytest.mark.parametrize(
    ("time_ns", "text"),
    [(0, "0s"), (1, "1ms"), (20_000_000, "20ms"), (1_200_000_000, "1.2s"), (360 * S, "6m0s")],
)
def test_times_are_written_as_openai_does(time_ns, text):
    assert duration(time_ns) == text


def test_one_waits_for_whole_seconds_and_never_none():
    assert [seconds_up(n) for n in (0, 1, S, S + 1)] == [1, 1, 1, 2]


@pytest.mark.parametrize("value", [0, -1, 1.5, "many", True, 2**63])
def test_limits_make_sense(value):
    for name in ("requests_per_minute", "tokens_per_minute", "max_concurrent_requests"):
        with pytest.raises(ParameterError, match=name):
            Quota(**{name: value})


# -- the board ------------------------------------------------------------------------------------


def test_requests_in_progress_count_over_all_planes(memory):
    planes = [QuotaBoard(memory, number) for number in range(3)]
    places = [board.enter(ALICE, 4) for board in (*planes, planes[0])]
    assert None not in places
    assert [board.enter(ALICE, 4) for board in planes] == [None] * 3
    assert planes[1].enter(BOB, 1) is not None
    planes[2].leave(places[2])
    assert planes[0].num_open(ALICE) == 3
    assert planes[1].enter(ALICE, 4) is not None


def test_a_dead_plane_gives_back_what_it_had_open(memory):
    survivor = QuotaBoard(memory, 0)
    survivor.enter(ALICE, None)
    pid = os.fork()
    if pid == 0:
        board = QuotaBoard(memory, 1)
        for _ in range(3):
            board.enter(ALICE, 4)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert survivor.enter(ALICE, 4) is None
    release_plane(memory, 1)
    assert survivor.num_open(ALICE) == 1
    dead = QuotaBoard(memory, 2)
    dead.enter(ALICE, None)
    QuotaBoard(memory, 2)  # its successor
    assert survivor.num_open(ALICE) == 1


def test_nothing_is_lost_of_what_processes_take_at_once(memory, monkeypatch):
    """A bucket that stays empty: its word is the sum of all that was taken, to the nanosecond."""
    monkeypatch.setattr(quota_board, "LOCK_TRIES", 10**6)  # however busy the machine is
    limits, each, planes = (1000, None), 3000, 3
    board = QuotaBoard(memory, 0)
    board.correct(ALICE, limits, (10**6, 0))
    before = board._full[0]
    children = []
    for number in range(planes):
        pid = os.fork()
        if pid == 0:
            own = QuotaBoard(memory, number)
            for _ in range(each):
                own.correct(ALICE, limits, (1, 0))
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
    assert board._full[0] - before == planes * each * MINUTE_NS // limits[0]


def test_a_plane_that_is_killed_at_any_moment_leaves_sense_and_no_lock(memory, monkeypatch):
    survivor = QuotaBoard(memory, 0)
    pauses: list[float] = []  # of waits for the lock, which the dead do not hold
    own = survivor.enter(ALICE, None)
    for number in range(20):
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            board = QuotaBoard(memory, 1)
            while True:
                board.take(ALICE, (10**6, 10**9), (1, 1000))
                board.enter(ALICE, None)
                board.enter(os.urandom(32), None)
                os.write(write_end, b".")
        os.read(read_end, 1)
        time.sleep(0.0005 * number)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(read_end)
        os.close(write_end)
        release_plane(memory, 1)
        with monkeypatch.context() as patched:
            patched.setattr(quota_board.time, "sleep", pauses.append)
            assert survivor.num_open(ALICE) == 1
            waits, levels = survivor.take(ALICE, (10**6, 10**9), (1, 1))
        assert waits == [0, 0]
        assert all(0 < found.remaining < found.limit for found in levels if found is not None)
    assert pauses == []
    survivor.leave(own)
    assert survivor.num_open(ALICE) == 0


def test_all_buckets_or_none(memory):
    board = QuotaBoard(memory, 0)
    waits, levels = board.take(ALICE, (10, 100), (1, 1000))
    assert waits == [0, None]
    assert levels == [Level(10, 10, 0), Level(100, 100, 0)]
    waits, levels = board.take(ALICE, (10, None), (1, 1000))
    assert (waits, levels[1]) == ([0, 0], None)
    assert levels[0] is not None
    assert levels[0].remaining == 9
    board.correct(ALICE, (10, 100), (-1, 150))  # more than there was: a debt
    waits, levels = board.take(ALICE, (10, 100), (1, 1))
    assert waits[0] == 0
    assert waits[1] > 29 * S
    assert [found.remaining for found in levels] == [10, 0]


def test_a_holder_of_the_lock_that_stands_still_stops_nobody(memory, monkeypatch):
    board = QuotaBoard(memory, 0)
    stuck = os.open(f"/proc/self/fd/{memory}", os.O_RDWR)
    fcntl.fcntl(stuck, fcntl.F_OFD_SETLK, quota_board._flock(fcntl.F_WRLCK))
    pauses: list[float] = []
    monkeypatch.setattr(quota_board.time, "sleep", pauses.append)
    assert board.enter(ALICE, 1) is not None
    assert len(pauses) == LOCK_TRIES
    assert board.enter(ALICE, 1) is None  # nor does it wait each time
    assert len(pauses) == LOCK_TRIES + 1
    os.close(stuck)
    assert board.num_open(ALICE) == 1
    assert len(pauses) == LOCK_TRIES + 1


def test_slots_of_keys_that_use_nothing_are_given_to_others(memory, monkeypatch):
    monkeypatch.setattr(quota_board, "SLOTS", 4)
    first, second = QuotaBoard(memory, 0), QuotaBoard(memory, 1)
    names = [bytes([number]) * 32 for number in range(10)]
    kept = first.enter(names[0], None)
    first.take(names[1], (60, None), (60, 0))
    for name in names[2:]:
        place = second.enter(name, None)
        assert place not in (None, kept)
        second.leave(place)
    assert first.num_open(names[0]) == 1
    assert second.take(names[1], (60, None), (30, 0))[0][0] > 0
    for name in names[2:4]:
        second.enter(name, None)
    with pytest.raises(TooManyKeysError):
        first.enter(names[9], None)
