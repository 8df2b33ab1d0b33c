"""Passes updates from the engine's sinks, on any thread, to coroutines of the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Sequence as Seq

from weft.core.plan import Update


class Bridge:
    """Carries updates to the event loop; one wake-up serves all that wait for it.

    Must be made on the loop's thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._thread = threading.get_ident()
        self._pending: deque[tuple[Mailbox, Seq[Update]]] = deque()
        self._scheduled = False

    def deliver(self, mailbox: Mailbox, updates: Seq[Update]) -> None:
        """Put updates into a mailbox, directly if this is the loop's own thread."""
        if threading.get_ident() == self._thread:
            mailbox.put(updates)
            return
        self._pending.append((mailbox, updates))
        if not self._scheduled:
            self._scheduled = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: no coroutine waits
                self.loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        self._scheduled = False  # before emptying: what comes from now on schedules again
        while self._pending:
            mailbox, updates = self._pending.popleft()
            mailbox.put(updates)


class Mailbox:
    """Updates of one job, in order, until its coroutine takes them. Never blocks the engine."""

    __slots__ = ("_bridge", "_stop", "_updates", "_waiter")

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._updates: list[Update] = []
        self._waiter: asyncio.Future[None] | None = None
        self._stop: Exception | None = None

    def sink(self, updates: Seq[Update]) -> None:
        """The sink, which the engine client calls on any thread."""
        self._bridge.deliver(self, updates)

    def put(self, updates: Seq[Update]) -> None:
        """Append updates; on the loop's thread only."""
        self._updates.extend(updates)
        self._wake()

    def interrupt(self, error: Exception) -> None:
        """Make this and every later ``take`` raise; on the loop's thread only."""
        self._stop = self._stop or error
        self._wake()

    async def take(self) -> list[Update]:
        """Wait for updates and return all that are there. Raises what ``interrupt`` was given."""
        while not self._updates and self._stop is None:
            self._waiter = self._bridge.loop.create_future()
            await self._waiter
        if self._stop is not None:
            raise self._stop
        updates, self._updates = self._updates, []
        return updates

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
