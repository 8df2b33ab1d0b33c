"""Rank 0 of a model that several processes compute: starts the other ranks and sends its plans.

Every rank runs the same executor on its part. Ranks of the last stage (of the one stage, unless the
layers are split over several) have all logits, so each of them chooses the same tokens; a rank that
chose others would end the engine. If rank 0 is none of them, the first of them sends the results to
it, and stages before hear of the tokens with a later plan.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import NoReturn

from weft.core import errors
from weft.core.config import EngineConfig
from weft.core.errors import EngineDeadError, WeftError
from weft.core.plan import StepPlan, StepResult
from weft.core.ports import Executor, Lease, Ticket
from weft.core.process import describe_exit, start_child
from weft.core.resolved import ResolvedConfig
from weft.engine.channel import Channel, RankTokens, Report, Step, Task
from weft.engine.forkserver import MEMORY_SETTINGS
from weft.engine.rank_meeting import DEATH_S, Ways, meet_watching, process_group
from weft.engine.rank_role import plan_of_stage

STOP_TIMEOUT_S = 5.0


@dataclass
class Followers:
    """The processes of the ranks from 1 on."""

    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    channels: list[Channel] = field(default_factory=list)
    closing: bool = False
    said: dict[int, str] = field(default_factory=dict)  # why ranks have ended
    first: int = 0  # the rank that has ended first; 0 for none

    def start(self, config: EngineConfig, resolved: ResolvedConfig, device: str) -> Ways:
        """Start them, and meet them when they can load.

        Raises:
            EngineDeadError: one of them could not start.
            WeftError: the typed error of a rank.
        """
        for rank in range(1, config.processes):
            self._start(rank)
        self.wait()
        with tempfile.TemporaryDirectory(prefix="weft-ranks-") as folder:
            for rank, channel in enumerate(self.channels, 1):
                with contextlib.suppress(OSError):  # it has ended, which is noticed below
                    channel.send(Task(asdict(config), resolved, rank, folder))
            ways = meet_watching(config, folder, device, self.explain)
        threading.Thread(target=self._watch, args=(ways,), daemon=True).start()
        return replace(ways, check=partial(self.explain, 0.0))

    def _start(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "weft.engine.rank_follower", "--rank", str(rank)]
        command += ["--channel", str(theirs.fileno()), "--parent", str(os.getpid())]
        environment = {**MEMORY_SETTINGS, **os.environ}
        with theirs:
            try:
                process = start_child(
                    command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment
                )
            except OSError as error:
                ours.close()
                raise EngineDeadError(f"Rank {rank} cannot start: {error.strerror}.") from None
        self.processes.append(process)
        self.channels.append(Channel(ours))

    def wait(self) -> None:
        """Wait until every rank says that it is as far as it should be.

        Raises:
            WeftError: the typed error of a rank.
            EngineDeadError: a rank has ended without one.
        """
        for rank in range(1, len(self.channels) + 1):
            self._wait_for(rank)

    def explain(self, within_s: float = DEATH_S) -> None:
        """Raise the error of a rank that has ended while it was starting, or does so in that time.

        Of several, rather one that lost no other: of another kind than EngineDeadError, or that of
        a rank that ended without a word.
        """
        end = time.monotonic() + within_s
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        found = []
        for rank, process in enumerate(self.processes, 1):
            if process.poll() is not None:
                report = self.channels[rank - 1].receive(Report)
                while report is not None and not report.error:  # it had come that far
                    report = self.channels[rank - 1].receive(Report)
                found.append((report is not None, rank, self._error_of(rank, report)))
        if found:
            found.sort(key=lambda one: (isinstance(one[2], EngineDeadError), *one[:2]))
            raise found[0][2]

    def _wait_for(self, rank: int) -> None:
        report = self.channels[rank - 1].receive(Report)
        if report is None and self.first not in (0, rank):
            return self._wait_for(self.first)  # without which this one may wait forever
        if report is None or report.error:
            raise self._error_of(rank, report)
        return None

    def _error_of(self, rank: int, report: Report | None) -> WeftError:
        """Why a rank did not start: by its last report, None if it ended without one."""
        if report is None:
            why = describe_exit(self.processes[rank - 1].wait())
            return EngineDeadError(f"Rank {rank} ended while it was starting ({why}).")
        kind: type[WeftError] = getattr(errors, report.error, WeftError)
        return kind(report.message)

    def send(self, step: Step) -> None:
        """Send the next step to every rank. Raises OSError if one has ended."""
        for channel in self.channels:
            channel.send(step)

    def result(self, rank: int) -> StepResult:
        """Wait for what a rank says of the oldest step. Raises EngineDeadError if it has ended."""
        report = self.channels[rank - 1].receive(Report)
        if report is not None and report.result is not None:
            return report.result
        if report is not None:
            self.said[rank] = report.message
        raise EngineDeadError(f"Rank {rank} of the engine ended.")

    def check(self, within_s: float = 0.0) -> None:
        """Raise EngineDeadError if a rank has ended, or does so in that time."""
        end = time.monotonic() + within_s
        while True:
            ranks = sorted(range(1, len(self.processes) + 1), key=lambda rank: rank != self.first)
            for rank in ranks:
                process = self.processes[rank - 1]
                if process.poll() is not None:
                    why = self._last_words(rank) or describe_exit(process.returncode)
                    raise EngineDeadError(f"Rank {rank} of the engine ended: {why}.")
            if time.monotonic() >= end:
                return
            time.sleep(0.01)

    def _last_words(self, rank: int) -> str:
        """What a rank that has ended said of it, after results of its last steps."""
        while rank not in self.said:
            report = self.channels[rank - 1].receive(Report)
            if report is None:
                return ""
            if report.result is None:
                self.said[rank] = report.message
        return self.said[rank]

    def fail(self, error: Exception) -> NoReturn:
        """End all ranks, so that nothing waits for them; raise ``error`` or its cause."""
        try:
            self.check(DEATH_S)
        except EngineDeadError as death:
            raise death from error
        finally:
            self.kill()
        raise error

    def kill(self) -> None:
        """End all ranks now."""
        self.closing = True
        for process in self.processes:
            process.kill()
            process.wait()

    def close(self) -> None:
        """End all ranks and discard their work. May be called twice."""
        self.closing = True
        for channel in self.channels:
            channel.close()
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
        self.kill()

    def _watch(self, ways: Ways) -> None:
        """End what waits for a rank that has ended, and waits for others that do.

        NCCL would not notice.
        """
        ended: list[int] = []
        descriptors = []
        with contextlib.suppress(ProcessLookupError):  # ended already
            descriptors += [os.pidfd_open(process.pid) for process in self.processes]
            ended, _, _ = select.select(descriptors, [], [])
        for descriptor in descriptors:
            os.close(descriptor)
        if self.closing:
            return
        if ended:
            self.first = descriptors.index(ended[0]) + 1
        for rank, channel in enumerate(self.channels, 1):
            if rank != self.first:  # whose last words are still to be read
                channel.end()
        ways.abort()  # last, as a driver may take its time


class ParallelExecutor:
    """Runs plans on all ranks of a model.

    Args:
        teller: the rank that sends the results of steps; 0 if they are those of rank 0.

    Attributes:
        inner: the executor of rank 0's part.
    """

    def __init__(self, inner: Executor, followers: Followers, teller: int = 0) -> None:
        self._teller = teller
        self.depth = inner.depth
        self.overlaps = inner.overlaps
        self.inner = inner
        self._followers = followers
        self._collected: list[RankTokens] = []

    def launch(self, plan: StepPlan) -> ParallelTicket:
        """Launch a step on every rank.

        Raises:
            EngineDeadError: one has ended.
            OutOfMemoryError: this one has no memory for the step, which ends all of them.
        """
        try:
            self._followers.send(Step(_without_texts(plan), tuple(self._collected)))
            mine = plan_of_stage(plan, self._collected) if self._teller else plan
            ticket = self.inner.launch(mine)
        except Exception as error:
            self._followers.fail(error)
        self._collected.clear()
        return ParallelTicket(ticket, self._followers, self._collected, self._teller)

    def check(self) -> None:
        """Raise EngineDeadError if a rank has ended."""
        self._followers.check()

    def close(self) -> None:
        """End all ranks after the steps that are launched. May be called twice."""
        self.inner.close()
        self._followers.close()


def _without_texts(plan: StepPlan) -> StepPlan:
    """The plan without stop strings, which no executor reads and which need not be valid UTF-8."""
    if not any(add.sampling.stop for add in plan.add):
        return plan
    return replace(
        plan, add=tuple(replace(a, sampling=replace(a.sampling, stop=())) for a in plan.add)
    )


class ParallelTicket:
    """A step that was launched on all ranks; ``result`` waits for rank 0, and who tells it."""

    lease: Lease | None = None  # no rank goes on by itself

    def __init__(
        self, inner: Ticket, followers: Followers, collected: list[RankTokens], teller: int = 0
    ) -> None:
        self._inner = inner
        self._teller = teller
        self._followers = followers
        self._collected = collected

    def result(self) -> StepResult:
        """Return what the step gave. Raises EngineDeadError if a rank has ended."""
        try:
            result = self._inner.result()
            if self._teller:
                result = self._followers.result(self._teller)
            self._followers.check()
        except Exception as error:
            self._followers.fail(error)
        self._collected.append(RankTokens.of(result))
        return result


def build_parallel(
    config: EngineConfig,
    resolved: ResolvedConfig,
    device: str,
    build: Callable[[Ways], Executor],
) -> ParallelExecutor:
    """Start the other ranks, and ``build`` the executor of rank 0 while they build theirs.

    Args:
        config: with everything that rank 0 has decided.

    Raises:
        WeftError: a typed error, also of another rank.
    """
    process_group()  # before processes are started that would miss it, too
    followers = Followers()
    try:
        ways = followers.start(config, resolved, device)
        try:
            executor = build(ways)
        except RuntimeError:  # of a sum, if another rank has ended
            followers.explain()
            raise
        followers.wait()
    except BaseException:
        followers.kill()  # they may wait for each other
        followers.close()
        raise
    teller = config.processes - config.tensor_parallel  # the first rank of the last stage
    return ParallelExecutor(executor, followers, teller)
