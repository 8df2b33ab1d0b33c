"""The process of ranks from 1 on: builds its part of the model, then runs rank 0's plans.

    python -m weft.engine.rank_follower --rank N --channel FD --parent PID

Over the channel come a ``Task`` and then ``Step`` after ``Step`` until it is closed; a ``Report``
goes back when the process can load, when it has loaded, and if it has to end by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Sequence

from weft.core.config import EngineConfig
from weft.core.errors import InvariantError, WeftError
from weft.core.logs import log_level, set_up_logs
from weft.core.plan import StepResult
from weft.core.ports import Executor, Ticket
from weft.core.process import die_with, set_process_title
from weft.engine.channel import Channel, RankTokens, Report, Step, Task
from weft.engine.postpone import postpone
from weft.engine.rank_role import Role, plan_of_stage, role_of

logger = logging.getLogger("weft")


def main() -> None:
    """Run until the channel is closed: exit code 0; 1 if the rank cannot start or breaks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--channel", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    options = parser.parse_args()
    set_process_title(f"weft-rank{options.rank}")
    die_with(options.parent)
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 decides when to end
        signal.signal(number, signal.SIG_IGN)
    postpone("torch._meta_registrations")  # a fourth of the import of torch; for compilers
    import weft.engine.build  # noqa: F401 - all that takes time

    channel = Channel(socket.socket(fileno=options.channel))
    channel.send(Report())
    task = channel.receive(Task)
    if task is None:
        return
    try:
        executor = _build(task)
    except WeftError as error:
        with contextlib.suppress(OSError):  # rank 0 has met the same error, and is gone
            channel.send(Report(type(error).__name__, error.message))
        sys.exit(1)
    except Exception as error:
        logger.exception("Rank %d could not start.", task.rank)
        why = f"Rank {task.rank} could not start: {type(error).__name__}: {error}"
        channel.send(Report("EngineDeadError", why))
        sys.exit(1)
    channel.send(Report())
    gc.collect()
    gc.freeze()
    config = EngineConfig.from_mapping(task.settings)
    Follower(task.rank, channel, executor, role_of(task.rank, config)).run()


def _build(task: Task) -> Executor:
    from weft.engine.build import build_rank

    config = EngineConfig.from_mapping(task.settings)
    set_up_logs(f"rank{task.rank}", log_level(config.log_level), config.log_format)
    return build_rank(config, task)


class Follower:
    """Launches plans as they come, and collects each step when rank 0 has: no more are in flight.

    Who tells results collects each step when it has ended. An executor without depth computes when
    its steps are collected, which is at once.
    """

    def __init__(
        self, rank: int, channel: Channel, executor: Executor, role: Role = Role.COMPARES
    ) -> None:
        self._rank = rank
        self._role = role
        self._channel = channel
        self._executor = executor
        self._tickets: deque[Ticket] = deque()
        self._results: deque[StepResult] = deque()

    def run(self) -> None:
        """Work until rank 0 closes the channel; the process then ends, whatever it does."""
        try:
            while (step := self._receive()) is not None:
                plan = step.plan
                if self._role is not Role.TELLS:
                    self._take(step.collected)
                if self._role is Role.HEARS:
                    plan = plan_of_stage(plan, step.collected)
                self._tickets.append(self._executor.launch(plan))
                if len(self._tickets) > self._executor.depth and self._collects_at_once:
                    self._collect()
        except Exception as error:
            self._end_by(error)
        os._exit(0)

    @property
    def _collects_at_once(self) -> bool:
        return self._executor.depth == 0 or self._role is Role.TELLS

    def _receive(self) -> Step | None:
        """The next step. Results are told while there is none."""
        if self._role is Role.TELLS:
            while self._tickets and not self._channel.has_more():
                self._collect()
        return self._channel.receive(Step)

    def _take(self, collected: Sequence[RankTokens]) -> None:
        """Collect the steps that rank 0 has collected."""
        for theirs in collected:
            if not self._results:
                self._collect()
            mine = self._results.popleft()
            if self._role is Role.COMPARES:
                self._compare(theirs, mine)

    def _collect(self) -> None:
        result = self._tickets.popleft().result()
        if self._role is Role.TELLS:
            self._channel.send(Report(result=result))
        else:
            self._results.append(result)

    def _compare(self, theirs: RankTokens, result: StepResult) -> None:
        mine = RankTokens.of(result)
        other = [i for i, tokens in theirs.tokens.items() if mine.tokens.get(i) != tokens]
        if other or theirs.step_id != mine.step_id:
            raise InvariantError(
                f"in step {theirs.step_id} rank {self._rank} got other tokens than rank 0 for "
                f"sequences {other}"
            )

    def _end_by(self, error: Exception) -> None:
        logger.error("Rank %d ends.", self._rank, exc_info=error)
        with contextlib.suppress(OSError):
            self._channel.send(Report(type(error).__name__, f"{type(error).__name__}: {error}"))
        os._exit(1)


if __name__ == "__main__":
    main()
