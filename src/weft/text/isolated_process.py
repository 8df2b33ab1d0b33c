"""The side of an isolated process that does the work: answers requests, each within a budget.

Requests and replies are JSON behind their length. Each request has a budget of CPU time and of
memory. A timer of the kernel ends the process when the time is up, whatever runs then; memory
beyond the budget is a MemoryError, after which it ends by itself.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

from setproctitle import setproctitle

from weft.text.frames import receive, send

KEPT_BYTES = 512 * 2**20  # of address space, with which a process is replaced by a fresh one
MAX_DETAIL_CHARS = 500

Reply = dict[str, Any]


def answer_requests(title: str, answer: Callable[[dict[str, Any], int], Reply]) -> None:
    """Answer requests until the parent, or its end of the socket, is gone.

    Args:
        title: of the process.
        answer: gives the reply to a request of so many bytes.
    """
    setproctitle(title)
    link = socket.socket(fileno=int(sys.argv[1]))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent decides
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        parent = os.pidfd_open(int(sys.argv[2]))
    except ProcessLookupError:
        return
    last = False
    with contextlib.suppress(ConnectionError):  # the parent has closed its end
        while not last and _readable(link, parent) and (request := receive(link)) is not None:
            reply = answer(*request)
            last = reply["last"] = reply.get("error") == "memory" or _mapped_bytes() > KEPT_BYTES
            send(link, reply)


def failed(kind: str, detail: str) -> Reply:
    """The reply that there is no result; see ``isolated.Failure``."""
    return {"error": kind, "detail": detail[:MAX_DETAIL_CHARS]}


def _readable(link: socket.socket, parent: int) -> bool:
    """Wait for a request; False if the parent has ended."""
    ready, _, _ = select.select([link.fileno(), parent], [], [])
    return parent not in ready


@contextlib.contextmanager
def budget(cpu_s: float, num_bytes: int) -> Iterator[None]:
    """Let the process take so much CPU time, or be killed, and so much memory on top of what it
    has, or meet a MemoryError."""
    resource.setrlimit(resource.RLIMIT_AS, (_mapped_bytes() + num_bytes, resource.RLIM_INFINITY))
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


_STATM = os.open("/proc/self/statm", os.O_RDONLY)


def _mapped_bytes() -> int:
    """The address space that the process has."""
    return int(os.pread(_STATM, 64, 0).split()[0]) * resource.getpagesize()
