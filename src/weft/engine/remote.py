"""Starts an engine process and talks to it through a ring. Torch-free."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import IO, Any

from weft.core import errors
from weft.core.config import EngineConfig
from weft.core.early import Starter
from weft.core.errors import EngineDeadError, EngineOutOfMemoryError, WeftError
from weft.core.memory import MemoryKills
from weft.core.process import Process, describe_exit, start_child
from weft.core.served import ServedModel
from weft.core.starting import has_bars
from weft.engine.forkserver import MEMORY_SETTINGS, ForkServer
from weft.engine.links import EngineLinks
from weft.ring.client import RingClient
from weft.ring.segment import ring_of

STOP_TIMEOUT_S = 10.0
BROKEN = 1  # exit code of an engine that ends as another of its ranks has ended
LESS_MEMORY = "lower kv_memory, max_num_seqs or max_num_batched_tokens, or give it more memory"


@dataclass(frozen=True)
class EngineProcess:
    """A child process that runs ``weft.engine.process``.

    Attributes:
        orders: its standard input.
        report: where its lines will come.
        laps: seconds of each part of its start that others waited for, once it is ready.
        kills: to look at now and then, for a death to be put down to memory rightly.
    """

    process: Process
    orders: IO[bytes]
    report: IO[str]
    laps: dict[str, float] = field(default_factory=dict)
    kills: MemoryKills = field(default_factory=MemoryKills)

    @classmethod
    def start(
        cls,
        settings: Mapping[str, Any],
        links: EngineLinks,
        start: Starter = start_child,
        *,
        returning_bytes: int = 0,
        shown: str | None = None,
    ) -> EngineProcess:
        """Start it; it builds the engine, and touches the rings in ``wait_until_ready``.

        Args:
            returning_bytes: memory in use that the engine will have.
            shown: what users see of its start; see ``weft.core.starting``.

        Raises:
            EngineDeadError: there can be no other process.
        """
        with _Pipes() as pipes:
            command = [sys.executable, "-m", "weft.engine.process", *_arguments(links)]
            command += ["--returning-bytes", str(returning_bytes), *_showing(shown)]
            try:
                process = start(
                    [*command, "--report", str(pipes.report)],
                    stdin=pipes.orders,
                    pass_fds=[pipes.report, *links.pass_fds],
                    start_new_session=True,
                    env={**MEMORY_SETTINGS, **os.environ},
                )
            except OSError as error:
                raise EngineDeadError(f"The engine cannot be started: {error.strerror}.") from None
            return cls._told(process, pipes, settings)

    @classmethod
    async def fork(
        cls,
        settings: Mapping[str, Any],
        links: EngineLinks,
        server: ForkServer,
        *,
        standby: bool = False,
        returning_bytes: int = 0,
        patience_s: float | None = None,
        shown: str | None = None,
    ) -> EngineProcess:
        """As ``start``, but let the fork server start it.

        Args:
            standby: it is not needed at once.
            returning_bytes: memory that another engine gives back before this one is used.
            patience_s: with a fork server that is not ready yet.
        """
        arguments = [*_arguments(links), "--returning-bytes", str(returning_bytes)]
        arguments += ["--standby"] * standby + _showing(shown)
        with _Pipes() as pipes:
            process = await server.fork(arguments, pipes.orders, pipes.report, patience_s)
            return cls._told(process, pipes, settings)

    @classmethod
    def _told(cls, process: Process, pipes: _Pipes, settings: Mapping[str, Any]) -> EngineProcess:
        engine = cls(process, *pipes.take())
        engine._say(json.dumps(dict(settings)))
        return engine

    def wait_until_ready(self) -> ServedModel:
        """Have the engine serve the rings as soon as it is built, and wait for that.

        Every engine that had the rings before must be dead. Raises the typed error with which the
        engine failed to start.
        """
        self._say("go")
        served = read_report(self._hear())
        self.laps.update(json.loads(self._hear())["attached"])
        self.report.close()
        return served

    def _say(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # its end is reported to the waiting caller
            self.orders.write(line.encode() + b"\n")
            self.orders.flush()

    def _hear(self) -> str:
        line = self.report.readline()
        if not line:
            code = self.process.wait()
            why = self.why_ended(code)
            kind = EngineOutOfMemoryError if self.killed_for_memory(code) else EngineDeadError
            raise kind(f"The engine ended while it was starting ({why}).")
        return line

    def killed_for_memory(self, code: int) -> bool:
        """Whether it has just ended with this exit code because memory ran out."""
        return code in (-signal.SIGKILL, BROKEN) and self.kills.recent()

    def why_ended(self, code: int) -> str:
        """The reason why the process has just ended, in words."""
        why = describe_exit(code)
        if not self.killed_for_memory(code):
            return why
        return f"{why}: {self.kills.explain()}; {LESS_MEMORY}"

    def stop(self) -> int:
        """End the process and return its exit code."""
        if not self.orders.closed:
            self.orders.write(b"stop\n")
            with contextlib.suppress(BrokenPipeError):
                self.orders.close()  # which flushes
        if self.process.poll() is None:
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait()


def _showing(shown: str | None) -> list[str]:
    """The arguments by which an engine shows its start."""
    return [] if shown is None else ["--first", shown]


def _arguments(links: EngineLinks) -> list[str]:
    parent, since = str(os.getpid()), str(time.monotonic())
    return ["--parent", parent, "--since", since, *links.arguments()]


class _Pipes:
    """Orders to an engine, and its report. At the end of the block its ends are closed here.

    Attributes:
        orders, report: descriptors of the engine's ends.
    """

    def __enter__(self) -> _Pipes:
        self.orders, self._orders = os.pipe()
        self._report, self.report = os.pipe()
        return self

    def take(self) -> tuple[IO[bytes], IO[str]]:
        """Take this side's descriptors; those not taken are closed as well."""
        ends = os.fdopen(self._orders, "wb"), os.fdopen(self._report)
        self._orders = self._report = -1
        return ends

    def __exit__(self, *_: object) -> None:
        for descriptor in (self.orders, self.report, self._orders, self._report):
            if descriptor >= 0:
                os.close(descriptor)


def read_report(line: str) -> ServedModel:
    """Parse the engine's line; a failure is raised as the error that the engine had."""
    report = json.loads(line)
    if "served" in report:
        return ServedModel.from_json(report["served"])
    kind = getattr(errors, report["error"]["type"], WeftError)
    raise kind(report["error"]["message"])


class RemoteEngine:
    """An engine in its own process, for one Python program.

    Args:
        meanwhile: is called while the engine starts.

    Attributes:
        client: takes requests; its sinks are called on a thread of its own.
        served: facts of the model.
    """

    def __init__(self, settings: Mapping[str, Any], meanwhile: Callable[[], None]) -> None:
        self._pid = os.getpid()
        ring = self._ring = ring_of(EngineConfig.from_mapping(settings))
        # A program that computes what it has needs no targets kept, nor an engine busy while idle.
        given = {"scheduler": "fcfs", **settings}
        shown = "bars" if has_bars() else None
        self._process = EngineProcess.start(given, EngineLinks([ring]), shown=shown)
        try:
            meanwhile()
            self.served = self._process.wait_until_ready()
            self.client = RingClient(ring)
        except BaseException:
            self._process.stop()
            ring.close()
            raise
        self._closed = False
        self.client.watch_engine(os.pidfd_open(self._process.process.pid), self._on_death)
        self.client.run_in_thread()

    def _on_death(self) -> None:
        code = self._process.process.wait()
        error = EngineDeadError("The engine has stopped; try again later.")
        if self._process.killed_for_memory(code):
            error = EngineOutOfMemoryError(f"The engine ended ({self._process.why_ended(code)}).")
        self.client.fail_all(error)

    def close(self) -> None:
        """End the engine; open requests end with an error. May be called twice.

        In a forked child it does nothing: the engine is the parent's.
        """
        if not self._closed and os.getpid() == self._pid:
            self._closed = True
            self._process.stop()
            self.client.close()
            self._ring.close()
