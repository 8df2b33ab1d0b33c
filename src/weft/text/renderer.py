"""The client of the template renderer process; restarts it whenever it has ended."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from weft.core.errors import RendererDeadError
from weft.text.frames import receive, send

PATIENCE_S = 30.0  # for a reply that takes a few seconds of CPU time at most
_SILENT = 0  # instead of an exit code: no reply for so long
MAX_SOURCE_CHARS = 128 * 1024  # the longest template that is known has 40,000


@dataclass(frozen=True)
class TemplateSource:
    """The text of a template and the name that the renderer knows it by."""

    text: str
    digest: str

    @classmethod
    def of(cls, text: str) -> TemplateSource:
        return cls(text, hashlib.sha256(text.encode("utf-8", "replace")).hexdigest())


@dataclass(frozen=True)
class Failure:
    """The reason why there is no result.

    Attributes:
        kind: "syntax", "refused" (by the template itself), "failed", "long", "memory" or "time".
    """

    kind: str
    detail: str = ""


class Renderer:
    """The process that renders templates. Safe to share between threads, which take turns.

    It starts with the first request. In a forked child it is another one, started there.
    """

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

    def compile(self, source: TemplateSource) -> frozenset[str] | Failure:
        """Compile a template; return the names of the variables that it reads.

        Raises:
            RendererDeadError: the process cannot be started, or has ended for no known reason.
        """
        if len(source.text) > MAX_SOURCE_CHARS:
            return Failure("syntax", f"it is longer than {MAX_SOURCE_CHARS} characters")
        with self._own_lock():
            reply = self._ask({"template": source.digest, "source": source.text})
        return reply if isinstance(reply, Failure) else frozenset(reply["variables"])

    def render(
        self,
        source: TemplateSource,
        variables: Mapping[str, Any],
        alphabet: str | None,
        max_chars: int,
    ) -> str | Failure:
        """Render a template.

        Args:
            variables: JSON values.
            alphabet: the characters of the `Alphabet` that texts among them are quoted in, if any.
            max_chars: of the text.

        Raises:
            RendererDeadError: as `compile`.
            ValueError: JSON cannot say one of the variables.
        """
        request = {
            "template": source.digest,
            "variables": variables,
            "alphabet": alphabet,
            "max_chars": max_chars,
        }
        with self._own_lock():
            reply = self._ask(request)
            if reply == Failure("unknown"):  # to a process that has not seen it yet
                reply = self._ask({"template": source.digest, "source": source.text})
                reply = reply if isinstance(reply, Failure) else self._ask(request)
        return reply if isinstance(reply, Failure) else str(reply["text"])

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
            "The process that renders chat templates ended, or did not answer; try again."
        )

    def _connected(self) -> socket.socket:
        if self._process is not None and self._process.poll() is not None:
            self._end()  # it was killed between requests
        if self._link is not None:
            return self._link
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise _cannot_start(error) from None
        command = [sys.executable, "-m", "weft.text.render_process"]
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
            raise _cannot_start(error) from None
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


def _cannot_start(error: OSError) -> RendererDeadError:
    return RendererDeadError(
        f"The process that renders chat templates cannot be started: {error.strerror}."
    )


@cache
def shared_renderer() -> Renderer:
    """The renderer of this process."""
    return Renderer()
