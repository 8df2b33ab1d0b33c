"""Processes that are kept running: one after the other, until they are to end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from abc import ABC, abstractmethod

from weft.core.process import Process


class KeptProcess(ABC):
    """A process and its successors; whoever keeps them sets ``_process`` to the present one."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._ending = asyncio.Event()

    @property
    def pid(self) -> int:
        """Of the process that is there or was last; 0 if there has been none."""
        return 0 if self._process is None else self._process.pid

    def serves(self) -> bool:
        """Whether the process does its work by now."""
        return self.pid > 0

    @abstractmethod
    async def run(self) -> None:
        """Keep the process running until ``end``, and wait until it has ended."""

    def end(self) -> None:
        """Ask it to finish what is open and end; a second time, to end at once."""
        self._ending.set()
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it without asking."""
        self._ending.set()
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    async def _ends_within(self, seconds: float) -> bool:
        """Wait for ``end`` to be called; whether it was."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ending.wait(), seconds)
        return self._ending.is_set()
