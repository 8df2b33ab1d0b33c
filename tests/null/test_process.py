"""Deaths of child processes: noticed, described, and answered with growing patience."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest

from weft.core.errors import EngineDeadError
from weft.core.process import (
    LONGEST_DELAY_S,
    MOST_DEATHS,
    STABLE_S,
    Backoff,
    describe_exit,
    exited,
    start_child,
)


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


def lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def test_children_of_other_threads_outlive_them_but_not_the_process():
    """Two threads that end, and a fork that has none of them: each child has its own parent."""
    code = textwrap.dedent("""
        import os, subprocess, sys, threading
        from weft.core.process import start_child
        sleeper = "import os, sys; from weft.core.process import die_with;"
        sleeper += "die_with(os.getppid()); print('up', flush=True); sys.stdin.read()"
        def start():
            command = [sys.executable, "-c", sleeper]
            child = start_child(command, stdin=ours, stdout=subprocess.PIPE)
            child.stdout.readline()
            print(child.pid, flush=True)
        ours, _ = os.pipe()
        for _ in range(2):
            thread = threading.Thread(target=start)
            thread.start()
            thread.join()
        if os.fork() == 0:
            thread = threading.Thread(target=start)
            thread.start()
            thread.join()
        sys.stdin.read()
    """)
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        children = [psutil.Process(int(parent.stdout.readline())) for _ in range(3)]
        assert all(lives(child) for child in children)
        for child in children:
            child.suspend()
        for process in psutil.Process(parent.pid).children():
            if process not in children:
                process.kill()  # the fork
        parent.kill()
    try:
        end = time.monotonic() + 30
        while any(lives(child) for child in children):
            assert time.monotonic() < end, "a child has outlived the process"
            time.sleep(0.01)
    finally:
        for child in filter(lives, children):
            child.kill()


def test_the_child_of_a_thread_has_its_cores():
    def start() -> None:
        os.sched_setaffinity(0, cores)
        print_cores = "import os; print(sorted(os.sched_getaffinity(0)))"
        child = start_child([sys.executable, "-S", "-c", print_cores], stdout=subprocess.PIPE)
        told.append(child.communicate()[0].decode().strip())

    told: list[str] = []
    for cores in ([core] for core in sorted(os.sched_getaffinity(0))[:2]):
        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
        assert told.pop() == str(cores)


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


def test_an_engine_whose_parent_has_given_up_reports_to_nobody():
    from weft.engine.process import _tell

    reader, writer = os.pipe()
    with open(writer, "wb", buffering=0) as report:
        _tell(report, {"served": "first"})
        assert os.read(reader, 100) == b'{"served": "first"}\n'
        os.close(reader)
        _tell(report, {"attached": {}})
