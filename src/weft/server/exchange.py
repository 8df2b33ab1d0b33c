"""One record of an HTTP request and its answer, and the layer that logs and counts it."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.api.jobs import Job
from weft.api.rules import HEADER, Notes
from weft.core.logs import REQUEST_ID
from weft.server.keyfile import Key
from weft.server.timer import JobTimer

REQUESTS = logging.getLogger("weft.requests")
BARE_SEND = "weft.send"  # in the scope: sends parts of a body past everything further in
CLIENT_LEFT = 499  # logged where no answer could be given

_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_SHOWN_CHARS = 200


@dataclass(slots=True)
class Exchange:
    """One request and its answer.

    Attributes:
        id: what ``X-Request-Id`` says, or a made one if it is missing, too long or malformed.
        started, started_ns: on the monotonic clock, and on the one that shows the time of day.
        key: whose request it is; None where no key is demanded.
        status: of the answer; 0 until it has begun.
        error: code of the error that ended it, "" without one.
        job, timer: of the latest job that the engine has taken for it.
        notes: take what is ignored of its body.
        reply: more headers of its answer.
    """

    id: str
    method: str
    path: str
    headers: Headers
    started: float = field(default_factory=time.monotonic)
    started_ns: int = field(default_factory=time.time_ns)
    key: Key | None = None
    status: int = 0
    error: str = ""
    job: Job | None = None
    timer: JobTimer | None = None
    notes: Notes = field(default_factory=Notes)
    reply: list[tuple[bytes, bytes]] = field(default_factory=list)

    @classmethod
    def of(cls, scope: Scope) -> Exchange:
        """The exchange that a request begins."""
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        number = given if _ID.fullmatch(given) else new_request_id()
        return cls(number, scope["method"], scope["path"][:_SHOWN_CHARS], headers)

    def facts(self) -> dict[str, Any]:
        """The fields of its log line; what does not apply is left out."""
        facts: dict[str, Any] = {
            "request_id": self.id,
            "key": self.key.name if self.key is not None else None,
            "method": self.method,
            "path": self.path,
            "status": self.status or CLIENT_LEFT,
            "duration_ms": round((time.monotonic() - self.started) * 1e3, 1),
            "error": self.error or None,
            "ignored": self.notes.names or None,
        }
        job, timer = self.job, self.timer
        if job is not None and timer is not None:
            first = timer.first_token
            facts |= {
                "model": job.model,
                "service_class": job.requests[0].service_class,
                "prompt_tokens": job.prompt_tokens,
                "output_tokens": timer.output_tokens,
                "ttft_ms": round((first - self.started) * 1e3, 1) if first else None,
                "finish": ",".join(sorted(set(timer.ends))) or "cancelled",
            }
        return {name: value for name, value in facts.items() if value is not None}


def new_request_id() -> str:
    """An id for a request that bears none."""
    return secrets.token_hex(16)


def inner_path(scope: Scope) -> str:
    """The path of a request as routes have it, without the prefix of a proxy."""
    path, root = scope["path"], scope.get("root_path", "")
    return str(path[len(root) :] if root and path.startswith(root) else path)


EXCHANGE: ContextVar[Exchange | None] = ContextVar("exchange", default=None)


def current_key() -> Key | None:
    """The key of the request that is being answered; None where none is needed."""
    exchange = EXCHANGE.get()
    return None if exchange is None else exchange.key


def current_owner() -> bytes:
    """Whose the request is that is being answered: the digest of its key, b"" where none is needed.

    What is stored belongs to it: one key never finds what is another's.
    """
    key = current_key()
    return b"" if key is None else key.digest


class Observe:
    """The outermost layer: gives each request its id, and tells all of ``tell`` how it went."""

    def __init__(self, app: ASGIApp, tell: Seq[Callable[[Exchange], None]]) -> None:
        self._app = app
        self._tell = tell

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange.of(scope)
        EXCHANGE.set(exchange)  # every request has a task, and so a context, of its own
        REQUEST_ID.set(exchange.id)
        header = (b"x-request-id", exchange.id.encode())

        async def send_start(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                headers = [pair for pair in message.get("headers", ()) if pair[0] != header[0]]
                if exchange.notes.names:
                    headers.append((HEADER.encode(), exchange.notes.header()))
                message["headers"] = [*headers, *exchange.reply, header]
            await send(message)

        scope[BARE_SEND] = send
        try:
            await self._app(scope, receive, send_start)
        except Exception as error:
            exchange.status, exchange.error = 500, type(error).__name__
            raise
        finally:
            for tell in self._tell:
                tell(exchange)


def log_exchange(exchange: Exchange) -> None:
    """Write the line of a request that has been answered."""
    if REQUESTS.isEnabledFor(logging.INFO):
        REQUESTS.info("request", extra={"fields": exchange.facts()})
