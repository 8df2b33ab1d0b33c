"""API keys."""

from __future__ import annotations

import hmac
from collections.abc import Sequence as Seq
from hashlib import sha256

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from weft.api.errors import error_object
from weft.server.errors import json_response

OPEN_PATHS = frozenset({"/health", "/ready"})


BARE_SEND = "weft.send"  # in the scope: sends parts of a body past everything further in


class RequireKey:
    """Lets requests pass that bear one of the keys; all, if there are no keys.

    Every path but ``OPEN_PATHS`` is guarded, also those that do not exist. Digests are compared in
    constant time, and always all of them.
    """

    def __init__(self, app: ASGIApp, keys: Seq[str]) -> None:
        self._app = app
        self._digests = [sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[BARE_SEND] = send
        if scope["type"] != "http" or not self._digests or self._open(scope):
            await self._app(scope, receive, send)
            return
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._known(key.strip()):
            await self._app(scope, receive, send)
            return
        message = (
            "Incorrect API key provided."
            if key
            else "No API key provided; send it as 'Authorization: Bearer KEY'."
        )
        body = error_object(message, status=401, code="invalid_api_key")
        response = json_response(body, 401, {"www-authenticate": "Bearer"})
        await response(scope, receive, send)

    @staticmethod
    def _open(scope: Scope) -> bool:
        path, root = scope["path"], scope.get("root_path", "")
        inner = path[len(root) :] if root and path.startswith(root) else path
        return inner in OPEN_PATHS

    def _known(self, key: str) -> bool:
        given = sha256(key.encode("utf-8", "surrogateescape")).digest()
        found = False
        for digest in self._digests:
            found |= hmac.compare_digest(given, digest)
        return found
