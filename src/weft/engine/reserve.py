"""Keeps a standby engine and a fork server ready, so that a take-over is fast."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from weft.core.early import Starter
from weft.core.errors import EngineDeadError, WeftError
from weft.core.process import Backoff, describe_exit, exited
from weft.engine.forkserver import ForkServer
from weft.engine.kv_file import used_bytes
from weft.engine.links import EngineLinks
from weft.engine.machine import resident_bytes
from weft.engine.remote import EngineProcess

LONGEST_PAUSE_S = 30.0  # until the next standby, after those that were killed or cannot be built

logger = logging.getLogger("weft")


class Reserve:
    """Gives the engines with one set of links.

    Args:
        start: how to start processes.
        forking: engines are forked by a process that has done their imports. Without, all that is
            there is the engine.

    Attributes:
        settings: of the engines that are still to be started.
        standby: whether to keep one: an engine that is built, its weights mapped.
    """

    def __init__(
        self, settings: Mapping[str, Any], links: EngineLinks, start: Starter, *, forking: bool
    ) -> None:
        self.settings = dict(settings)
        self._start = start
        self.standby = False
        self._links = links
        self._forking = forking
        self._forks: ForkServer | None = None
        self._spare: EngineProcess | None = None
        self._deaths: dict[int, asyncio.Task[int]] = {}
        self._forks_pause = _Pause("fork server")
        self._spare_pause = _Pause("standby engine")

    @property
    def pids(self) -> set[int]:
        """Processes that this object waits for."""
        return {one.process.pid for one in (self._forks, self._spare) if one is not None}

    @property
    def complete(self) -> bool:
        """Whether all that is to be kept is there, so that ``keep`` has nothing to do."""
        if not self._forking:
            return True
        spare = self._spare is not None or not self.standby
        return spare and self._forks is not None and self._forks.ready

    def deaths(self) -> list[asyncio.Task[int]]:
        """Tasks that end with the processes that ``keep`` replaces. Ask again after each call."""
        kept = [self._forks, self._spare if self.standby else None]
        processes = {one.process.pid: one.process for one in kept if one is not None}
        for pid in [pid for pid in self._deaths if pid not in processes]:
            self._deaths.pop(pid).cancel()
        for pid, process in processes.items():
            if pid not in self._deaths:
                self._deaths[pid] = asyncio.create_task(exited(process))
        return list(self._deaths.values())

    async def take(self, patience_s: float | None) -> EngineProcess:
        """The standby if there is one, else an engine that has just been started.

        Args:
            patience_s: with a fork server that has to be started first; None: this is the first
                engine, whose start users see.

        Raises:
            EngineDeadError: there can be no engine at present.
        """
        spare, self._spare = self._spare, None
        if spare is not None:
            if spare.process.poll() is None:
                return spare
            spare.stop()
        kept = 0 if self._links.kv is None else used_bytes(self._links.kv)
        how: dict[str, Any] = {"returning_bytes": kept}
        how["shown"] = "lines" if patience_s is None else None
        if not self._forking:
            return EngineProcess.start(self.settings, self._links, self._start, **how)
        if self._forks is None or not self._forks.soon:
            self._drop_forks()
            self._forks = self._fork_server(background=False)
        return await self._fork(self._forks, patience_s=patience_s, **how)

    async def keep(self, active: EngineProcess) -> None:
        """Start again what is missing. To be called while an engine serves.

        Call it again when one of ``deaths`` has ended, and now and then until it is ``complete``.
        """
        if not self._forking:
            return
        try:
            self._keep_forks()
            if self.standby:
                await self._keep_spare(active)
        except WeftError as error:
            logger.warning("There is no standby engine at present. %s", error.message)
            self._spare_pause.begin(error.message, longest=not isinstance(error, EngineDeadError))
            if self._spare is not None:
                self._spare.stop()
            self._spare = None

    def _keep_forks(self) -> None:
        if self._forks is not None and (code := self._forks.process.poll()) is not None:
            logger.warning("The fork server of engines ended (%s).", describe_exit(code))
            self._forks_pause.begin(describe_exit(code))
            self._drop_forks()
        if self._forks is None and self._forks_pause.over:
            self._forks_pause.end()
            self._forks = self._fork_server(background=True)

    def _fork_server(self, *, background: bool) -> ForkServer:
        torch = self.settings.get("device") != "cpu"  # other settings that need it are rare
        return ForkServer(self._links, self._start, background=background, torch=torch)

    async def _keep_spare(self, active: EngineProcess) -> None:
        if self._spare is not None and self._spare.process.poll() is not None:
            self._spare.wait_until_ready()  # says why it has ended
        if self._spare is None and self._spare_pause.over and self._forks and self._forks.ready:
            self._spare_pause.end()
            returning = resident_bytes(active.process.pid)
            returning += 0 if self._links.kv is None else used_bytes(self._links.kv)
            self._spare = await self._fork(self._forks, standby=True, returning_bytes=returning)

    async def _fork(self, forks: ForkServer, **how: Any) -> EngineProcess:
        try:
            return await EngineProcess.fork(self.settings, self._links, forks, **how)
        except EngineDeadError as error:
            self._forks_pause.begin(error.message)
            self._drop_forks()
            raise
        except BaseException:  # cancelled: the answer that was on its way would be the next one's
            self._drop_forks()
            raise

    def _drop_forks(self) -> None:
        if self._forks is not None:
            self._forks.close()
            self._forks = None

    def rest(self) -> None:
        """End the standby, as no engine is needed; what forks the next one stays."""
        if self._spare is not None:
            self._spare.stop()
            self._spare = None

    def stop(self) -> None:
        """End all processes that are kept."""
        self._drop_forks()
        self.rest()


class _Pause:
    """The pause before a restart: none, unless the process dies repeatedly."""

    def __init__(self, name: str) -> None:
        self._backoff = Backoff(name, proven=True, longest_s=LONGEST_PAUSE_S)
        self._started = self._until = 0.0

    def begin(self, why: str, *, longest: bool = False) -> None:
        """It has ended, or cannot be started."""
        now = time.monotonic()
        delay_s = self._backoff.delay_s(now - self._started, why)
        self._until = now + (LONGEST_PAUSE_S if longest else delay_s)

    def end(self) -> None:
        """It is started."""
        self._started = time.monotonic()

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._until
