"""Keeps a batch process at its ring while there are batches; else there is none."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from weft.api.card import ModelCard
from weft.batch.bell import bell_stamp, near_bell
from weft.batch.database import work_within
from weft.batch.webhook_settings import WebhookSettings
from weft.core.kept_process import KeptProcess
from weft.core.process import Backoff, describe_exit, exited, start_child
from weft.core.served import ServedModel
from weft.ring.link import RingAccess
from weft.ring.segment import RingFds
from weft.server.data import data_folder, store_limits
from weft.server.options import ServerOptions

TICK_S = 0.5
LOOK_S = 30.0  # batches are looked for again, even without a bell: who was to ring may have died
START_S = 60.0  # more patience with one that has still to begin

logger = logging.getLogger("weft")


class BatchKeeper(KeptProcess):
    """The batch process of a server, and its successors on the same ring.

    Args:
        settings: of tokeniser and logs, as request planes get them.
        card: the engine's facts as JSON, once there is an engine.
        board: where request planes count, which has a cell for batches, too.
        number: of that cell.
        on_start: called when a batch process is started.
    """

    def __init__(
        self,
        options: ServerOptions,
        settings: Mapping[str, Any],
        ring: RingFds | RingAccess,
        card: asyncio.Future[str],
        board: int,
        number: int,
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._folder = data_folder(options)
        webhooks = WebhookSettings.of(options)
        self._urls = webhooks.urls
        self._settings = {
            **{name: value for name, value in settings.items() if name != "options"},
            **{name: getattr(options, name) for name in _OPTIONS},
            "data_dir": str(self._folder.absolute()),
            "queue_limited": (options.max_queued_requests, options.max_queued_tokens)
            != (None, None),
            "limits": asdict(store_limits(options)),
            "webhooks": asdict(webhooks),
        }
        self._ring = ring
        self._card = card
        self._board, self._number = board, number
        self._watchdog_s = options.watchdog_s
        self._on_start = on_start
        self._signed_s = 0.0  # when something was last heard of it, on the monotonic clock
        self._watches = True  # the folder

    @property
    def alive(self) -> bool:
        """Whether there is a batch process."""
        return self._process is not None and self._process.poll() is None

    async def has_work(self, identity: str) -> bool:
        """Whether there are batches for a model of this identity that have not ended."""
        return self.alive and not await asyncio.to_thread(self._work_within, identity)

    async def run(self) -> None:
        """Keep a batch process running whenever there are batches, until ``end``."""
        backoff = Backoff("batch process", proven=True)
        card = await asyncio.shield(self._card)
        names = tuple(self._settings["served_model_name"])
        identity = ModelCard.of(ServedModel.from_json(card), names).identity
        while not self._ending.is_set():
            stamp = bell_stamp(self._folder)
            within_s = await asyncio.to_thread(self._work_within, identity)
            if within_s:
                await self._until_rung(stamp, min(within_s, LOOK_S))
                continue
            started = time.monotonic()
            code = await self._live(card)
            if code == 0 or self._ending.is_set():
                continue
            why = describe_exit(code)
            delay_s = backoff.delay_s(time.monotonic() - started, why)
            logger.warning("The batch process ended (%s); it is restarted.", why)
            await self._ends_within(delay_s)

    async def _until_rung(self, stamp: int, within_s: float) -> None:
        """Wait until the bell has another stamp, ``end`` is called, or time is up."""
        until = time.monotonic() + within_s
        while (left_s := until - time.monotonic()) > 0:
            await self._until_change(stamp, left_s)
            if bell_stamp(self._folder) != stamp:
                return
            if await self._ends_within(TICK_S):  # other files there may change often
                return

    async def _until_change(self, stamp: int, within_s: float) -> None:
        """Wait for a change near the bell, for ``end`` or for the time; may return early."""
        try:
            with near_bell(self._folder) as changed:
                if bell_stamp(self._folder) == stamp:
                    await self._first_of(changed, within_s)
        except OSError as error:
            if self._watches:
                logger.warning(
                    "The folder of batches '%s' cannot be watched (%s); weft looks at it twice a "
                    "second instead.",
                    self._folder,
                    error.strerror,
                )
            self._watches = False

    async def _first_of(self, changed: asyncio.Event, within_s: float) -> None:
        waits = [asyncio.create_task(event.wait()) for event in (changed, self._ending)]
        try:
            await asyncio.wait(waits, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _work_within(self, identity: str) -> float:
        """Seconds until there is work without the bell being rung."""
        try:
            within_s = work_within(self._folder, identity, self._urls)
        except (OSError, sqlite3.Error) as error:
            logger.warning("The batches in '%s' cannot be read: %s.", self._folder, error)
            within_s = None
        return math.inf if within_s is None else within_s

    async def _live(self, card: str) -> int:
        """One batch process from its start to its end; its exit code."""
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        os.set_blocking(write_end, False)
        self._signed_s = time.monotonic() + START_S
        try:
            process = self._process = self._start(write_end, card)
        except OSError as error:
            os.close(read_end)
            logger.error("The batch process cannot be started: %s.", error.strerror)
            return 1
        finally:
            os.close(write_end)
        self._on_start()
        loop = asyncio.get_running_loop()
        loop.add_reader(read_end, self._on_sign, read_end)
        death = asyncio.create_task(exited(process))
        try:
            while not (await asyncio.wait([death], timeout=TICK_S))[0]:
                if time.monotonic() - self._signed_s > self._watchdog_s:
                    logger.error("The batch process does nothing any more; it is killed.")
                    process.kill()
            return await death
        finally:
            loop.remove_reader(read_end)
            os.close(read_end)
            death.cancel()
            await asyncio.wait([death])

    def _on_sign(self, read_end: int) -> None:
        with contextlib.suppress(BlockingIOError):
            if os.read(read_end, 4096):
                self._signed_s = max(self._signed_s, time.monotonic())
            else:  # it has ended
                asyncio.get_running_loop().remove_reader(read_end)

    def _start(self, signs: int, card: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "weft.server.batch_process", "--parent", str(os.getpid())]
        command += ["--ring", str(self._ring), "--signs", str(signs)]
        command += ["--board", str(self._board), "--number", str(self._number)]
        process = start_child(
            command,
            stdin=subprocess.PIPE,
            pass_fds=[signs, self._board, *self._ring.pass_fds],
            start_new_session=True,
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead already, which is noticed elsewhere
            process.stdin.write(json.dumps({**self._settings, "card": card}).encode())
            process.stdin.close()
        return process


_OPTIONS = (
    "served_model_name",
    "max_sequences",
    "max_prompt_bytes",
    "request_chat_template",
    "tool_parser",
    "reasoning_parser",
    "key_salt",
    "max_batch_lines",
    "batch_promotion",
    "usage_db",
    "usage_keep_days",
    "batch_order",
)
