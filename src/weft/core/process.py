"""Starts, watches and ends groups of processes. Linux only."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import queue
import resource
import select
import signal
import subprocess
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from weft.core.errors import EngineDeadError

STABLE_S = 10.0
BEAT_S = 5.0  # between two signs of life of a process at rest, and two looks at them
SAME_SIGNAL_S = 1.0  # signals within that count as one: they may go to a process and its parent
BEATS = 4  # at least, in the time after which one without a sign counts as dead
FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 5.0
STALLED = signal.SIGUSR1  # to an engine without progress: it records its sequences
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
MOST_DEATHS = 16
UNKNOWN_STATUS = 255 << 8  # as if the exit code were 255
FIRST_FOR_MEMORY = 100  # a tenth of the limit, which no request plane takes
HIGHEST_SCORE = 1000


def beat_s(*patiences_s: float) -> float:
    """How often a process at rest gives a sign of life, and how often that is looked at.

    Args:
        patiences_s: times after which one without a sign counts as dead, or stalled.
    """
    return min(BEAT_S, *(patience_s / BEATS for patience_s in patiences_s))


def set_process_title(title: str) -> None:
    """Show ``title`` in ps and top."""
    from setproctitle import setproctitle  # engines in a process of their own have one

    setproctitle(title)


def process_state(pid: int) -> str:
    """The state of a process as one letter (proc_pid_stat(5)); empty if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return ""


def raise_file_limit() -> None:
    """Let this process open as many files as the system allows; most start with 1024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def give_back_freed_memory() -> None:
    """Return to the system what this process has freed; glibc keeps most of it otherwise."""
    with contextlib.suppress(AttributeError):  # other C libraries have no such call
        ctypes.CDLL(None).malloc_trim(0)


def offer_to_memory_killer() -> None:
    """Have the kernel end this process before its siblings when memory runs out.

    The kernel ends the process that takes the most: its pages, and ``oom_score_adj`` thousandths of
    the limit. Any process may raise that of its own; the processes that it forks inherit it.
    """
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "r+") as file:
        score = min(HIGHEST_SCORE, int(file.read()) + FIRST_FOR_MEMORY)
        file.seek(0)
        file.write(str(score))


def start_child(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process that may call ``die_with``; takes what ``Popen`` takes, and raises the same.

    To the kernel the parent of a process is the *thread* that started it, so that is one here that
    lives as long as this process: the main thread, or one that does nothing else.
    """
    if threading.current_thread() is threading.main_thread():
        return subprocess.Popen(command, **options)
    started: Future[subprocess.Popen[bytes]] = Future()
    cores = os.sched_getaffinity(0)  # of this thread, which the child would inherit

    def start() -> None:
        try:
            os.sched_setaffinity(0, cores)
            started.set_result(subprocess.Popen(command, **options))
        except Exception as error:
            started.set_exception(error)

    _lasting_thread(os.getpid()).put(start)
    return started.result()


@functools.cache
def _lasting_thread(pid: int) -> queue.SimpleQueue[Callable[[], None]]:  # noqa: ARG001
    """Work for a thread that ends with this process; a fork of it needs another one."""
    work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def run() -> None:
        while True:
            work.get()()

    threading.Thread(target=run, name="weft-start", daemon=True).start()
    return work


def die_with(parent_pid: int) -> None:
    """End this process at once when its parent ends, however it ends.

    The kernel sees to it, even while this process is stopped or stuck in native code; the parent
    must have started it by ``start_child``, or adopted it. A parent that has ended before is found
    by its pidfd.
    """
    die_with_parent_thread()
    try:
        parent = os.pidfd_open(parent_pid)
    except ProcessLookupError:
        os._exit(1)
    threading.Thread(target=_wait_and_exit, args=(parent,), daemon=True).start()


def die_with_parent_thread(number: int = signal.SIGKILL) -> None:
    """Have the kernel signal this process when the thread that started or adopted it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parents end. Reap them with ``reap_orphans``."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def fork_orphan() -> int | None:
    """Fork a process that falls to the next ancestor that adopts orphans, and leads a session.

    Returns its number, 0 if there can be none, and None in the process itself. When this returns,
    it has its new parent and its session.
    """
    read_end, write_end = os.pipe()
    try:
        between = os.fork()
    except OSError:
        between = -1
    if between == 0:
        with contextlib.suppress(OSError):
            pid = os.fork()
            if pid == 0:
                os.close(read_end)
                os.setsid()
                os.close(write_end)  # the parent reads until this
                return None
            os.write(write_end, str(pid).encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        said = pipe.read()
    if between > 0:
        os.waitpid(between, 0)
    return int(said or b"0")


def reap_orphans(own: Collection[int]) -> bool:
    """Reap orphans that have ended and that no other code waits for.

    Args:
        own: children that other code waits for.

    Returns:
        False if one of those is to be waited for first: call this again then.
    """
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # there are no children
            return True
        if ended is None:
            return True
        if ended.si_pid in own:
            return False
        with contextlib.suppress(ChildProcessError):  # other code has just waited for it
            os.waitpid(ended.si_pid, 0)


def _wait_and_exit(pidfd: int) -> None:
    select.select([pidfd], [], [])
    os._exit(1)


class Process(Protocol):
    """The interface that ``subprocess.Popen`` and ``Child`` share."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: int, /) -> None: ...
    def kill(self) -> None: ...


class Child:
    """A child of this process that it did not start itself; used like ``subprocess.Popen``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it lives."""
        with self._lock:
            if self._code is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:  # it was reaped as an orphan before it was known here
                    pid, status = self.pid, UNKNOWN_STATUS
                self._code = os.waitstatus_to_exitcode(status) if pid else None
            return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its exit code. Raises subprocess.TimeoutExpired."""
        if (code := self.poll()) is not None:
            return code
        with contextlib.suppress(ProcessLookupError):  # another thread has just waited for it
            pidfd = os.pidfd_open(self.pid)
            try:
                end = select.poll()
                end.register(pidfd, select.POLLIN)
                end.poll(None if timeout is None else 1000 * timeout)
            finally:
                os.close(pidfd)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return code

    def send_signal(self, number: int, /) -> None:
        """Send a signal, unless it has ended."""
        with self._lock:
            if self._code is None:
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        self.send_signal(signal.SIGKILL)


async def exited(process: Process) -> int:
    """Wait until a child has ended; its exit code, negative for a signal."""
    import asyncio  # engines have none

    loop = asyncio.get_running_loop()
    pidfd = os.pidfd_open(process.pid)
    ended = asyncio.Event()
    loop.add_reader(pidfd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
    return process.wait()


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"


class Backoff:
    """Delays before restarts: none after a first death, then 0.1 s doubling up to the longest.

    Who has lived for ``STABLE_S`` starts afresh.

    Args:
        longest_s: of the delays.
        proven: whether one has worked. From then on there is no end of patience: whatever kills
            them comes from outside, or from requests that will be found out.
    """

    def __init__(
        self, name: str, *, proven: bool = False, longest_s: float = LONGEST_DELAY_S
    ) -> None:
        self._name = name
        self._longest_s = longest_s
        self._proven = proven
        self._deaths = 0

    def delay_s(self, lived_s: float, why: str) -> float:
        """Seconds to wait before the restart after this death.

        Raises:
            EngineDeadError: it is the 16th in a row, and none has ever lived for ``STABLE_S``.
        """
        stable = lived_s >= STABLE_S
        self._proven |= stable
        self._deaths = 1 if stable else self._deaths + 1
        if self._deaths >= MOST_DEATHS and not self._proven:
            raise EngineDeadError(
                f"The {self._name} ended {self._deaths} times in a row, at last by {why}."
            )
        if self._deaths == 1:
            return 0.0
        doublings = min(self._deaths - 2, 10)
        return float(min(FIRST_DELAY_S * 2**doublings, self._longest_s))
