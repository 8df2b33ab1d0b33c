"""Checks API keys, and limits the open requests of each key."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from weft.api.errors import error_object
from weft.core.errors import WeftError
from weft.server.accounts import Accounts
from weft.server.errors import error_response, json_response
from weft.server.exchange import EXCHANGE, inner_path
from weft.server.keys import KeyRing

OPENAPI = "/openapi.json"
OPEN_PATHS = frozenset({"/health", "/ready"})  # probes: also past limits, and by any name
KEYLESS_PATHS = OPEN_PATHS | {OPENAPI}


class NotAllowedError(WeftError):
    """The page is for other keys than this one."""

    http_status = 403

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Reserved:
    """A path that only some keys may read.

    Attributes:
        readers: their names.
        message, code: of the error that others get.
    """

    readers: frozenset[str]
    message: str
    code: str


class RequireKey:
    """Lets requests with a valid key pass; all, if there are no keys.

    Every path but ``open_paths`` is guarded, also those that do not exist. The key comes as
    ``Authorization: Bearer KEY`` or as ``X-Api-Key: KEY``.

    Args:
        accounts: count the requests with a body that a key has in progress.
        reserved: paths that only some keys may read.
        open_paths: paths that need no key.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: KeyRing,
        accounts: Accounts,
        reserved: Mapping[str, Reserved],
        open_paths: frozenset[str] = KEYLESS_PATHS,
    ) -> None:
        self._app = app
        self._keys = keys
        self._accounts = accounts
        self._reserved = reserved
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http = scope["type"] == "http"
        if not http or not self._keys.demanded or inner_path(scope) in self._open_paths:
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
        page = self._reserved.get(inner_path(scope))
        if page is not None and key.name not in page.readers:
            await error_response(NotAllowedError(page.message, page.code))(scope, receive, send)
            return
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._accounts.in_progress(key))
            except WeftError as error:
                await error_response(error)(scope, receive, send)
                return
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
