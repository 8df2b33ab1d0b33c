"""Deaths of child processes: noticed, described, and answered with growing patience."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from weft.core.errors import EngineDeadError
from weft.core.process import LONGEST_DELAY_S, MOST_DEATHS, STABLE_S, Backoff, describe_exit, exited


def child(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-S", "-c", code])


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise SystemExit(7)", 7),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("import sys; sys.stdin.close()", 0),
    ],
)
def test_the_exit_code_of_a_child_is_waited_for(code, expected):
    process = child(code)
    assert asyncio.run(exited(process)) == expected
    assert process.returncode == expected


def test_a_child_that_is_dead_already_is_found():
    process = child("pass")
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    before = len(os.listdir("/proc/self/fd"))
    assert asyncio.run(exited(process)) == 0
    assert len(os.listdir("/proc/self/fd")) == before


def test_giving_up_waiting_leaves_nothing_open():
    process = child("import time; time.sleep(60)")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(exited(process), 0.05))
    assert len(os.listdir("/proc/self/fd")) == before
    process.kill()
    process.wait()


def test_exit_codes_in_words():
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-signal.SIGSEGV) == "signal SIGSEGV"
    assert describe_exit(-63) == "signal 63"


def test_patience_grows_and_ends():
    backoff = Backoff("engine")
    delays = [backoff.delay_s(0.5, "signal SIGSEGV") for _ in range(MOST_DEATHS - 1)]
    assert delays[:4] == [0.0, 0.1, 0.2, 0.4]
    assert delays == sorted(delays)
    assert delays[-1] == LONGEST_DELAY_S
    with pytest.raises(EngineDeadError, match="16 times in a row, at last by signal SIGSEGV"):
        backoff.delay_s(0.5, "signal SIGSEGV")


def test_who_has_worked_once_is_restarted_for_ever():
    backoff = Backoff("engine")
    backoff.delay_s(STABLE_S, "")
    assert [backoff.delay_s(0.5, "") for _ in range(2000)][-1] == LONGEST_DELAY_S
    assert Backoff("engine", proven=True).delay_s(0.5, "") == 0.0


def test_who_has_lived_long_starts_afresh():
    backoff = Backoff("engine")
    for _ in range(5):
        backoff.delay_s(0.5, "")
    assert [backoff.delay_s(STABLE_S, ""), backoff.delay_s(0.5, "")] == [0.0, 0.1]
