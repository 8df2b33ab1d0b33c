"""Rank 0 of a tensor-parallel model: starts the other ranks and sends them its plans.

Every rank runs the same executor on its part. All of them have all logits, so each chooses the same
tokens, and nothing has to be sent back; a rank that chose others would end the engine.
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
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from weft.core import errors
from weft.core.config import EngineConfig
from weft.core.errors import EngineDeadError, KernelError, WeftError
from weft.core.plan import StepPlan, StepResult
from weft.core.ports import Executor, Lease, Ticket
from weft.core.process import describe_exit, start_child
from weft.core.resolved import ResolvedConfig
from weft.engine.channel import Channel, RankTokens, Report, Step, Task
from weft.engine.forkserver import MEMORY_SETTINGS
from weft.kernels.unavailable import KernelUnavailable

if TYPE_CHECKING:
    from weft.kernels.process_group import Group

STOP_TIMEOUT_S = 5.0
DEATH_S = 1.0  # in which a rank that has ended is found after a collective has failed


@dataclass
class Followers:
    """The processes of the ranks from 1 on."""

    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    channels: list[Channel] = field(default_factory=list)
    closing: bool = False

    def start(self, config: EngineConfig, resolved: ResolvedConfig, device: str) -> Group:
        """Start them, and meet them when they can load.

        Raises:
            EngineDeadError: one of them could not start.
        """
        for rank in range(1, config.tensor_parallel):
            self._start(rank)
        self.wait()
        with tempfile.TemporaryDirectory(prefix="weft-ranks-") as folder:
            meeting_point = str(Path(folder) / "meeting")
            for rank, channel in enumerate(self.channels, 1):
                channel.send(Task(asdict(config), resolved, rank, meeting_point))
            group = meet(0, config.tensor_parallel, meeting_point, device)
        threading.Thread(target=self._watch, args=(group,), daemon=True).start()
        return group

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

    def explain(self) -> None:
        """After a failure at the start, raise the error of a rank that has ended, as ``wait``.

        Rather one of another kind than EngineDeadError, which a rank also has that lost another.
        """
        end = time.monotonic() + DEATH_S
        found: list[WeftError] = []
        for rank, process in enumerate(self.processes, 1):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
                try:
                    self._wait_for(rank)
                except WeftError as error:
                    found.append(error)
        if found:
            raise min(found, key=lambda error: isinstance(error, EngineDeadError))

    def _wait_for(self, rank: int) -> None:
        report = self.channels[rank - 1].receive(Report)
        if report is None:
            why = describe_exit(self.processes[rank - 1].wait())
            raise EngineDeadError(f"Rank {rank} ended while it was starting ({why}).")
        if report.error:
            raise getattr(errors, report.error, WeftError)(report.message)

    def send(self, step: Step) -> None:
        """Send the next step to every rank. Raises OSError if one has ended."""
        for channel in self.channels:
            channel.send(step)

    def check(self, within_s: float = 0.0) -> None:
        """Raise EngineDeadError if a rank has ended, or does so in that time."""
        end = time.monotonic() + within_s
        while True:
            for rank, process in enumerate(self.processes, 1):
                if process.poll() is not None:
                    report = self.channels[rank - 1].receive(Report)
                    why = report.message if report else describe_exit(process.returncode)
                    raise EngineDeadError(f"Rank {rank} of the engine ended: {why}.")
            if time.monotonic() >= end:
                return
            time.sleep(0.01)

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

    def _watch(self, group: Group) -> None:
        """End what waits for a rank that has ended; NCCL would not notice."""
        descriptors = []
        with contextlib.suppress(ProcessLookupError):  # ended already
            descriptors += [os.pidfd_open(process.pid) for process in self.processes]
            select.select(descriptors, [], [])
        for descriptor in descriptors:
            os.close(descriptor)
        if not self.closing:
            group.abort()


class ParallelExecutor:
    """Runs plans on all ranks of a model that is cut.

    Attributes:
        inner: the executor of rank 0's part.
    """

    def __init__(self, inner: Executor, followers: Followers) -> None:
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
            ticket = self.inner.launch(plan)
        except Exception as error:
            self._followers.fail(error)
        self._collected.clear()
        return ParallelTicket(ticket, self._followers, self._collected)

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
    """A step that was launched on all ranks; ``result`` waits for rank 0."""

    lease: Lease | None = None  # no rank goes on by itself

    def __init__(self, inner: Ticket, followers: Followers, collected: list[RankTokens]) -> None:
        self._inner = inner
        self._followers = followers
        self._collected = collected

    def result(self) -> StepResult:
        """Return what the step gave. Raises EngineDeadError if a rank has ended."""
        try:
            result = self._inner.result()
            self._followers.check()
        except Exception as error:
            self._followers.fail(error)
        self._collected.append(RankTokens.of(result))
        return result


def meet(rank: int, size: int, meeting_point: str, device: str) -> Group:
    """Meet the other ranks. Raises KernelError or EngineDeadError."""
    try:
        return _group_type()(rank, size, Path(meeting_point), device)
    except KernelUnavailable as error:
        raise KernelError(str(error)) from error
    except RuntimeError as error:
        raise EngineDeadError(f"Rank {rank} could not meet the others: {error}") from error


def _group_type() -> type[Group]:
    """The collectives of torch. Raises KernelError if it is not installed."""
    try:
        from weft.kernels.process_group import Group
    except ImportError as error:
        raise KernelError(
            f"tensor_parallel needs torch, which is not installed ({error}): "
            "pip install 'weft[cuda]'"
        ) from error
    return Group


def build_parallel(
    config: EngineConfig,
    resolved: ResolvedConfig,
    device: str,
    build: Callable[[Group], Executor],
) -> ParallelExecutor:
    """Start the other ranks, and ``build`` the executor of rank 0 while they build theirs.

    Args:
        config: with everything that rank 0 has decided.

    Raises:
        WeftError: a typed error, also of another rank.
    """
    _group_type()  # before processes are started that would miss it, too
    followers = Followers()
    try:
        group = followers.start(config, resolved, device)
        try:
            executor = build(group)
        except RuntimeError:  # of a sum, if another rank has ended
            followers.explain()
            raise
        followers.wait()
    except BaseException:
        followers.close()
        raise
    return ParallelExecutor(executor, followers)
