"""Tells a service manager such as systemd when weft serves, that it lives, and when it stops.

The protocol is that of sd_notify(3): datagrams to the socket that ``NOTIFY_SOCKET`` names.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Mapping

TICK_S = 0.05
PINGS = 3  # in the time after which the manager takes a silent process for dead

logger = logging.getLogger("weft")


class ServiceManager:
    """The service manager of this process; without one, nothing is sent.

    Args:
        address: path of its socket, or ``@`` and an abstract name; empty without a manager.
        watchdog_s: seconds of silence after which it ends the process; None if it does not.

    Attributes:
        watchdog_s: the same.
    """

    def __init__(self, address: str = "", watchdog_s: float | None = None) -> None:
        self.watchdog_s = watchdog_s
        self._socket: socket.socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        if not address:
            return
        try:
            if address[0] not in "/@":
                raise OSError("the address must begin with / or @")
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)
            self._socket.connect(address.replace("@", "\0", 1) if address[0] == "@" else address)
        except OSError as error:
            logger.warning("The service manager at %s cannot be told: %s.", address, error)
            self.close()

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> ServiceManager:
        """The manager that the variables ``NOTIFY_SOCKET`` and ``WATCHDOG_USEC`` describe."""
        watchdog_s = None
        meant = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        if meant and environment.get("WATCHDOG_USEC", "").isdecimal():
            watchdog_s = int(environment["WATCHDOG_USEC"]) / 1e6 or None
        return cls(environment.get("NOTIFY_SOCKET", ""), watchdog_s)

    def follow(self, serves: Callable[[], bool]) -> None:
        """Say READY as soon as we serve, and then give signs of life where these are wanted.

        The event loop that runs does that, until ``close``.
        """
        if self._socket is not None:
            self._tasks.append(asyncio.create_task(self._follow(serves)))

    def stopping(self) -> None:
        """Say that the end has begun."""
        if self._socket is not None:
            self._tasks.append(asyncio.create_task(self._insist("STOPPING=1")))

    async def _follow(self, serves: Callable[[], bool]) -> None:
        while not serves():
            await asyncio.sleep(TICK_S)
        await self._insist("READY=1")
        while self.watchdog_s is not None:
            self.tell("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_s / PINGS)

    async def _insist(self, state: str) -> None:
        while not self.tell(state):
            await asyncio.sleep(TICK_S)

    def tell(self, state: str) -> bool:
        """Send an assignment, unless the manager has too many to read; whether that is done.

        It is done, too, where there is no manager, or none that can be reached.
        """
        if self._socket is None:
            return True
        try:
            self._socket.send(state.encode())
        except BlockingIOError:
            return False
        except OSError as error:
            logger.warning("The service manager cannot be told %s: %s.", state, error.strerror)
        return True

    def close(self) -> None:
        """Send nothing any more."""
        for task in self._tasks:
            task.cancel()
        if self._socket is not None:
            self._socket.close()
        self._socket = None
