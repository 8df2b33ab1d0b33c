"""Processes that are forked before there is anything for them to do.

Most of a server's start is imports. So the command line forks the first process of each kind before
it reads its arguments: that one shares what is imported already, imports the rest meanwhile, and
waits until it is started with a command and descriptors.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

from weft.core.errors import InvariantError
from weft.core.process import (
    Child,
    Process,
    die_with_parent_thread,
    raise_file_limit,
    start_child,
)

Starter = Callable[..., Process]  # takes what ``start_child`` takes

MESSAGE_BYTES = 2**17
MOST_DESCRIPTORS = 250  # that one message carries
STANDARD = 3  # descriptors that every process has


class EarlyProcesses:
    """The parent's side. To be used by the main thread, before there are others."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[Child, socket.socket]] = {}

    def fork(self, module: str) -> None:
        """Fork a process that will run ``main`` of a module; it never returns there.

        Before it knows its arguments it calls ``prepare`` of the module. Whatever it raises ends it
        with a traceback, as if it had been started as a program.

        Raises:
            OSError: the system has no room for the process.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent, blocked = os.getpid(), signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            pid = os.fork()
            if not pid:  # the parent ends at Ctrl-C, and this one with it
                signal.signal(signal.SIGINT, signal.SIG_IGN)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if pid:
            theirs.close()
            self._waiting[module] = Child(pid), ours
            return
        try:
            ours.close()
            for _, end in self._waiting.values():
                end.close()
            _run(module, theirs, parent)
        except Exception:  # none must reach who called this in the parent
            traceback.print_exc()
            sys.exit(1)

    def start(
        self, command: Sequence[str], *, stdin: int, pass_fds: Collection[int], **options: Any
    ) -> Process:
        """Start ``python -m MODULE ...``, as ``start_child`` in a session of its own.

        The process that waits for that takes it, with the environment that ``prepare`` gave it.
        Without one, or if it has died, it is a new one.
        """
        child, end = self._waiting.pop(command[2], (None, None))
        descriptors = [stdin, *dict.fromkeys(pass_fds)]
        if child is None or end is None:
            return start_child(command, stdin=stdin, pass_fds=pass_fds, **options)
        with end, contextlib.suppress(OSError):  # it is just ending
            if child.poll() is None and len(descriptors) <= MOST_DESCRIPTORS:
                message = json.dumps([command[3:], descriptors[1:]]).encode()
                socket.send_fds(end, [message], descriptors)
                return child
        return start_child(command, stdin=stdin, pass_fds=pass_fds, **options)


def fork_early(modules: Sequence[str]) -> Starter:
    """Fork a process for each module, if the system allows; return what starts them, and others."""
    early = EarlyProcesses()
    with contextlib.suppress(OSError):  # what is started later says what is wrong
        for module in modules:
            early.fork(module)
    return early.start


def _run(module: str, end: socket.socket, parent: int) -> NoReturn:
    """Be the process of a module, from the fork to its exit."""
    os.setsid()
    die_with_parent_thread()
    if os.getppid() != parent:
        os._exit(1)
    raise_file_limit()
    gc.disable()  # imports leave hardly anything to collect
    kind = importlib.import_module(module)
    kind.prepare()
    gc.enable()
    sys.argv = [str(kind.__file__), *_started(end)]
    sys.exit(kind.main())


def _started(end: socket.socket) -> list[str]:
    """Wait for the command; the descriptors have the same numbers here as in the parent then."""
    message, received, _, _ = socket.recv_fds(end, MESSAGE_BYTES, MOST_DESCRIPTORS)
    if not message:
        os._exit(0)  # the parent does without this process
    end.close()
    arguments, numbers = json.loads(message)
    free = max([STANDARD, *numbers]) + 1
    moved = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, free) for number in received]
    for number in received:
        os.close(number)
    taken = [number for number in numbers if os.path.exists(f"/proc/self/fd/{number}")]
    if taken or len(moved) != 1 + len(numbers):
        raise InvariantError(f"An early process has no room for the descriptors {numbers}.")
    for now, number in zip(moved, (0, *numbers), strict=True):
        os.dup2(now, number)
        os.close(now)
    if sys.stdin is None:  # the parent had none
        sys.stdin = os.fdopen(0, closefd=False)
    return [str(argument) for argument in arguments]
