"""Processes for work on what anybody may send, isolated with limits; restarted when they end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from weft.core.errors import RendererDeadError
from weft.text.frames import receive, send

PATIENCE_S = 30.0  # for a reply that takes a few seconds of CPU time at most
_SILENT = 0  # instead of an exit code: no reply for so long


@dataclass(frozen=True)
class Failure:
    """The reason why there is no result.

    Attributes:
        kind: "syntax", "refused" (by the template itself), "failed", "long", "memory" or "time".
    """

    kind: str
    detail: str = ""


class IsolatedProcess:
    """A process that answers one request after the other. Safe to share between threads.

    It starts with the first request. In a forked child it is another one, started there.

    Attributes:
        module: that the process runs; see ``isolated_process.answer_requests``.
        work: what it does, for errors.
    """

    module: ClassVar[str]
    work: ClassVar[str]

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None

    def start(self) -> None:
        """Start the process unless it runs, without waiting for it.

        Raises:
            RendererDeadError: there can be no other process.
        """
        with self._own_lock():
            self._connected()

    def close(self) -> None:
        """End the process; the next request starts another one."""
        with self._own_lock():
            if self._link is not None:
                self._end()

    def _own_lock(self) -> threading.Lock:
        if self._pid != os.getpid():  # the lock may be held by a thread that a fork left behind
            self._reset()
        return self._lock

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any] | Failure:
        """Send a request, and once more if the process was killed meanwhile."""
        reply = self._exchange(request)
        if reply == -signal.SIGKILL:
            reply = self._exchange(request)
        return self._explain(reply) if isinstance(reply, int) else reply

    def _exchange(self, request: Mapping[str, Any]) -> dict[str, Any] | Failure | int:
        """The reply of the process; without one, its exit code.

        That is `_SILENT` if it had to be ended.
        """
        link = self._connected()
        silent = False
        try:
            send(link, request)
            answer = receive(link)
        except TimeoutError:
            answer, silent = None, True
        except OSError:  # closed by a process that has ended
            answer = None
        except BaseException:  # half a request, or a reply that is never read
            self._end(patience_s=0)
            raise
        if answer is None:
            code = self._end(patience_s=0 if silent else 1)
            return _SILENT if silent else code
        reply, _ = answer
        if reply["last"]:
            self._end()
            self._connected()
        return Failure(reply["error"], reply.get("detail", "")) if "error" in reply else reply

    def _explain(self, code: int) -> Failure:
        """Explain the end of the process by its exit code."""
        self._connected()  # the next one starts while this failure is told
        if code == -signal.SIGPROF:
            return Failure("time")
        if code in (-signal.SIGSEGV, -signal.SIGABRT):  # what native code makes of no memory
            return Failure("memory")
        raise RendererDeadError(
            f"The process that {self.work} ended, or did not answer; try again."
        )

    def _connected(self) -> socket.socket:
        if self._process is not None and self._process.poll() is not None:
            self._end()  # it was killed between requests
        if self._link is not None:
            return self._link
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise self._cannot_start(error) from None
        command = [sys.executable, "-m", self.module]
        command += [str(theirs.fileno()), str(os.getpid())]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise self._cannot_start(error) from None
        finally:
            theirs.close()
        ours.settimeout(PATIENCE_S)
        self._link = ours
        return ours

    def _end(self, patience_s: float = 1.0) -> int:
        """End the process, unless it ends by itself, and return its exit code."""
        assert self._link is not None
        assert self._process is not None
        self._link.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        self._process.kill()
        code = self._process.wait()
        self._link = self._process = None
        return code

    def _cannot_start(self, error: OSError) -> RendererDeadError:
        return RendererDeadError(
            f"The process that {self.work} cannot be started: {error.strerror}."
        )
