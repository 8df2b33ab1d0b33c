"""Anthropic's ``/v1/messages``: routes, and every error under them in Anthropic's form."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.api import decode_body
from weft.api.message_answers import MessageCollector, MessageWriter, error_of
from weft.api.message_body import MessageBody, PromptBody
from weft.api.messages import count_tokens, message_job
from weft.core.logs import REQUEST_ID
from weft.server.body import read_body
from weft.server.errors import handle_bug, json_response
from weft.server.exchange import inner_path
from weft.server.generation import Form, generate
from weft.server.service import Service

PATH = "/v1/messages"


def message_routes(service: Service) -> list[Route]:
    """The routes of messages."""
    tokenizer = service.builder.tokenizer
    form = Form(
        lambda job: MessageCollector(job, tokenizer),
        lambda job: MessageWriter(job, tokenizer),
    )

    async def create(request: Request) -> Response:
        return await generate(service, request, MessageBody, message_job, form)

    async def count(request: Request) -> Response:
        data = await read_body(request, service.options)

        def work() -> int:
            notes = service.notes()
            return count_tokens(decode_body(PromptBody, data, notes=notes), service.builder, notes)

        return json_response({"input_tokens": await service.prepare(len(data), work)})

    return [
        Route(PATH, create, methods=["POST"]),
        Route(f"{PATH}/count_tokens", count, methods=["POST"]),
    ]


class AnthropicErrors:
    """Gives errors under ``/v1/messages`` Anthropic's form, wherever they come from."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not f"{inner_path(scope)}/".startswith(f"{PATH}/"):
            await self._app(scope, receive, send)
            return
        rewriter = _Rewriter(send)
        try:
            await self._app(scope, receive, rewriter.send)
        except Exception as error:
            if not rewriter.started:
                response = await handle_bug(Request(scope), error)
                await response(scope, receive, rewriter.send)
            raise  # the server logs it


class _Rewriter:
    """Passes an answer on; the body of an error is held until it is whole, and rewritten."""

    def __init__(self, send: Send) -> None:
        self.started = False
        self._send = send
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
        headers = [pair for pair in start["headers"] if pair[0].lower() != b"content-length"]
        number = REQUEST_ID.get()
        body = orjson.dumps(
            {
                "type": "error",
                "error": error_of(start["status"], orjson.loads(self._body)),
                "request_id": number or None,
            }
        )
        headers.append((b"content-length", str(len(body)).encode()))
        if number:
            headers.append((b"request-id", number.encode()))
        whole: dict[str, Any] = {**start, "headers": headers}
        await self._send(whole)
        await self._send({"type": "http.response.body", "body": body})
