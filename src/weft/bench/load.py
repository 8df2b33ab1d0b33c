"""Load: when to send requests (a strategy), when to stop (a constraint), and the busy clients."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from weft.bench.stats import Outcome

Send = Callable[[int, float], Awaitable[Outcome]]
"""Sends request number n, due at a time of the load's clock, and returns what came of it."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Limits of a run; no request is sent after the first one is reached."""

    requests: int | None = None
    seconds: float | None = None

    def reached(self, sent: int, now_s: float) -> bool:
        return (self.requests is not None and sent >= self.requests) or (
            self.seconds is not None and now_s >= self.seconds
        )


class Load:
    """Runs one load; times are seconds from ``start``."""

    def __init__(self, send: Send, stop: Stop, done: Callable[[Outcome], None]) -> None:
        self._send = send
        self._stop = stop
        self._done = done
        self._sent = 0
        self.outcomes: list[Outcome] = []
        self.started = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self.started

    async def open_loop(self, times: Iterator[float]) -> list[Outcome]:
        """Send at the given times whatever becomes of earlier requests; wait for all answers."""
        self.started = time.perf_counter()
        open_tasks: set[asyncio.Task[None]] = set()
        for due in times:
            if self._stop.reached(self._sent, due):
                break
            while (wait := due - self.now()) > 0:  # timers may be a millisecond early
                await asyncio.sleep(wait)
            task = asyncio.create_task(self._one(self._next(), due))
            open_tasks.add(task)
            task.add_done_callback(open_tasks.discard)
        while open_tasks:
            await asyncio.gather(*open_tasks)
        return self.outcomes

    async def closed_loop(self, clients: int) -> list[Outcome]:
        """Each client sends its next request as soon as it has its answer."""
        self.started = time.perf_counter()

        async def client() -> None:
            while not self._stop.reached(self._sent, now := self.now()):
                await self._one(self._next(), now)

        await asyncio.gather(*(client() for _ in range(clients)))
        return self.outcomes

    def _next(self) -> int:
        self._sent += 1
        return self._sent - 1

    async def _one(self, number: int, due: float) -> None:
        outcome = await self._send(number, due)
        self.outcomes.append(outcome)
        self._done(outcome)
