"""Formats every error for the API of its path, wherever in the server it occurs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.server.errors import handle_bug
from weft.server.exchange import inner_path

# HTTP status and body in OpenAI's form -> body in another, and headers to add.
ErrorForm = Callable[[int, Mapping[str, Any]], tuple[Any, Mapping[str, str]]]


class ErrorForms:
    """Gives errors under some paths another form than OpenAI's.

    Args:
        forms: by the path that they stand under, and a header that the request must have; "" for
            all requests.
    """

    def __init__(self, app: ASGIApp, forms: Mapping[tuple[str, str], ErrorForm]) -> None:
        self._app = app
        self._forms = [(f"{path}/", name.encode(), form) for (path, name), form in forms.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        form = self._form_of(scope) if scope["type"] == "http" else None
        if form is None:
            await self._app(scope, receive, send)
            return
        rewriter = _Rewriter(send, form)
        try:
            await self._app(scope, receive, rewriter.send)
        except Exception as error:
            if not rewriter.started:
                response = await handle_bug(Request(scope), error)
                await response(scope, receive, rewriter.send)
            raise  # the server logs it

    def _form_of(self, scope: Scope) -> ErrorForm | None:
        path = f"{inner_path(scope)}/"
        for under, header, form in self._forms:
            asked = not header or any(name == header for name, _ in scope["headers"])
            if asked and path.startswith(under):
                return form
        return None


class _Rewriter:
    """Passes an answer on; the body of an error is held until it is whole, and rewritten."""

    def __init__(self, send: Send, form: ErrorForm) -> None:
        self.started = False
        self._send = send
        self._form = form
        self._start: Message | None = None
        self._body = b""

    async def send(self, message: Message) -> None:
        self.started = True
        if message["type"] == "http.response.start" and message["status"] >= 400:
            self._start = message
        elif self._start is None:
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body"):
                await self._finish(self._start)

    async def _finish(self, start: Message) -> None:
        content, more = self._form(start["status"], orjson.loads(self._body))
        body = orjson.dumps(content)
        headers = [pair for pair in start["headers"] if pair[0].lower() != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        headers += [(name.encode(), value.encode()) for name, value in more.items()]
        whole: dict[str, Any] = {**start, "headers": headers}
        await self._send(whole)
        await self._send({"type": "http.response.body", "body": body})
