"""Keeps an engine process at the rings: restarts it, with a standby that takes over at once."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

from weft.core.early import Starter
from weft.core.errors import (
    EngineDeadError,
    EngineOutOfMemoryError,
    HostWorkerError,
    OutOfMemoryError,
    WeftError,
)
from weft.core.memory import available_memory
from weft.core.process import STALLED, Backoff, beat_s, exited, start_child
from weft.core.served import ServedModel
from weft.engine.kv_file import forget_kv
from weft.engine.links import EngineLinks
from weft.engine.remote import EngineProcess
from weft.engine.reserve import Reserve
from weft.ring._native import Page
from weft.ring.progress import Progress

TICK_S = 0.5  # while something that is kept ready is missing
LONGEST_DELAY_S = 0.1
LONGEST_SHORT_S = 10.0  # of the delays while there is too little memory for an engine
STALLED_GRACE_S = 2.0  # for an engine without progress to record its sequences
MOST_FAILURES = 4  # engines in a row that report why they cannot start; then no more are started
# Why an engine cannot start now, though it could before.
MAY_PASS = EngineDeadError | OutOfMemoryError | HostWorkerError
STANDBY_BYTES = 512 * 2**20  # of a standby beside weights that are its own
STANDBY_SHARE = 0.25  # of the free memory, up to which a standby is kept without being asked for

_BYTES = re.compile(r"[\d.]+ (?:[KMGT]i)?B\b")
logger = logging.getLogger("weft")


class EngineKeeper:
    """One engine serves the rings; when it dies or hangs, the next one takes over.

    An engine may touch the rings only after the one before it has been waited for. The next one is
    a standby where there is one: built, its imports done and its weights mapped; else it is forked
    by a process that has done the imports.

    Args:
        links: of all engines.
        start: how to start processes.
        standby: None keeps one if it takes little of the free memory; with False there is nothing
            but the engine.
        watchdog_s: seconds without a step, or a sign that there is none to make, after which an
            engine is killed; one that starts has the time that the first one took on top.
        on_next: gets the facts of each engine that has taken over from another one.
        whose: what log lines call the engine, where a server has several.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        links: EngineLinks,
        start: Starter = start_child,
        *,
        standby: bool | None,
        watchdog_s: float,
        on_next: Callable[[ServedModel], None] | None = None,
        whose: str = "",
    ) -> None:
        self._on_next = on_next
        self._the_engine = f"engine{whose}"
        self._reserve = Reserve(settings, links, start, forking=standby is not False)
        self._pages = [Page(ring.memory) for ring in links.rings]
        self._kv = links.kv
        self._standby = standby
        self._asked = standby is not None
        self._watchdog_s = watchdog_s
        self._tick_s = beat_s(watchdog_s)
        # Proven once there is one to replace. Streams wait meanwhile, so it does not get slow.
        self._backoff = Backoff("engine", proven=True, longest_s=LONGEST_DELAY_S)
        self._active: EngineProcess | None = None
        self._since = 0.0
        self._gave_up = False  # with the active engine, and killed it
        self._start_s = 0.0  # that the first engine took
        self._checkpoint = ""  # of the engine before
        self._progress = Progress()

    @property
    def pids(self) -> set[int]:
        """Processes that this keeper waits for."""
        active = set() if self._active is None else {self._active.process.pid}
        return active | self._reserve.pids

    async def start(self) -> ServedModel:
        """Start the first engine. Raises the error with which it failed."""
        began = time.monotonic()
        self._active = await self._reserve.take(None)
        served = await asyncio.to_thread(self._active.wait_until_ready)
        self._since = time.monotonic()
        self._start_s = self._since - began
        self._checkpoint = served.checkpoint
        # What follows from the free memory must not change with the engine.
        self._reserve.settings |= {
            "kv_memory": served.kv_memory,
            "max_model_len": served.max_model_len,
        }
        if self._standby is None:
            free = available_memory() - served.kv_memory - served.host_kv_memory
            own = 0 if served.kept_weights == "mapped" else served.weight_bytes
            fits = own + STANDBY_BYTES <= free * STANDBY_SHARE
            self._standby = fits and served.device == "cpu"  # a GPU's memory is the engine's
        self._reserve.standby = self._standby
        return served

    async def wake(self) -> None:
        """Start an engine again after ``rest``. Raises the error with which it failed."""
        self._since, self._gave_up = time.monotonic(), False
        self._active = await self._reserve.take(self._patience_s)
        await self._take_over(self._active)
        self._since = time.monotonic()

    def rest(self) -> None:
        """End all engines; ``wake`` starts the next one. ``run`` must have ended.

        Their KV is dropped. Requests that come meanwhile wait in the rings; one that the engine
        has just taken goes on with the next one.
        """
        for page in self._pages:
            page.not_ready()
        self._reserve.rest()
        if self._active is not None:
            self._active.process.kill()  # asked to stop, it would end what it has taken
            self._active.stop()
        for page in self._pages:
            page.killed_from_outside()
        self._forget_kv()

    async def run(self) -> None:
        """Keep an engine at the rings; returns only by the error that keeps engines from starting.

        However many die or are killed, also while they start, there will be a next one.
        """
        while True:
            code = await self._death()
            assert self._active is not None
            why = self._active.why_ended(code)
            for page in self._pages:
                page.not_ready()
            if code == -signal.SIGBUS:
                self._pack_again()
            if code != -signal.SIGKILL or self._gave_up:
                self._forget_kv()
            if self._active.killed_for_memory(code):
                self._blame_memory()
            elif code == -signal.SIGKILL and not self._gave_up:
                for page in self._pages:
                    page.killed_from_outside()
            await self._replace(why)

    async def _death(self) -> int:
        """Wait for the end of the active engine; meanwhile keep a standby, and an eye on both."""
        assert self._active is not None
        death = asyncio.create_task(exited(self._active.process))
        self._gave_up = False
        while not death.done():
            tick_s = self._tick_s if self._reserve.complete else min(self._tick_s, TICK_S)
            deaths = [death, *self._reserve.deaths()]
            await asyncio.wait(deaths, timeout=tick_s, return_when=asyncio.FIRST_COMPLETED)
            if death.done():
                break
            self._active.kills.look()
            await self._reserve.keep(self._active)
            if time.monotonic() - self._last_step() > self._watchdog_s:
                logger.error(
                    "The %s makes no progress; it is killed and replaced.", self._the_engine
                )
                self._gave_up = True
                self._active.process.send_signal(STALLED)
                await asyncio.wait([death], timeout=STALLED_GRACE_S)
                self._active.process.kill()
        return self._active.stop()

    def _last_step(self) -> float:
        """When the active engine last made a step or had nothing to do, in monotonic seconds."""
        info = self._pages[0].info()
        return max(self._progress.look(info) if info else 0.0, self._since)

    async def _replace(self, why: str) -> None:
        """Hand over to the next engine; wait longer after each failure, and log each reason once.

        What takes the memory may keep it for long, so without memory the delays grow further.
        """
        logger.warning("The %s ended (%s); the next one takes over.", self._the_engine, why)
        delay_s = self._backoff.delay_s(time.monotonic() - self._since, why)
        short = Backoff("engine", proven=True, longest_s=LONGEST_SHORT_S)
        failures = 0
        while True:
            await asyncio.sleep(delay_s)
            try:
                return await self._start_next()
            except WeftError as error:
                failures += not isinstance(error, MAY_PASS)
                if failures == MOST_FAILURES:
                    raise
                if self._want_of_memory(error):
                    delay_s = short.delay_s(0.0, error.message)
                else:
                    lived_s = time.monotonic() - self._since
                    delay_s = self._backoff.delay_s(lived_s, error.message)
                if _BYTES.sub("", error.message) != _BYTES.sub("", why):
                    logger.warning("The next engine failed and is tried again: %s", error.message)
                why = error.message

    async def _start_next(self) -> None:
        """Have the next engine serve the rings. If it does not, raise why, once it has ended."""
        self._since, self._gave_up = time.monotonic(), False
        try:
            self._active = await self._reserve.take(self._patience_s)
            await self._take_over(self._active)
        except WeftError as error:
            if self._active is not None:
                self._active.process.kill()
                killed = self._active.stop() == -signal.SIGKILL and not self._gave_up
                if not (killed and isinstance(error, EngineDeadError)):
                    self._forget_kv()
            raise
        parts = self._active.laps.items()
        logger.warning(
            "Engine %d has taken over after %.2f s: %s.",
            self._active.process.pid,
            time.monotonic() - self._since,
            ", ".join(f"{part} {seconds:.2f} s" for part, seconds in parts),
        )
        self._since = time.monotonic()

    def _forget_kv(self) -> None:
        """Drop what the last engine has left: it may be wrong, or its memory is what lacks."""
        if self._kv is not None:
            forget_kv(self._kv)

    def _pack_again(self) -> None:
        """From now on engines read the checkpoint: their mapped weights could not be read."""
        if self._reserve.settings.get("packed_cache") != 0:
            logger.warning(
                "A mapped file could not be read (SIGBUS): its disk fails, or it was cut. The next "
                "engines pack their weights themselves; weft cache clear removes those files."
            )
            self._reserve.settings["packed_cache"] = 0

    def _want_of_memory(self, error: WeftError) -> bool:
        """Whether memory kept an engine from starting; if so, record it in the rings."""
        if isinstance(error, EngineOutOfMemoryError):
            self._blame_memory()
            return True
        if isinstance(error, OutOfMemoryError):
            self._wait_for_memory()
            return True
        return False

    def _blame_memory(self) -> None:
        """Record in the rings that memory, not a request, killed the engine."""
        for page in self._pages:
            page.killed_for_memory()
        self._keep_less()

    def _wait_for_memory(self) -> None:
        """Record in the rings that there is too little for the next engine at present."""
        for page in self._pages:
            page.short_of_memory()
        self._keep_less()

    def _keep_less(self) -> None:
        """Drop the KV; from now on a standby is kept only if it is set explicitly."""
        self._forget_kv()
        self._reserve.standby = self._reserve.standby and self._asked

    async def _take_over(self, engine: EngineProcess) -> None:
        """Wait until it serves the rings; one that hangs is killed. Raises why it does not."""

        def give_up() -> None:
            logger.error("The engine is not ready in time; it is killed and replaced.")
            self._gave_up = True
            engine.process.kill()

        alarm = asyncio.get_running_loop().call_later(self._patience_s, give_up)
        try:
            served = await asyncio.to_thread(engine.wait_until_ready)
        finally:
            alarm.cancel()
        if served.checkpoint != self._checkpoint:
            self._checkpoint = served.checkpoint
            logger.warning(
                "The model's files have changed since the engine before was started. From now on "
                "the new ones answer; texts that are continued begin with the old ones."
            )
        if self._on_next is not None:
            self._on_next(served)

    @property
    def _patience_s(self) -> float:
        """With an engine that is to take over."""
        return self._watchdog_s + self._start_s

    def stop(self) -> None:
        """End all engines."""
        self._reserve.stop()
        if self._active is not None:
            self._active.stop()
