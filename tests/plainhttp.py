"""A small HTTP client on bare sockets, for tests that leave, stall and count connections."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import h11


class BrokenError(Exception):
    """The connection ended before its answer did."""


class Exchange:
    """One POST on a connection of its own.

    Attributes:
        port: of our end; tells which process of the server has the connection.
        status, headers: of the answer, once ``begin`` has returned.
    """

    def __init__(self, url: str, path: str, body: Any, receive_bytes: int | None = None) -> None:
        self.port = 0
        self.status = 0
        self.headers: dict[str, str] = {}
        self._address = urlsplit(url)
        self._path = path
        self._body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._receive_bytes = receive_bytes
        self._http = h11.Connection(h11.CLIENT)

    async def __aenter__(self) -> Exchange:
        host, port = self._address.hostname or "", self._address.port or 80
        sock = socket.socket()
        sock.setblocking(False)
        if self._receive_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_bytes)
        await asyncio.get_running_loop().sock_connect(sock, (host, port))
        self.port = sock.getsockname()[1]
        limit = self._receive_bytes or 2**16
        self._reader, self._writer = await asyncio.open_connection(sock=sock, limit=limit)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    def reset(self) -> None:
        """Leave without a word: the server sees a reset, not an end."""
        sock = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    async def send(self) -> None:
        """Send the request."""
        headers = [
            ("host", "localhost"),
            ("content-type", "application/json"),
            ("connection", "close"),
        ]
        headers.append(("content-length", str(len(self._body))))
        request = h11.Request(method="POST", target=self._path, headers=headers)
        self._writer.write(self._http.send(request) or b"")
        self._writer.write(self._http.send(h11.Data(self._body)) or b"")
        self._writer.write(self._http.send(h11.EndOfMessage()) or b"")
        await self._writer.drain()

    async def begin(self) -> None:
        """Wait for the head of the answer. Raises BrokenError."""
        event = await self._next()
        assert isinstance(event, h11.Response), event
        self.status = event.status_code
        self.headers = {name.decode(): value.decode() for name, value in event.headers}

    async def body(self) -> AsyncIterator[bytes]:
        """The parts of the answer as they come. Raises BrokenError if it has no proper end."""
        while not isinstance(event := await self._next(), h11.EndOfMessage):
            assert isinstance(event, h11.Data), event
            yield bytes(event.data)

    async def _next(self) -> Any:
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                self._http.receive_data(await self._reader.read(2**16))
        except (OSError, h11.RemoteProtocolError) as error:
            raise BrokenError(str(error)) from None
        if isinstance(event, h11.ConnectionClosed):
            raise BrokenError("no answer")
        return event


async def events(parts: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """The data of the server-sent events in a body."""
    rest = b""
    async for part in parts:
        *whole, rest = (rest + part).split(b"\n\n")
        for event in whole:
            for line in event.split(b"\n"):
                if line.startswith(b"data: "):
                    yield line[6:].decode()
    assert rest == b"", f"half an event at the end: {rest!r}"
