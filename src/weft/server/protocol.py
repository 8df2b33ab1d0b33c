"""Bounds on what a connection may send before the application has a say.

Uvicorn and httptools limit neither the request line nor the headers, and take time quadratic in
their length on the event loop.
"""

from __future__ import annotations

import asyncio
import http
import logging
import sys
from typing import Any

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from weft.api.errors import error_object
from weft.server.exchange import REQUESTS, new_request_id
from weft.server.options import ServerOptions

logger = logging.getLogger("weft.server")

RETRY_AFTER_S = 1  # for clients of a server with too many connections
LINGER_S = 2  # a refused client may finish writing: a reset could overtake our answer


def bounded_protocol(options: ServerOptions) -> type[BoundedProtocol]:
    """Return the protocol class with the bounds of ``options``, as uvicorn wants it."""

    class Protocol(BoundedProtocol):
        limit = options.max_header_bytes
        max_connections = options.max_connections
        header_timeout_s = options.header_timeout_s

    return Protocol


class HostError(Exception):
    """A request of HTTP/1.1 does not name exactly one host."""


class BoundedProtocol(HttpToolsProtocol):
    """Refuses headers that are too long (431), too slow (closed) or malformed (400, as JSON).

    A connection beyond the number that may be open is answered with 503 and closed.

    One counter bounds the request line, headers, trailers and chunk extensions: the bytes since
    the parser last got anywhere, which is to complete the headers, to yield a piece of the body, or
    to complete the message. Data is parsed in pieces of ``limit`` bytes, and what follows the
    progress within a piece is not counted: a client gets at least ``limit`` and at most twice that.
    """

    limit = 64 * 2**10
    max_connections = 4096
    header_timeout_s = 20.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stalled_bytes = 0
        self._progressed = False
        self._in_headers = True
        self._refused = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._refuse(503, "The server has as many connections as it takes.", "busy")
        else:
            self._arm(self.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return  # of a client that has yet to read our answer
        if len(data) <= self.limit - self._stalled_bytes:
            self._feed(data)
            return
        while data and not self._refused and not self.transport.is_closing():
            room = self.limit - self._stalled_bytes
            if room <= 0:
                message = f"The headers of the request are longer than {self.limit} bytes."
                self._refuse(431, message, "headers_too_large")
                return
            self._feed(data[:room])
            data = data[room:]

    def _feed(self, data: bytes) -> None:
        self._progressed = False
        super().data_received(data)
        if self._refused:
            return
        self._stalled_bytes = 0 if self._progressed else self._stalled_bytes + len(data)
        if self._in_headers and self._stalled_bytes and self._timer is None:
            self._arm(self.header_timeout_s)

    def on_headers_complete(self) -> None:
        self._progressed, self._in_headers = True, False
        self._disarm()
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (not hosts and self.parser.get_http_version() == "1.1"):
            raise HostError("A request needs one Host header.")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._progressed = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._progressed, self._in_headers = True, True
        super().on_message_complete()

    def abort_if_unread(self) -> None:
        """Break the connection if its client leaves too much of an answer unread."""
        if self.flow.write_paused:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Called while the parser's error is handled."""
        self._refuse(400, _reason(sys.exception()) or msg, "invalid_http")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answer without the application, and read no more requests from the connection."""
        self._refused = True
        self._unset_keepalive_if_required()
        self._disarm()
        if self.transport.is_closing():
            return
        if self._answering() and self.cycle.response_started:
            self.transport.close()  # an answer inside another one would be read as part of it
            return
        request_id = new_request_id()
        facts = {"request_id": request_id, "status": status, "error": code}
        REQUESTS.info("request", extra={"fields": facts})
        body = orjson.dumps(error_object(message, status=status, code=code))
        head = (
            f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\n"
            f"x-request-id: {request_id}\r\n"
            + (f"retry-after: {RETRY_AFTER_S}\r\n" if status == 503 else "")
            + "connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        if self._answering():
            self.cycle.disconnected = True  # what the application still says goes nowhere
            self.cycle.message_event.set()
        if self.transport.can_write_eof():
            self.flow.resume_reading()
            self.transport.write_eof()
            self._timer = self.loop.call_later(LINGER_S, self.transport.close)
        else:
            self.transport.close()

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _arm(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self._headers_late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _headers_late(self) -> None:
        self._timer = None
        if self._answering():
            self._arm(self.header_timeout_s)  # the next request is early, not late
        elif self.timeout_keep_alive_task is None and not self.transport.is_closing():
            logger.info("A connection was closed: no complete headers in time.")
            self.transport.close()


def _reason(error: BaseException | None) -> str | None:
    """What is wrong with a request that could not be parsed, if the parser says it."""
    if isinstance(error, httptools.HttpParserCallbackError):
        error = error.__context__  # what one of our own methods has raised
    if isinstance(error, HostError):
        return str(error)
    if isinstance(error, httptools.HttpParserError) and str(error):
        return f"The request is no valid HTTP: {str(error).rstrip('.')}."
    return None
