"""Keeps the agent of remote request planes at its port: restarts it until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from weft.core.kept_process import KeptProcess
from weft.core.process import Backoff, beat_s, describe_exit, exited, start_child
from weft.ring.segment import RingFds

START_S = 60.0  # more patience with one that has still to begin

logger = logging.getLogger("weft")


class AgentKeeper(KeptProcess):
    """One agent, and its successors on the same rings and listening socket.

    Args:
        settings: what the process reads from standard input.
        card: the first engine's facts as JSON, once there is one; ``tell`` has those of the next.
        watchdog_s: seconds without a sign of life after which an agent is killed and replaced.
    """

    def __init__(
        self,
        listener: socket.socket,
        rings: Seq[RingFds],
        settings: Mapping[str, Any],
        card: asyncio.Future[str],
        watchdog_s: float,
    ) -> None:
        super().__init__()
        self._listener, self._rings = listener, rings
        self._settings, self._card = settings, card
        self._watchdog_s = watchdog_s
        self._signed_s = 0.0  # when something was last heard of it, on the monotonic clock
        self._newest = ""  # of the cards after the first
        self._told = asyncio.Event()  # another one

    async def run(self) -> None:
        """Keep an agent running until ``end``, and wait until it has ended.

        Raises:
            EngineDeadError: one after the other has died.
        """
        backoff = Backoff("agent of request planes")
        while not self._ending.is_set():
            started = time.monotonic()
            why = describe_exit(await self._live())
            if self._ending.is_set():
                return
            delay_s = backoff.delay_s(time.monotonic() - started, why)
            logger.warning("The agent of request planes ended (%s); it is restarted.", why)
            await self._ends_within(delay_s)

    def serves(self) -> bool:
        """Whether the agent lives and there is an engine to connect to."""
        return self._card.done() and 0 < self._signed_s <= time.monotonic()

    def tell(self, card: str) -> None:
        """Pass on the facts of the next engine."""
        self._newest = card
        self._told.set()

    async def _live(self) -> int:
        """One agent from its start to its end; its exit code."""
        (card, feed), (signs, sign) = os.pipe(), os.pipe()
        os.set_blocking(signs, False)
        os.set_blocking(sign, False)
        self._signed_s = time.monotonic() + START_S
        try:
            process = self._process = self._start(card, sign)
        except OSError as error:
            os.close(feed)
            os.close(signs)
            logger.error("The agent of request planes cannot be started: %s.", error.strerror)
            return 1
        finally:
            os.close(card)
            os.close(sign)
        feeding = asyncio.create_task(self._feed(feed))
        death = asyncio.create_task(exited(process))
        loop = asyncio.get_running_loop()
        loop.add_reader(signs, self._on_sign, signs)
        try:
            while not (await asyncio.wait([death], timeout=beat_s(self._watchdog_s)))[0]:
                if time.monotonic() - self._signed_s > self._watchdog_s:
                    logger.error("The agent of request planes is not responding; it is killed.")
                    process.kill()
            return await death
        finally:
            loop.remove_reader(signs)
            os.close(signs)
            death.cancel()
            feeding.cancel()
            await asyncio.wait([death, feeding])

    def _on_sign(self, signs: int) -> None:
        with contextlib.suppress(BlockingIOError):
            if os.read(signs, 4096):
                self._signed_s = time.monotonic()
            else:  # it has ended
                asyncio.get_running_loop().remove_reader(signs)

    def _start(self, card: int, sign: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "weft.ring.agent", "--parent", str(os.getpid())]
        command += ["--socket", str(self._listener.fileno())]
        command += ["--card", str(card), "--signs", str(sign)]
        for ring in self._rings:
            command += ["--ring", str(ring)]
        fds = [fd for ring in self._rings for fd in ring.pass_fds]
        process = start_child(
            command,
            stdin=subprocess.PIPE,
            pass_fds=[card, sign, self._listener.fileno(), *fds],
            start_new_session=True,
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead already, which is noticed elsewhere
            process.stdin.write(json.dumps(self._settings).encode())
            process.stdin.close()
        return process

    async def _feed(self, card: int) -> None:
        """Hand over the facts of each engine as soon as they are known."""
        try:
            first = await asyncio.shield(self._card)
            while True:
                self._told.clear()
                with contextlib.suppress(BrokenPipeError):  # its death is noticed elsewhere
                    os.write(card, f"{self._newest or first}\n".encode())
                await self._told.wait()
        finally:
            os.close(card)
