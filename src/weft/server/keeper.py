"""Keeps a request-plane process at its ring and port: restarts it until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

from weft.core.early import Starter
from weft.core.errors import EngineDeadError, ModelChangedError
from weft.core.kept_process import KeptProcess
from weft.core.memory import MemoryKills
from weft.core.process import Backoff, Process, beat_s, describe_exit, exited, start_child
from weft.ring.link import RingAccess
from weft.ring.model_board import ModelBoard, ModelFds
from weft.ring.segment import RingFds
from weft.server.counts import Board
from weft.server.quota_board import release_plane

EXIT_REFUSED = 3  # of a request plane that cannot work with these settings
EXIT_CHANGED = 5  # of a request plane whose engine has another model now
START_S = 60.0  # more patience with one that has still to begin

logger = logging.getLogger("weft")


class Links(NamedTuple):
    """What a request plane has to do with the engine of one model.

    Attributes:
        ring: of the two.
        counts: descriptor of the memory of what all request planes have counted.
        targets: the same of targets that are set while the server runs; None where the engine is
            elsewhere.
    """

    ring: RingFds | RingAccess
    counts: int
    targets: int | None


class FrontendKeeper(KeptProcess):
    """One request plane, and its successors on the same ring and listening socket.

    Args:
        number: of this request plane, from 0.
        settings: what the process reads from standard input.
        links: to the engine of each model.
        quotas: descriptor of the memory of what API keys use, which all request planes share.
        card: the engine's facts as JSON, once there is an engine.
        watchdog_s: seconds without a sign after which a request plane is killed and replaced.
        start: how to start it.
        models: where several models are; None where there is one, always awake.
    """

    def __init__(
        self,
        number: int,
        settings: Mapping[str, Any],
        links: Seq[Links],
        listener: socket.socket,
        quotas: int,
        card: asyncio.Future[str],
        watchdog_s: float,
        start: Starter = start_child,
        models: ModelFds | None = None,
    ) -> None:
        super().__init__()
        self._number = number
        self._starter = start
        self._settings = settings
        self._links = links
        self._listener = listener
        self._quotas = quotas
        self._models = models
        self._card = card
        self._watchdog_s = watchdog_s
        self._tick_s = beat_s(watchdog_s)
        self._boards = [Board(one.counts, number) for one in links]
        self._signs = self._boards[0]
        self._kills = MemoryKills()
        self._fed_s = math.inf  # when the current one got the card, on the monotonic clock

    async def run(self) -> None:
        """Keep a request plane running until ``end``, and wait until it has ended.

        Raises:
            EngineDeadError: one after the other has died, or refused to work.
            ModelChangedError: the engine elsewhere has another model than the card says.
        """
        backoff = Backoff("request plane")
        first = True
        while not self._ending.is_set():
            started = time.monotonic()
            code = await self._live(first and self._number == 0)
            if self._ending.is_set():
                return
            why = describe_exit(code)
            if code == -signal.SIGKILL and self._kills.recent():
                why += f": {self._kills.explain()}"
            if code == EXIT_REFUSED:
                raise EngineDeadError("The request plane cannot work with these settings.")
            if code == EXIT_CHANGED:
                raise ModelChangedError("The engine has another model, or other text files, now.")
            delay_s = backoff.delay_s(time.monotonic() - started, why)
            logger.warning("Request plane %d ended (%s); it is restarted.", self._number, why)
            first = False
            await self._ends_within(delay_s)

    def serves(self) -> bool:
        """Whether a request plane has answered for a model, this one or one before it."""
        return any(board.has_counts() for board in self._boards)

    async def _live(self, announce: bool) -> int:
        """One request plane from its start to its end; its exit code."""
        self._fed_s = math.inf
        self._signs.sign(0)
        read_end, write_end = os.pipe()
        try:
            process = self._process = self._start(read_end, announce)
        except OSError as error:
            os.close(write_end)
            logger.error("Request plane %d cannot be started: %s.", self._number, error.strerror)
            return 1
        finally:
            os.close(read_end)
        feeding = asyncio.create_task(self._feed(write_end))
        death = asyncio.create_task(exited(process))
        try:
            while not (await asyncio.wait([death], timeout=self._tick_s))[0]:
                self._kills.look()
                if self._hangs():
                    logger.error("Request plane %d is not responding; it is killed.", self._number)
                    process.kill()
            return await death
        finally:
            death.cancel()
            feeding.cancel()
            await asyncio.wait([death, feeding])
            release_plane(self._quotas, self._number)
            if self._models is not None:
                ModelBoard(self._models).forget(self._number)

    def _hangs(self) -> bool:
        """Whether it gave no sign of life for too long; others wait while it ends."""
        signed_s = self._signs.signed_ns() / 1e9
        patience_s = self._watchdog_s if signed_s else self._watchdog_s + START_S
        late = time.monotonic() - (signed_s or self._fed_s) > patience_s
        return late and not self._ending.is_set()

    def _start(self, card: int, announce: bool) -> Process:
        command = [sys.executable, "-m", "weft.server.process", "--parent", str(os.getpid())]
        command += ["--card", str(card), "--socket", str(self._listener.fileno())]
        command += ["--quotas", str(self._quotas), "--number", str(self._number)]
        passed = [card, self._listener.fileno(), self._quotas]
        for ring, counts, targets in self._links:
            command += ["--ring", str(ring), "--board", str(counts)]
            command += [] if targets is None else ["--targets", str(targets)]
            passed += [*ring.pass_fds, counts, *([] if targets is None else [targets])]
        if self._models is not None:
            command += ["--models", str(self._models)]
            passed += [self._models.memory, self._models.bell]
        command += ["--announce"] * announce
        theirs, settings = os.pipe()
        # A process that is dead already is noticed elsewhere.
        with contextlib.suppress(BrokenPipeError), os.fdopen(settings, "wb") as pipe:
            try:
                process = self._starter(
                    command,
                    stdin=theirs,
                    pass_fds=passed,
                    start_new_session=True,
                )
            finally:
                os.close(theirs)
            pipe.write(json.dumps(self._settings).encode())
        return process

    async def _feed(self, card: int) -> None:
        """Hand over the engine's facts as soon as they are known."""
        with os.fdopen(card, "w") as pipe:
            pipe.write(await asyncio.shield(self._card) + "\n")
            self._fed_s = time.monotonic()
