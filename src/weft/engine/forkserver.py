"""The fork server: imports what engines need once, and forks new engines from itself.

The supervisor asks by a message with two descriptors, and gets the number of the new process. It
is the supervisor's own child as if that had started it: the fork server forks twice, and orphans
fall to the supervisor. So engines outlive the fork server, and die with the supervisor. The fork
server has a single thread, so that a fork copies no lock that another one holds.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import socket
import sys
import threading
from collections.abc import Sequence

from weft.core.early import Starter
from weft.core.errors import EngineDeadError
from weft.core.process import (
    Child,
    adopt_orphans,
    die_with_parent_thread,
    fork_orphan,
    set_process_title,
)
from weft.engine.driver import has_driver
from weft.engine.links import EngineLinks
from weft.engine.postpone import postpone

FORK_S = 5.0  # after which a fork server that is ready, but does not fork, hangs
MESSAGE_BYTES = 2**16
LOW_PRIORITY = 10  # a tenth of the time of others on a busy core
IMPORTED = ("weft.engine.build", "weft.kernels.cpu.stack")

# oneDNN keeps a primitive for each of the last 1024 shapes of a matrix product, and malloc an arena
# for each thread: with batches of every size that grows to several times the model's memory.
M_ARENA_MAX = -8  # as malloc.h says it
MEMORY_SETTINGS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8", "MALLOC_ARENA_MAX": "2"}


class ForkServer:
    """The supervisor's side.

    Args:
        links: of the engines.
        background: be ready later, but take no time from others.
        torch: its engines may need it, if there is a driver for it.
        start: how to start it.
    """

    def __init__(
        self, links: EngineLinks, start: Starter, *, background: bool, torch: bool
    ) -> None:
        adopt_orphans()
        self._end, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._end.setblocking(False)
        self._ready = False
        self._background = background
        command = [sys.executable, "-m", "weft.engine.process", "--fork-for", str(other.fileno())]
        command += ["--background"] * background + ["--torch"] * torch
        try:
            with open(os.devnull) as nothing:
                self.process = start(
                    command,
                    stdin=nothing.fileno(),
                    pass_fds=[other.fileno(), *links.pass_fds],
                    start_new_session=True,
                    env={**MEMORY_SETTINGS, **os.environ},
                )
        except OSError as error:
            self._end.close()
            raise EngineDeadError(f"No engine can be started: {error.strerror}.") from None
        finally:
            other.close()

    @property
    def ready(self) -> bool:
        """Whether its imports are done, so that it forks at once."""
        if not self._ready:
            with contextlib.suppress(OSError):  # it has said nothing yet, or has ended
                self._ready = bool(self._end.recv(MESSAGE_BYTES))
        return self._ready

    @property
    def soon(self) -> bool:
        """Whether it lives, and is ready as soon as one that would be started now."""
        return self.process.poll() is None and (self.ready or not self._background)

    async def fork(
        self, arguments: Sequence[str], orders: int, report: int, patience_s: float | None
    ) -> Child:
        """Have the fork server fork an engine as soon as it is ready.

        Args:
            arguments: of ``weft.engine.process``.
            orders, report: descriptors that the engine gets, the first as standard input.
            patience_s: with the imports.

        Raises:
            EngineDeadError: it has ended, hangs, or there can be no other process. Close it then:
                it may fork an engine later, which ends at once for lack of orders.
        """
        import asyncio  # the server has none

        try:
            if not self.ready:
                self._ready = bool(await asyncio.wait_for(self._hear(), patience_s))
            socket.send_fds(self._end, [json.dumps(arguments).encode()], [orders, report])
            pid = int(await asyncio.wait_for(self._hear(), FORK_S) or b"0")
        except (TimeoutError, OSError):
            pid = 0
        if not pid:
            raise EngineDeadError("The process that forks engines has failed.")
        return Child(pid)

    async def _hear(self) -> bytes:
        import asyncio

        return await asyncio.get_running_loop().sock_recv(self._end, MESSAGE_BYTES)

    def close(self) -> None:
        """End the fork server; the engines that it has forked continue. May be called twice."""
        self._end.close()
        self.process.kill()
        self.process.wait()


def serve_forks(end: socket.socket, *, background: bool, torch: bool) -> tuple[list[str], int, int]:
    """Import what engines need, then fork one for each message, until the other side closes.

    Returns only in a forked engine: its arguments, and the descriptors that came with them.
    """
    die_with_parent_thread()
    set_process_title("weft-forkserver")
    _import(background, torch)
    gc.freeze()  # a collection in an engine would write to, and so copy, all that is shared
    end.send(b"ready")
    while True:
        message, descriptors, _, _ = socket.recv_fds(end, MESSAGE_BYTES, 2)
        if not message:
            sys.exit(0)
        pid = fork_orphan()
        if pid is None:
            end.close()
            orders, report = descriptors
            return json.loads(message), orders, report
        for descriptor in descriptors:
            os.close(descriptor)
        end.send(str(pid).encode())


def limit_memory() -> None:
    """Give this process the memory settings of engines, as if it had been started with them."""
    for name, value in MEMORY_SETTINGS.items():
        os.environ.setdefault(name, value)
    with contextlib.suppress(AttributeError, ValueError):  # other C libraries have no such call
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, int(os.environ["MALLOC_ARENA_MAX"]))


def import_engine() -> None:
    """Import what every engine needs."""
    for name in IMPORTED:
        importlib.import_module(name)


def _import(background: bool, torch: bool) -> None:
    """Import all that takes time; in the background at a low priority.

    That of a thread cannot be raised again, nor can that of threads that it starts; so a thread of
    its own does it, after numpy, which starts some.
    """
    import numpy  # noqa: F401

    def work() -> None:
        if background:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW_PRIORITY)
        postpone("torch._meta_registrations")
        import_engine()
        if torch and has_driver():
            with contextlib.suppress(ImportError):  # an engine says so, if it needs it
                importlib.import_module("torch")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
