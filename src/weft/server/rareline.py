"""A log line that is written at most twice a minute, with the number of occurrences."""

from __future__ import annotations

import asyncio
import logging

EVERY_S = 30.0

logger = logging.getLogger("weft.server")


class RareLine:
    """A warning about what clients can cause as often as they like.

    The first one is written at once, those within the next ``EVERY_S`` as one line at their end.

    Args:
        message: has ``%d`` for how often it has happened since the last line, then the details.
    """

    def __init__(self, message: str) -> None:
        self._message = message
        self._count = 0
        self._details: tuple[object, ...] = ()
        self._timer: asyncio.TimerHandle | None = None

    def tell(self, *details: object) -> None:
        """It has happened once more. To be called on an event loop."""
        self._count += 1
        self._details = details
        if self._timer is None:
            self._write()

    def _write(self) -> None:
        self._timer = None
        if self._count:
            logger.warning(self._message, self._count, *self._details)
            self._count = 0
            self._timer = asyncio.get_running_loop().call_later(EVERY_S, self._write)
