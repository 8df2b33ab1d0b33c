"""Anthropic's ``/v1/messages``: its routes and the form of its errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weft.api import decode_body
from weft.api.message_answers import error_of
from weft.api.message_body import PromptBody
from weft.api.messages import count_tokens
from weft.core.logs import REQUEST_ID
from weft.server.body import read_body
from weft.server.errors import json_response
from weft.server.service import Service

PATH = "/v1/messages"


def message_routes(service: Service) -> list[Route]:
    """The routes of messages beside the endpoint itself."""

    async def count(request: Request) -> Response:
        data = await read_body(request, service.options)

        def work() -> int:
            notes = service.notes()
            return count_tokens(decode_body(PromptBody, data, notes=notes), service.builder, notes)

        return json_response({"input_tokens": await service.prepare(len(data), work)})

    return [
        Route(f"{PATH}/count_tokens", count, methods=["POST"]),
    ]


def anthropic_error(status: int, body: Mapping[str, Any]) -> tuple[Any, Mapping[str, str]]:
    """The body of an error in Anthropic's form, and the request's id as its clients read it."""
    number = REQUEST_ID.get()
    content = {"type": "error", "error": error_of(status, body), "request_id": number or None}
    return content, {"request-id": number} if number else {}
