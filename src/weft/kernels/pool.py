"""Does tasks in parallel, each in a process of its own, as compilers may crash or hang.

A process that does costs its own task alone, which is tried once more when nothing
else runs; then it is given up.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NoReturn

from weft.core.process import describe_exit, die_with_parent_thread

DEADLINE_S = 180.0  # of one task; the slowest kernels take some 10 s on a busy core
MOST_WORDS = 600  # characters of an error


@dataclass(frozen=True)
class CompileTask:
    """What a process does.

    Attributes:
        run: is told whether it is to wait for no other process, and raises what stops it.
    """

    name: str
    run: Callable[[bool], None]


@dataclass(frozen=True)
class TaskOutcome:
    """What came of a task.

    Attributes:
        seconds: that it took, the wait for other processes included.
        error: why it is not done; empty if it is.
        full: whether there is no room for what it makes.
    """

    name: str
    seconds: float
    error: str = ""
    full: bool = False


@dataclass(frozen=True)
class _TaskProcess:
    task: CompileTask
    pid: int
    pidfd: int
    told: int  # where it says what came of it
    began: float


def do_all(
    tasks: Seq[CompileTask],
    workers: int,
    tell: Callable[[TaskOutcome], None] = lambda _: None,
    deadline_s: float = DEADLINE_S,
) -> list[TaskOutcome]:
    """Do tasks, so many at once; return what came of each. For a process with one thread.

    Args:
        tell: is called with each outcome as it comes.
    """
    outcomes: list[TaskOutcome] = []
    again: list[CompileTask] = []
    waiting, running = deque(tasks), list[_TaskProcess]()

    def finish(task: CompileTask, outcome: TaskOutcome, *, last: bool, lost: bool) -> None:
        if lost and not last:
            again.append(task)
            return
        outcomes.append(outcome)
        tell(outcome)

    def drain(most: int, *, last: bool) -> None:
        while waiting or running:
            while waiting and len(running) < most:
                running.append(_start(waiting.popleft(), alone=last))
            for one in _ended(running, deadline_s):
                running.remove(one)
                outcome, lost = _outcome(one, deadline_s)
                finish(one.task, outcome, last=last, lost=lost)

    try:
        drain(max(1, workers), last=False)
        waiting.extend(again)
        drain(1, last=True)
    finally:
        for one in running:
            _kill(one)
    return outcomes


def _start(task: CompileTask, *, alone: bool) -> _TaskProcess:
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        _do_and_exit(task, theirs, alone=alone)
    os.close(theirs)
    return _TaskProcess(task, pid, os.pidfd_open(pid), ours, time.monotonic())


def _do_and_exit(task: CompileTask, told: int, *, alone: bool) -> NoReturn:
    code = 1
    try:
        os.setsid()  # so that what it starts ends with it
        die_with_parent_thread()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        answer = {"error": "", "full": False}
        try:
            task.run(alone)
        except OSError as error:
            answer = {"error": str(error), "full": True}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:MOST_WORDS], "full": False}
        os.write(told, json.dumps(answer).encode())
        code = 0
    finally:
        os._exit(code)


def _ended(running: Seq[_TaskProcess], deadline_s: float) -> list[_TaskProcess]:
    """Wait until some have ended or are late; return these."""
    poll = select.poll()
    for one in running:
        poll.register(one.pidfd, select.POLLIN)
    now = time.monotonic()
    patience_s = min(one.began + deadline_s - now for one in running)
    ready = {handle for handle, _ in poll.poll(max(0.0, 1000 * patience_s))}
    now = time.monotonic()
    return [one for one in running if one.pidfd in ready or now >= one.began + deadline_s]


def _outcome(one: _TaskProcess, deadline_s: float) -> tuple[TaskOutcome, bool]:
    """End a process; return what came of it, and whether it did not say so itself."""
    late = not select.select([one.pidfd], [], [], 0)[0]
    code = _kill(one) if late else _reap(one)
    seconds = time.monotonic() - one.began
    with open(one.told, "rb") as pipe:
        told = pipe.read()
    if told:
        return TaskOutcome(one.task.name, seconds, **json.loads(told)), False
    why = f"it took more than {deadline_s:g} s" if late else f"{describe_exit(code)}"
    return TaskOutcome(one.task.name, seconds, f"its process ended: {why}"), True


def _kill(one: _TaskProcess) -> int:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(one.pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # it has no group of its own yet
        os.kill(one.pid, signal.SIGKILL)
    return _reap(one)


def _reap(one: _TaskProcess) -> int:
    _, status = os.waitpid(one.pid, 0)
    os.close(one.pidfd)
    return os.waitstatus_to_exitcode(status)
