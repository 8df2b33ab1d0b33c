"""Ollama's API under ``/api``: routes, streams of JSON lines, and the form of errors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from weft.api import Builder, Job, Notes, decode_body
from weft.api.decoding import Body
from weft.api.ollama import (
    OllamaBody,
    OllamaChatBody,
    OllamaGenerateBody,
    ollama_chat_job,
    ollama_generate_job,
    unloads,
)
from weft.api.ollama_answers import (
    OllamaCollector,
    OllamaWriter,
    Said,
    chat_said,
    error_of,
    generate_said,
    loaded,
)
from weft.api.ollama_embeddings import (
    Asked,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    ollama_embed,
    ollama_embeddings,
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
from weft.server.embeddings import EmbeddingResponse
from weft.server.errors import json_response
from weft.server.generation import Form, Generation
from weft.server.service import Prepared, Service

PATH = "/api"
STORE_PATHS = ("/blobs/{digest}", "/copy", "/create", "/delete", "/push")

Handler = Callable[[Request], Awaitable[Response]]


class ModelStoreError(WeftError):
    """The request is for a store of models, which weft does not have."""

    http_status = 400
    code = "no_model_store"


def ollama_routes(service: Service) -> list[Route]:
    """The routes of Ollama's API."""
    handlers = _Handlers(service)
    chat = handlers.generating(OllamaChatBody, ollama_chat_job, chat_said)
    generate = handlers.generating(OllamaGenerateBody, ollama_generate_job, generate_said)
    embed = handlers.embedding(OllamaEmbedBody, ollama_embed)
    embeddings = handlers.embedding(OllamaEmbeddingsBody, ollama_embeddings)
    posts = {
        "/chat": chat,
        "/embed": embed,
        "/embeddings": embeddings,
        "/generate": generate,
        "/pull": handlers.pull,
        "/show": handlers.show,
    }
    gets = {"/ps": handlers.running, "/tags": handlers.tags, "/version": handlers.version}
    return [
        Route("/", handlers.alive, methods=["GET"]),
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


class _Handlers:
    """The handlers of the routes."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def generating(
        self, body: type[Body], job_of: Callable[[Body, Builder, Notes], Job | None], said: Said
    ) -> Handler:
        """A handler of bodies that ask for text, or only for the model to be loaded."""
        service, texts = self._service, self._service.texts
        tokenizer = service.builder.tokenizer
        form = Form(
            lambda job: OllamaCollector(job, tokenizer, texts, said),
            lambda job: OllamaWriter(job, tokenizer, texts, said),
            content_type="application/x-ndjson",
        )

        def build(data: bytes) -> Job | dict[str, Any]:
            notes = service.notes()
            asked = decode_body(body, data, notes=notes)
            job = job_of(asked, service.builder, notes)
            if job is not None:
                return job
            assert isinstance(asked, OllamaBody)
            return loaded(asked.model, said, unload=unloads(asked))

        async def handle(request: Request) -> Response:
            asked = await self._prepared(request, build)
            if isinstance(asked, Job):
                return Generation(service, asked, form)
            return json_response(asked)

        return handle

    def embedding(
        self, body: type[Body], job_of: Callable[[Body, Builder, Notes], Asked]
    ) -> Handler:
        """A handler of bodies that ask for vectors."""
        service = self._service

        def build(data: bytes) -> Asked:
            notes = service.notes()
            return job_of(decode_body(body, data, notes=notes), service.builder, notes)

        async def handle(request: Request) -> Response:
            asked = await self._prepared(request, build, renders=False)
            return (
                json_response(asked)
                if isinstance(asked, dict)
                else EmbeddingResponse(service, *asked)
            )

        return handle

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

    async def alive(self, _: Request) -> Response:
        """The probe that Ollama's clients send first."""
        return PlainTextResponse("weft is running")

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

    async def _prepared(
        self, request: Request, build: Callable[[bytes], Prepared], *, renders: bool = True
    ) -> Prepared:
        """Build a job from the body of a request; refusals are counted."""
        service = self._service
        with service.metrics.counting_refusals():
            data = await read_body(request, service.options)
            return await service.prepare(len(data), partial(build, data), renders=renders)
