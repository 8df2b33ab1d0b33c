"""Checks API keys, and limits the open requests of each key."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from weft.api.errors import error_object
from weft.core.errors import WeftError
from weft.server.errors import error_response, json_response
from weft.server.exchange import EXCHANGE, inner_path
from weft.server.keys import Key, KeyRing

OPEN_PATHS = frozenset({"/health", "/ready"})
METRICS_PATH = "/metrics"


class KeyBusyError(WeftError):
    """A key has as many requests in progress as it may."""

    http_status = 429
    code = "too_many_requests"
    retry_after_s = 1


class MetricsNotAllowedError(WeftError):
    """Metrics are for other keys than this one."""

    http_status = 403
    code = "metrics_not_allowed"


class RequireKey:
    """Lets requests with a valid key pass; all, if there are no keys.

    Every path but ``OPEN_PATHS`` is guarded, also those that do not exist. The key comes as
    ``Authorization: Bearer KEY`` or as ``X-Api-Key: KEY``.

    Args:
        limit: requests with a body that one key may have in progress; None for any number.
        readers: names of the keys that may read the metrics; none for all.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: KeyRing,
        limit: int | None = None,
        readers: frozenset[str] = frozenset(),
    ) -> None:
        self._app = app
        self._keys = keys
        self._limit = limit
        self._readers = readers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http = scope["type"] == "http"
        if not http or not self._keys.demanded or inner_path(scope) in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        given = _given_key(Headers(scope=scope))
        key = self._keys.find(given)
        if key is None:
            await _refusal(given)(scope, receive, send)
            return
        exchange = EXCHANGE.get()
        if exchange is not None:
            exchange.key = key
        if self._readers and key.name not in self._readers and inner_path(scope) == METRICS_PATH:
            message = "The metrics of this server are for other keys."
            await error_response(MetricsNotAllowedError(message))(scope, receive, send)
            return
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if self._limit is not None and key.open >= self._limit:
            message = f"This API key has {key.open} requests in progress, which is its limit."
            await error_response(KeyBusyError(message))(scope, receive, send)
            return
        with _counted(key):
            await self._app(scope, receive, send)


def _given_key(headers: Headers) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    return headers.get("x-api-key", "") if not scheme else ""


def _refusal(given: str) -> ASGIApp:
    message = (
        "Incorrect API key provided."
        if given
        else "No API key provided; send it as 'Authorization: Bearer KEY'."
    )
    exchange = EXCHANGE.get()
    if exchange is not None:
        exchange.error = "invalid_api_key"
    body = error_object(message, status=401, code="invalid_api_key")
    return json_response(body, 401, {"www-authenticate": "Bearer"})


@contextlib.contextmanager
def _counted(key: Key) -> Iterator[None]:
    key.open += 1
    try:
        yield
    finally:
        key.open -= 1
