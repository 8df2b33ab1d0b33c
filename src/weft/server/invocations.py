"""``/invocations``, the path of hosting platforms: chats, completions and embeddings."""

from __future__ import annotations

from msgspec import Raw, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weft.api import ChatBody, CompletionBody, chat_job, completion_job, decode_body
from weft.api.errors import MissingParameterError
from weft.api.rules import NULL, is_neutral
from weft.server.body import read_body
from weft.server.embeddings import embed
from weft.server.generation import answer, chunked_form
from weft.server.service import Service


class BodyShape(Struct):
    """The field that tells what kind of body it is; the endpoint of that kind checks the rest."""

    messages: Raw = NULL
    prompt: Raw = NULL
    input: Raw = NULL


def invocation_routes(service: Service) -> list[Route]:
    """The route of invocations."""

    async def invoke(request: Request) -> Response:
        with service.metrics.counting_refusals():
            data = await read_body(request, service.options)
            shape = await service.compute(len(data), lambda: decode_body(BodyShape, data))
            form = chunked_form(service)
            if not is_neutral(bytes(shape.messages)):
                return await answer(service, data, ChatBody, chat_job, form)
            if not is_neutral(bytes(shape.prompt)):
                return await answer(service, data, CompletionBody, completion_job, form)
            if not is_neutral(bytes(shape.input)):
                return await embed(service, data)
            raise MissingParameterError("messages")

    return [Route("/invocations", invoke, methods=["POST"])]
