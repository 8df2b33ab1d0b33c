"""Processes that are forked before they are started."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from weft.core.early import EarlyProcesses

CHILD = """
import os, sys
prepared = []
def prepare():
    prepared.append(os.getpid())
def main():
    given = [*sys.argv[1:], sys.stdin.readline().strip()]
    print("child", os.getpid(), *prepared, os.getsid(0), *given)
    for number in sys.argv[1:]:
        os.write(int(number), b"here")
    sys.exit(7)
if __name__ == "__main__":
    main()
"""
PARENT = """
import os, sys
from weft.core.early import EarlyProcesses
def start():
    theirs, ours = os.pipe()
    ends = [os.pipe() for _ in range(3)]
    command = [sys.executable, "-m", "early_child", *(str(end[1]) for end in ends)]
    process = early.start(
        command, stdin=theirs, pass_fds=[end[1] for end in ends], start_new_session=True
    )
    os.write(ours, b"settings\\n")
    print("parent", process.pid, process.wait(10), *(end[1] for end in ends), flush=True)
    print("told", *(os.read(end[0], 9).decode() for end in ends), flush=True)
early = EarlyProcesses()
early.fork("early_child")
"""


def run(tmp_path, code: str) -> list[list[str]]:
    """The words of each line of a parent, and of its children, sorted."""
    (tmp_path / "early_child.py").write_text(CHILD)
    command = [sys.executable, "-c", PARENT + textwrap.dedent(code)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=True
    )
    assert not done.stderr
    return sorted(line.split() for line in done.stdout.splitlines())


HERE = ["told", "here", "here", "here"]


def test_it_has_arguments_input_and_descriptors_of_the_same_numbers(tmp_path):
    (_, *child), (_, pid, code, *numbers), told = run(tmp_path, "start()")
    assert told == HERE
    assert code == "7"
    assert child == [pid, pid, pid, *numbers, "settings"]


def test_the_next_one_is_a_new_process(tmp_path):
    *children, first, second, told, again = run(tmp_path, "start()\nstart()")
    assert told == again == HERE
    assert first[1] != second[1]
    assert sorted(map(len, children)) == [7, 8]  # only the early one had to prepare


def test_one_that_has_died_is_replaced(tmp_path):
    code = """
        child = early._waiting["early_child"][0]
        child.kill()
        child.wait(10)
        start()
    """
    assert run(tmp_path, code)[-1] == HERE


def test_one_that_is_just_ending_is_replaced(tmp_path):
    """It has closed its end already, and is no zombie yet."""
    code = """
        child, end = early._waiting["early_child"]
        child.kill()
        child.wait(10)
        child.poll = lambda: None
        start()
    """
    assert run(tmp_path, code)[-1] == HERE


def test_it_may_open_as_many_files_as_the_system_allows(tmp_path):
    limit = """
        import resource
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, most))
        early.fork("early_child")
        child = early._waiting["early_child"][0]
        while resource.prlimit(child.pid, resource.RLIMIT_NOFILE) != (most, most):
            pass
        print("raised")
    """
    assert run(tmp_path, limit) == [["raised"]]


@pytest.mark.parametrize("ending", ["sys.exit()", "os.kill(os.getpid(), 9)", "os._exit(0)"])
def test_one_that_is_not_started_ends_with_its_parent(tmp_path, ending):
    (tmp_path / "early_child.py").write_text(CHILD)
    code = PARENT + f"print(early._waiting['early_child'][0].pid, flush=True)\n{ending}\n"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    child, end = int(done.stdout), time.monotonic() + 30
    while time.monotonic() < end:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)
                continue
        return
    raise AssertionError("it lives")


@pytest.mark.parametrize("place", ["def prepare():", "def main():"])
def test_an_error_ends_the_child_with_a_traceback_and_reaches_nobody_else(tmp_path, place):
    """Above it on the stack is the parent's code, which may suppress such an error."""
    (tmp_path / "early_child.py").write_text(CHILD.replace(place, f"{place}\n    open('nowhere')"))
    code = """
        import contextlib, os, sys
        from weft.core.early import EarlyProcesses
        early = EarlyProcesses()
        with contextlib.suppress(OSError):
            early.fork("early_child")
        print("parent goes on", flush=True)
        child, _ = early._waiting["early_child"]
        start = [sys.executable, "-m", "early_child"]
        if child.poll() is None:
            with contextlib.suppress(OSError):
                child = early.start(start, stdin=0, pass_fds=[], start_new_session=True)
        print("exit", child.wait(30), flush=True)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True, text=True, cwd=tmp_path, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["parent goes on", "exit 1"]
    assert "FileNotFoundError: [Errno 2] No such file or directory: 'nowhere'" in done.stderr


def test_without_an_early_one_a_process_is_started():
    process = EarlyProcesses().start(
        [sys.executable, "-m", "this"], stdin=0, pass_fds=[], stdout=subprocess.DEVNULL
    )
    assert process.wait(30) == 0
