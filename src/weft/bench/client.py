"""A lean client of OpenAI's API: parses in C, and takes times as bytes leave the socket."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import orjson

from weft.core.addresses import host_of
from weft.core.errors import ConfigError, WeftError
from weft.core.event_stream import EventSplitter

CONNECT_TIMEOUT_S = 30.0
_SHOWN_CHARS = 200


def _ignore(*_: object) -> None:
    """Nobody wants to know."""


class BrokenError(Exception):
    """The connection failed, or what came over it was no answer."""


class TimedAnswer:
    """One HTTP answer while it comes; hands on the data of server-sent events."""

    def __init__(self, event: Callable[[bytes, float], None]) -> None:
        self.status = 0
        self.body = b""
        self.begun = False
        self.arrived = asyncio.get_running_loop().create_future()
        self._event = event
        self._parser = httptools.HttpResponseParser(self)
        self._stream = False
        self._bounded = False
        self._events = EventSplitter()
        self._now = 0.0

    def feed(self, data: bytes, now: float) -> None:
        """Take bytes that came at ``now``."""
        self._now, self.begun = now, True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.end(BrokenError(f"not HTTP: {error}"))

    def end(self, error: Exception | None) -> None:
        """The connection has ended, by ``error`` or properly."""
        if self.arrived.done():
            return
        if error is None and (self.status == 0 or self._bounded):
            error = BrokenError("closed before the end" if self.status else "closed unanswered")
        if error is None:
            self.arrived.set_result(False)
        else:
            self.arrived.set_exception(error)

    # called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type":
            self._stream = value.lower().startswith(b"text/event-stream")
        elif name in (b"content-length", b"transfer-encoding"):
            self._bounded = True

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if not self._stream:
            self.body += body
            return
        for data in self._events.feed(body):
            self._event(data, self._now)

    def on_message_complete(self) -> None:
        if not self.arrived.done() and self.status >= 200:  # not for 100 Continue
            self.arrived.set_result(self._parser.should_keep_alive())


class _Connection(asyncio.Protocol):
    """A connection that serves one answer after another."""

    def __init__(self) -> None:
        self.answer: TimedAnswer | None = None
        self.transport: asyncio.Transport
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's own is no subclass

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self.answer is None:
            self.transport.close()
        else:
            self.answer.feed(data, now)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if self.answer is not None:
            self.answer.end(BrokenError(f"connection lost: {exc}") if exc else None)


class LoadClient:
    """Sends requests to one server over connections that it keeps.

    Args:
        url: of the server, with or without ``/v1``.

    Raises:
        ConfigError: the URL is not one of a server.
    """

    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        self._host, self._port = host_of(url)
        parts = urlsplit(url)
        self._secure = parts.scheme == "https"
        path = parts.path.rstrip("/")
        self._path = path if path.endswith("/v1") else path + "/v1"
        self.address = f"{parts.scheme}://{parts.netloc}{self._path}"
        key = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        if not f"{path}{key[:-2]}".isprintable() or not (path + key).isascii():
            raise ConfigError("URL and key must be printable ASCII.", param="url")
        self._head = f"host: {parts.netloc.rpartition('@')[2]}\r\n{key}"
        self._timeout_s = timeout_s
        self._idle: list[_Connection] = []

    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        event: Callable[[bytes, float], None] = _ignore,
        sending: Callable[[float], None] = _ignore,
    ) -> TimedAnswer:
        """Send a request and wait for the whole answer.

        Args:
            event: gets the data of each server-sent event, and when it came.
            sending: gets the time at which the request is sent.

        Raises:
            BrokenError: no answer, or not the whole one.
            TimeoutError: it took too long.
        """
        data = b"" if body is None else orjson.dumps(body)
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._head}"
        if body is not None:
            head += "content-type: application/json\r\n"
        raw = f"{head}content-length: {len(data)}\r\n\r\n".encode() + data
        sending(time.perf_counter())
        async with asyncio.timeout(self._timeout_s):
            while (kept := self._kept()) is not None:
                answer = TimedAnswer(event)
                try:
                    return await self._exchange(kept, raw, answer)
                except BrokenError:
                    if answer.begun:
                        raise
                    # the server had given up the idle connection: it has not seen the request
            return await self._exchange(await self._connect(), raw, TimedAnswer(event))

    def close(self) -> None:
        """Close the connections that are kept."""
        while (connection := self._kept()) is not None:
            connection.transport.close()

    def _kept(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.lost and not connection.transport.is_closing():
                return connection
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        context = ssl.create_default_context() if self._secure else None
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(
                    _Connection, self._host, self._port, ssl=context
                )
        except TimeoutError:
            raise BrokenError("cannot connect: no answer") from None
        except OSError as error:
            raise BrokenError(f"cannot connect: {error.strerror or error}") from None
        return connection

    async def _exchange(
        self, connection: _Connection, raw: bytes, answer: TimedAnswer
    ) -> TimedAnswer:
        connection.answer = answer
        keep = False
        try:
            connection.transport.write(raw)
            keep = await answer.arrived
        finally:
            connection.answer = None
            if keep:
                self._idle.append(connection)
            else:
                connection.transport.close()
        return answer


def error_message(answer: TimedAnswer) -> str:
    """The error message in a server's answer, or the beginning of the answer."""
    try:
        return str(orjson.loads(answer.body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.body[:_SHOWN_CHARS].decode(errors="replace")


async def first_model(client: LoadClient) -> str:
    """The server's first model. Raises WeftError if there is no server or no model."""
    try:
        answer = await client.request("GET", "/models")
    except (BrokenError, TimeoutError) as error:
        what = str(error) or "no answer in time"
        raise WeftError(f"No server answers at {client.address} ({what}).") from None
    if answer.status != 200:
        raise WeftError(
            f"{client.address}/models answered {answer.status}: {error_message(answer)}"
        )
    try:
        return str(orjson.loads(answer.body)["data"][0]["id"])
    except (ValueError, KeyError, TypeError, IndexError):
        raise WeftError(f"{client.address}/models lists no model; give one by --model.") from None
