"""Ollama's API under ``/api``: routes, streams of JSON lines, and the form of errors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weft.api import decode_body
from weft.api.ollama_answers import (
    error_of,
)
from weft.api.ollama_models import (
    OLLAMA_VERSION,
    ModelBody,
    list_models,
    running_models,
    show_model,
)
from weft.core.errors import WeftError
from weft.server.body import read_body
from weft.server.errors import json_response
from weft.server.service import Service

PATH = "/api"
STORE_PATHS = ("/blobs/{digest}", "/copy", "/create", "/delete", "/push")

Handler = Callable[[Request], Awaitable[Response]]


class ModelStoreError(WeftError):
    """The request is for a store of models, which weft does not have."""

    http_status = 400
    code = "no_model_store"


def ollama_routes(service: Service) -> list[Route]:
    """The routes of Ollama's API beside the endpoints that the engine answers."""
    handlers = _OllamaHandlers(service)
    posts = {"/pull": handlers.pull, "/show": handlers.show}
    gets = {"/ps": handlers.running, "/tags": handlers.tags, "/version": handlers.version}
    return [
        *(Route(PATH + path, handler, methods=["POST"]) for path, handler in posts.items()),
        *(Route(PATH + path, handler, methods=["GET"]) for path, handler in gets.items()),
        *(
            Route(PATH + path, handlers.no_store, methods=["GET", "POST", "DELETE"])
            for path in STORE_PATHS
        ),
    ]


def ollama_error(_: int, body: Mapping[str, Any]) -> tuple[Any, Mapping[str, str]]:
    """The body of an error in Ollama's form."""
    return error_of(body), {}


class _OllamaHandlers:
    """What answers each route."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def pull(self, request: Request) -> Response:
        """Success for the served model, which is loaded."""
        await self._named(request)
        return json_response({"status": "success"})

    async def show(self, request: Request) -> Response:
        name = await self._named(request)
        return json_response(show_model(name, self._service.builder))

    async def tags(self, _: Request) -> Response:
        return json_response(list_models(self._service.builder.card))

    async def running(self, _: Request) -> Response:
        return json_response(running_models(self._service.builder.card))

    async def version(self, _: Request) -> Response:
        return json_response({"version": OLLAMA_VERSION})

    async def no_store(self, _: Request) -> Response:
        raise ModelStoreError(
            "weft has no store of models: it serves the one that it was started with."
        )

    async def _named(self, request: Request) -> str:
        """The served model that a body names."""
        service = self._service
        data = await read_body(request, service.options)

        def work() -> str:
            body = decode_body(ModelBody, data, notes=service.notes())
            return body.named(service.builder.card)

        return await service.compute(len(data), work)
