"""Limits of what a connection may send before the application handles it.

Uvicorn and httptools limit neither the request line nor the headers, and take time quadratic in
their length on the event loop; nor do they limit how many requests wait for the answers before.
"""

from __future__ import annotations

import asyncio
import http
from collections.abc import Callable
from typing import Any

import httptools
import orjson
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from weft.api.errors import error_object
from weft.server.auth import OPEN_PATHS
from weft.server.exchange import REQUESTS, new_request_id
from weft.server.options import ServerOptions
from weft.server.rareline import RareLine

RETRY_AFTER_S = 1  # for clients of a server with too many connections
LINGER_S = 2  # a refused client may finish writing: a reset could overtake our answer
RESERVED_S = 5.0  # for the headers of a connection beyond the limit
PIECE_BYTES = 1024  # parsed at once: some forty requests at the most
NOTHING = memoryview(b"")


def bounded_protocol(options: ServerOptions) -> type[BoundedProtocol]:
    """Return the protocol class with the bounds of ``options``, as uvicorn wants it."""

    class Protocol(BoundedProtocol):
        limit = options.max_header_bytes
        header_timeout_s = options.header_timeout_s
        late = RareLine("Connections closed because no complete headers came in time: %d.")

    return Protocol


class RequestRefusedError(Exception):
    """A request that is answered without the application."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


class HeldFlow(FlowControl):
    """Flow control that reads nothing while it is held, whatever a request asks for."""

    held = False

    def hold(self) -> None:
        self.held = True
        self.pause_reading()

    def release(self) -> None:
        self.held = False
        self.resume_reading()

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()


class BoundedProtocol(HttpToolsProtocol):
    """Refuses headers that are too long (431), too slow (closed) or malformed (400, as JSON).

    One counter bounds the request line, headers, trailers and chunk extensions: the bytes since
    the parser last got anywhere, which is to complete the headers, to yield a piece of the body, or
    to complete the message. What follows the progress within a piece is not counted: a client gets
    at least ``limit`` and at most ``PIECE_BYTES`` more.

    Answers keep the order of the requests, refusals too. While a request waits for the answers
    before it nothing more is parsed or read: what a client can have waiting is one piece's
    requests, and the bytes of one read.

    Attributes:
        reserved: the connection is beyond the limit: it gets one answer, to a health check, or 503.
        on_lost: called when the connection has ended, if it had begun.
    """

    limit = 64 * 2**10
    header_timeout_s = 20.0
    late: RareLine
    flow: HeldFlow

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reserved = False
        self.on_lost: Callable[[BoundedProtocol], None] = lambda _: None
        self._accepted = self.loop.time()
        self._unparsed = NOTHING
        self._stalled_bytes = 0
        self._progressed = False
        self._in_headers = True
        self._running: RequestResponseCycle | None = None  # the oldest without an answer, or done
        self._refused: RequestRefusedError | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def patience_s(self) -> float:
        """Seconds from accept to complete headers."""
        return min(RESERVED_S, self.header_timeout_s) if self.reserved else self.header_timeout_s

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = HeldFlow(transport)
        self._arm(self._accepted + self.patience_s - self.loop.time())

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self.pipeline.clear()
        super().connection_lost(exc)
        if self._running is not None:
            self._leave(self._running)
        self.on_lost(self)

    def shutdown(self) -> None:
        """Answer what has been parsed, then close."""
        self._unparsed = NOTHING
        super().shutdown()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return  # of a client that has yet to read our answer
        self._unparsed = memoryview(self._unparsed.tobytes() + data)
        self._parse()

    def _parse(self) -> None:
        """Parse on until a request has to wait for its turn, which also stops the reading."""
        if self._unparsed:
            self._unset_keepalive_if_required()
        while self._unparsed and not self.pipeline and not self.transport.is_closing():
            room = self.limit - self._stalled_bytes
            if room <= 0:
                message = f"The headers of the request are longer than {self.limit} bytes."
                self._refuse(RequestRefusedError(431, message, "headers_too_large"))
                return
            taken = self._feed(self._unparsed[: min(room, PIECE_BYTES)])
            self._unparsed = self._unparsed[taken:] or NOTHING  # which keeps no buffer alive
        if self._refused or self.transport.is_closing():
            return
        if self.pipeline:
            self.flow.hold()
        elif self.flow.held:
            self.flow.release()

    def _feed(self, piece: memoryview) -> int:
        """Parse a piece; how many bytes of it were taken."""
        taken = len(piece)
        self._progressed = False
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            taken = upgrade.args[0]  # there is none: the next request follows
        except httptools.HttpParserError as error:
            self._refuse(_refusal(error))
            return taken
        self._stalled_bytes = 0 if self._progressed else self._stalled_bytes + taken
        if self._in_headers and self._stalled_bytes and self._timer is None:
            self._arm(self.header_timeout_s)
        return taken

    def on_headers_complete(self) -> None:
        self._progressed = True
        self._disarm()
        self._check_headers()
        super().on_headers_complete()
        self._in_headers = False
        if self.reserved:
            self.cycle.keep_alive = False

    def _check_headers(self) -> None:
        names = [name for name, _ in self.headers]
        hosts = names.count(b"host")
        if hosts > 1 or (not hosts and self.parser.get_http_version() == "1.1"):
            raise RequestRefusedError(400, "A request needs one Host header.", "invalid_http")
        if self.parser.should_upgrade() and {b"content-length", b"transfer-encoding"} & set(names):
            # the parser would take the body for a next request
            raise RequestRefusedError(
                400, "A request with a body cannot ask for an Upgrade.", "invalid_http"
            )
        path = self.url.partition(b"?")[0].decode("latin-1").removeprefix(self.root_path)
        if self.reserved and path not in OPEN_PATHS:
            raise _full()

    def on_body(self, body: bytes) -> None:
        self._progressed = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._progressed, self._in_headers = True, True
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """Called when an answer is complete; the next waiting request is begun."""
        super().on_response_complete()
        if self._refused:
            self._answer_refused()
        elif self.flow.held and not self.pipeline:
            self.loop.call_soon(self._parse)

    def abort_if_unread(self) -> None:
        """Break the connection if its client leaves too much of an answer unread."""
        if self.flow.write_paused:
            self.transport.abort()

    def _refuse(self, refused: RequestRefusedError) -> None:
        """Answer without the application, in turn, and parse no more."""
        self._refused = refused
        self._unparsed = NOTHING
        self._disarm()
        if self.transport.is_closing():
            return
        self.flow.release()  # what comes is dropped, but the client's leaving is seen
        if not self._in_headers:  # the body of the newest request is malformed
            if self.pipeline:
                self.pipeline.popleft()
            elif self._answering() and self.cycle.response_started:
                self.transport.close()  # it cannot be answered twice
            else:
                self._leave(self.cycle)
                self._running = None
        self._answer_refused()

    def _answer_refused(self) -> None:
        """Write the refusal, unless answers before it are not complete, and close."""
        if self._answering() or self.transport.is_closing():
            return
        assert self._refused is not None
        self._unset_keepalive_if_required()
        self.transport.write(_answer(self._refused))
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self._timer = self.loop.call_later(LINGER_S, self.transport.close)
        else:
            self.transport.close()

    def _answering(self) -> bool:
        """Whether a request that has been parsed is without its answer, or a part of that."""
        running = self._running
        return bool(self.pipeline) or (running is not None and not running.response_complete)

    def _leave(self, cycle: RequestResponseCycle) -> None:
        """Signal the application that its client has disconnected; discard its output."""
        cycle.disconnected = True
        cycle.message_event.set()

    def _arm(self, seconds: float) -> None:
        self._timer = self.loop.call_later(max(0.0, seconds), self._headers_late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _headers_late(self) -> None:
        self._timer = None
        if self._answering():
            self._arm(self.header_timeout_s)  # the next request is early, not late
        elif self.reserved:
            self._refuse(_full())
        elif self.timeout_keep_alive_task is None and not self.transport.is_closing():
            self.late.tell()
            self.transport.close()


def _full() -> RequestRefusedError:
    return RequestRefusedError(503, "The server is at its limit of connections.", "busy")


def _refusal(error: BaseException | None) -> RequestRefusedError:
    """The answer to a request that could not be parsed."""
    if isinstance(error, httptools.HttpParserCallbackError):
        error = error.__context__  # what one of our own methods has raised
    if isinstance(error, RequestRefusedError):
        return error
    known = isinstance(error, httptools.HttpParserError) and str(error)
    detail = f": {str(error).rstrip('.')}" if known else ""
    return RequestRefusedError(400, f"The request is no valid HTTP{detail}.", "invalid_http")


def _answer(refused: RequestRefusedError) -> bytes:
    """A whole answer, after which the connection is closed. It is logged here."""
    status, request_id = refused.status, new_request_id()
    facts = {"request_id": request_id, "status": status, "error": refused.code}
    REQUESTS.info("request", extra={"fields": facts})
    body = orjson.dumps(error_object(refused.message, status=status, code=refused.code))
    head = (
        f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\n"
        "content-type: application/json\r\n"
        f"content-length: {len(body)}\r\n"
        f"x-request-id: {request_id}\r\n"
        + (f"retry-after: {RETRY_AFTER_S}\r\n" if status == 503 else "")
        + "connection: close\r\n\r\n"
    )
    return head.encode() + body
