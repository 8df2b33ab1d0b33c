"""Accepts connections, and counts each from then on, also during its TLS handshake."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Iterable
from functools import partial

from weft.server.places import num_reserved
from weft.server.protocol import BoundedProtocol
from weft.server.rareline import RareLine

RETRY_S = 0.5  # after an error of accept, which would come again at once

logger = logging.getLogger("weft.server")


class Acceptor:
    """Accepts connections from listening sockets, which other processes may share.

    Beyond ``max_connections`` a connection is `BoundedProtocol.reserved`: it serves a health check
    or is refused. There are few such places; who comes when all are taken gets the oldest one's,
    so that silent clients cannot keep a health check out.

    Without descriptors nothing is accepted for a moment: connections wait, and the log says so.

    Args:
        make: returns the protocol of a new connection.
        context: for HTTPS; None for HTTP.
    """

    def __init__(
        self,
        make: Callable[[], BoundedProtocol],
        max_connections: int,
        context: ssl.SSLContext | None,
    ) -> None:
        self._make = make
        self._max_connections = max_connections
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._listeners: list[socket.socket] = []
        self._retries: dict[socket.socket, asyncio.TimerHandle] = {}
        self._open: set[BoundedProtocol] = set()  # without the reserved ones
        self._reserved: dict[BoundedProtocol, socket.socket] = {}  # the oldest first
        self._connecting: set[asyncio.Task[None]] = set()
        self._full = RareLine(
            f"All {max_connections} connections (max_connections) are taken; others get 503, "
            "but for health checks. Others: %d."
        )
        self._late = RareLine("Connections closed because the TLS handshake took too long: %d.")
        self._failed = RareLine(
            "Accepting connections failed %d times (%s); those that come wait for %s s."
        )

    @property
    def num_open(self) -> int:
        """Connections from accept to their end, the reserved ones among them."""
        return len(self._open) + len(self._reserved)

    def listen(self, listeners: Iterable[socket.socket]) -> None:
        """Accept from these sockets until ``close``."""
        for listener in listeners:
            listener.setblocking(False)
            self._listeners.append(listener)
            self._resume(listener)

    def close(self) -> None:
        """Accept no more. Connections stay open, but for unfinished handshakes."""
        for retry in self._retries.values():
            retry.cancel()
        for listener in self._listeners:
            self._loop.remove_reader(listener)
        self._listeners.clear()
        for task in self._connecting:
            task.cancel()

    def _resume(self, listener: socket.socket) -> None:
        self._retries.pop(listener, None)
        self._loop.add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        """Accept one connection; those that are left wake this process, or another, again."""
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # another process has it, or the client has left
        except OSError as error:
            self._pause(listener, error)
            return
        sock.setblocking(False)
        protocol = self._make()
        protocol.on_lost = self._forget
        self._admit(protocol, sock)
        task = self._loop.create_task(self._connect(protocol, sock))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def _pause(self, listener: socket.socket, error: OSError) -> None:
        """Try again in a moment: the socket stays readable, so this would spin."""
        self._failed.tell(error.strerror, RETRY_S)
        self._loop.remove_reader(listener)
        self._retries[listener] = self._loop.call_later(RETRY_S, self._resume, listener)

    def _admit(self, protocol: BoundedProtocol, sock: socket.socket) -> None:
        """Give a new connection a place."""
        if len(self._open) < self._max_connections:
            self._open.add(protocol)
            return
        self._full.tell()
        protocol.reserved = True
        if len(self._reserved) >= num_reserved(self._max_connections):
            oldest = next(iter(self._reserved))
            with contextlib.suppress(OSError):  # closed meanwhile
                self._reserved.pop(oldest).shutdown(socket.SHUT_RDWR)
        self._reserved[protocol] = sock

    def _forget(self, protocol: BoundedProtocol) -> None:
        self._open.discard(protocol)
        self._reserved.pop(protocol, None)

    async def _connect(self, protocol: BoundedProtocol, sock: socket.socket) -> None:
        """Hand a connection to its protocol, after the TLS handshake if there is one."""
        connect = partial(self._loop.connect_accepted_socket, lambda: protocol, sock)
        try:
            if self._context is None:
                await connect()
            else:
                await connect(ssl=self._context, ssl_handshake_timeout=protocol.patience_s)
        except ConnectionAbortedError:
            self._forget(protocol)
            self._late.tell()
        except OSError as error:  # ssl.SSLError is one
            self._forget(protocol)
            logger.info("A connection ended before its first request: %s.", error)
        except BaseException:
            self._forget(protocol)
            raise
