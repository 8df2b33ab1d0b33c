"""Runs parts in process groups of their own, with deadlines that hold whatever they do.

One thread reads what all of them print and never waits without limit: a process that does not end
when it is killed, as one that is stuck in a driver, is left behind.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from parts import ROOT, Part

TERM_S = 2.0  # from SIGTERM to SIGKILL
KILL_S = 3.0  # from SIGKILL until a process is left behind
LATE_S = TERM_S + KILL_S  # by which a part may exceed its limit
TICK_S = 0.2
LAST_LINES = 12  # of a part that failed
LONGEST_LINE = 64 * 1024
LOG_BYTES = 700 * 1024  # of a part's output that the log keeps
SHOWN_BYTES = 64 * 1024  # of a part's output that are shown; its figures always are

Take = Callable[["Outcome", str], bool]  # whether a line of a part states a figure


@dataclass
class Outcome:
    """How a part ended, and what it found.

    Attributes:
        status: ``running``, ``passed``, ``failed``, ``too long``, ``not run`` or ``done before``.
        why: for a part that did not pass.
    """

    name: str
    status: str = "running"
    seconds: float = 0.0
    why: str = ""
    figures: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    last_lines: list[str] = field(default_factory=list)


class Running:
    """A part that runs."""

    def __init__(
        self, part: Part, environment: Mapping[str, str], limit_s: float, take: Take, log: TextIO
    ) -> None:
        self.part, self.outcome = part, Outcome(part.name)
        self._take, self._limit_s = take, limit_s
        self._started = time.monotonic()
        self._told: list[int] = []  # the signals so far
        self._line, self._cut, self._shown, self._kept = b"", False, 0, 0
        self._log = log
        self._process = subprocess.Popen(
            list(part.command),
            cwd=ROOT,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self.pipe = self._process.stdout.fileno()
        os.set_blocking(self.pipe, False)

    @property
    def ended(self) -> bool:
        return self.outcome.status != "running"

    def read(self) -> bool:
        """Take what has been printed, at most a few buffers of it; return whether more may come."""
        for _ in range(16):
            try:
                found = os.read(self.pipe, 65536)
            except BlockingIOError:
                return True
            except OSError:
                found = b""
            if not found:
                return False
            *lines, rest = (self._line + found).split(b"\n")
            for line in lines:
                self._state(line)
            self._line = rest
            if len(rest) > LONGEST_LINE:
                self._state(rest)
                self._line, self._cut = b"", True
        return True

    def check(self) -> None:
        """End the part if it has ended, or if its time is up."""
        now = time.monotonic() - self._started
        code = self._process.poll()
        if code is not None:
            self._finish("too long" if self._told else "failed" if code else "passed", code)
        elif now > self._limit_s + LATE_S:
            self.outcome.notes.append(
                f"left behind: process {self._process.pid}, {self._state_of()}"
            )
            self._finish("too long", None)
        elif now > self._limit_s + TERM_S:
            self._signal(signal.SIGKILL)
        elif now > self._limit_s:
            self._signal(signal.SIGTERM)

    def stop(self) -> None:
        """Let its time be up now."""
        self._limit_s = min(self._limit_s, time.monotonic() - self._started)

    def _signal(self, number: int) -> None:
        if number not in self._told:
            self._told.append(number)
            kill_group(self._process.pid, number)

    def _finish(self, status: str, code: int | None) -> None:
        kill_group(self._process.pid, signal.SIGKILL)  # what it has started
        self.read()
        if self._line:
            self._state(self._line)
        assert self._process.stdout is not None
        self._process.stdout.close()
        outcome = self.outcome
        outcome.status, outcome.seconds = status, time.monotonic() - self._started
        if status == "too long":
            outcome.why = f"ended after {self._limit_s:.0f} s"
        elif status == "failed":
            assert code is not None
            outcome.why = f"signal {-code}" if code < 0 else f"exit code {code}"

    def _keep(self, line: str) -> None:
        self._kept += len(line)
        if self._kept <= LOG_BYTES:
            with contextlib.suppress(OSError):  # a full disk
                self._log.write(f"[{self.part.name}] {line}\n")
                self._log.flush()

    def _state(self, raw: bytes) -> None:
        """Take a line; what follows the first part of one that is too long is left out."""
        if self._cut:
            self._cut = False
            return
        text = raw.decode(errors="replace").rstrip()
        line = "".join(
            x if x.isprintable() or x == "\t" else "\N{REPLACEMENT CHARACTER}" for x in text
        )
        self._keep(line)
        outcome = self.outcome
        if not self._take(outcome, line):
            outcome.last_lines = [*outcome.last_lines, line[:500]][-LAST_LINES:]
            self._shown += len(line)
            if self._shown > SHOWN_BYTES:
                if self._shown - len(line) <= SHOWN_BYTES:
                    print(f"[{self.part.name}] ... the rest is in the log", flush=True)
                return
        print(f"[{self.part.name}] {line}", flush=True)

    def _state_of(self) -> str:
        """Whether a process is stuck in the kernel, and where."""
        folder = Path("/proc") / str(self._process.pid)
        try:
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            place = (folder / "wchan").read_text() or "unknown"
        except (OSError, IndexError):
            return "of unknown state"
        return f"state {state}, waiting in {place}"


def kill_group(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, number)


class Runner:
    """Runs parts one after the other, and some beside the others.

    Args:
        take: gets every line; returns whether it states a figure.
        end: gets every outcome as soon as it is one.
        log: gets the lines of all parts.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        take: Take,
        end: Callable[[Outcome], None],
        log: TextIO,
    ) -> None:
        self._environment, self._take, self._end, self._log = environment, take, end, log
        self._selector = selectors.DefaultSelector()
        self._running: list[Running] = []

    def start(self, part: Part, limit_s: float) -> Running:
        running = Running(part, self._environment, limit_s, self._take, self._log)
        self._selector.register(running.pipe, selectors.EVENT_READ, running)
        self._running.append(running)
        return running

    def wait(self, awaited: Sequence[Running]) -> None:
        """Read and check all that run until some have ended."""
        while not all(each.ended for each in awaited):
            self._turn()

    def wait_for(self, name: str) -> None:
        """Wait for a part by its name, if it runs."""
        self.wait([each for each in self._running if each.part.name == name])

    def stop(self) -> None:
        """End all that run."""
        for each in self._running:
            each.stop()
        self.wait(list(self._running))

    def _turn(self) -> None:
        for key, _ in self._selector.select(TICK_S):
            if not key.data.read():
                self._selector.unregister(key.fd)
        for each in list(self._running):
            each.check()
            if each.ended:
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(each.pipe)
                self._running.remove(each)
                self._end(each.outcome)
