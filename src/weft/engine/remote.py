"""Starts an engine process and speaks with it through a ring. Torch-free."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from weft.core import errors
from weft.core.errors import EngineDeadError, WeftError
from weft.core.process import describe_exit
from weft.core.served import ServedModel
from weft.ring.client import RingClient
from weft.ring.segment import RingFds, create_ring

STOP_TIMEOUT_S = 10.0

# oneDNN keeps a primitive for each of the last 1024 shapes of a matrix product, and malloc an arena
# for each thread: with batches of every size that grows to several times the model's memory.
MEMORY_SETTINGS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8", "MALLOC_ARENA_MAX": "2"}


@dataclass(frozen=True)
class EngineProcess:
    """A child process that runs ``weft.engine.process``.

    Attributes:
        report: where its lines will come.
        laps: seconds of each part of its start that others waited for, once it is ready.
    """

    process: subprocess.Popen[bytes]
    report: IO[str]
    laps: dict[str, float] = field(default_factory=dict)

    @classmethod
    def start(
        cls,
        settings: Mapping[str, Any],
        rings: Sequence[RingFds],
        *,
        background: bool = False,
        returning_bytes: int = 0,
    ) -> EngineProcess:
        """Start it; it builds the engine, and touches the rings in ``wait_until_ready``.

        Args:
            background: be ready later, but take no time from others.
            returning_bytes: memory that another engine gives back before this one is used.

        Raises:
            EngineDeadError: there can be no other process.
        """
        read_end, write_end = os.pipe()
        command = [sys.executable, "-m", "weft.engine.process", "--report", str(write_end)]
        command += ["--parent", str(os.getpid()), "--returning-bytes", str(returning_bytes)]
        command += ["--since", str(time.monotonic())]
        command += ["--background"] * background
        if threading.current_thread() is threading.main_thread():
            command.append("--by-main-thread")
        for ring in rings:
            command += ["--ring", str(ring)]
        inherited = [write_end, *(fd for ring in rings for fd in ring.pass_fds)]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                pass_fds=inherited,
                start_new_session=True,
                env={**MEMORY_SETTINGS, **os.environ},
            )
        except OSError as error:
            os.close(read_end)
            raise EngineDeadError(f"The engine cannot be started: {error.strerror}.") from None
        finally:
            os.close(write_end)
        engine = cls(process, os.fdopen(read_end))
        engine._say(json.dumps(dict(settings)))
        return engine

    def wait_until_ready(self) -> ServedModel:
        """Let it serve the rings as soon as it is built, and wait for that.

        Every engine that had the rings before must be dead. Raises the typed error with which the
        engine failed to start.
        """
        self._say("go")
        served = read_report(self._hear())
        self.laps.update(json.loads(self._hear())["attached"])
        self.report.close()
        return served

    def _say(self, line: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # whoever listens will hear that it is dead
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()

    def _hear(self) -> str:
        line = self.report.readline()
        if not line:
            why = describe_exit(self.process.wait())
            raise EngineDeadError(f"The engine ended while it was starting ({why}).")
        return line

    def stop(self) -> int:
        """End the process and return its exit code."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.write(b"stop\n")
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()  # which flushes
        if self.process.poll() is None:
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait()


def read_report(line: str) -> ServedModel:
    """Parse the engine's line; a failure is raised as the error that the engine had."""
    report = json.loads(line)
    if "served" in report:
        return ServedModel.from_json(report["served"])
    kind = getattr(errors, report["error"]["type"], WeftError)
    raise kind(report["error"]["message"])


class RemoteEngine:
    """An engine in a process of its own, for one Python program.

    Args:
        meanwhile: is called while the engine starts.

    Attributes:
        client: takes requests; its sinks are called on a thread of its own.
        served: facts of the model.
    """

    def __init__(self, settings: Mapping[str, Any], meanwhile: Callable[[], None]) -> None:
        self._pid = os.getpid()
        ring = self._ring = create_ring()
        self._process = EngineProcess.start(settings, [ring])
        try:
            meanwhile()
            self.served = self._process.wait_until_ready()
            self.client = RingClient(ring)
        except BaseException:
            self._process.stop()
            ring.close()
            raise
        self._closed = False
        self.client.watch_engine(os.pidfd_open(self._process.process.pid))
        self.client.run_in_thread()

    def close(self) -> None:
        """End the engine; open requests end with an error. May be called twice.

        In a forked child it does nothing: the engine is the parent's.
        """
        if not self._closed and os.getpid() == self._pid:
            self._closed = True
            self._process.stop()
            self.client.close()
            self._ring.close()
