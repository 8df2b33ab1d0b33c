"""``/v1/embeddings``: submits inputs in waves, which leaves room for other clients."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from weft.api import Job, decode_body
from weft.api.embeddings import EmbeddingBody, EmbeddingCollector, embedding_job, waves
from weft.server.body import read_body
from weft.server.generation import running
from weft.server.service import DisconnectedError, Service


def embedding_routes(service: Service) -> list[Route]:
    """The routes of embeddings."""

    async def create(request: Request) -> Response:
        with service.metrics.counting_refusals():
            return await embed(service, await read_body(request, service.options))

    return [Route("/v1/embeddings", create, methods=["POST"])]


async def embed(service: Service, data: bytes) -> Response:
    """Answer with the vectors that a body asks for. Raises what is wrong with it."""

    def build() -> tuple[Job, EmbeddingCollector]:
        body = decode_body(EmbeddingBody, data, notes=service.notes())
        job = embedding_job(body, service.builder)
        return job, EmbeddingCollector(job, body)

    return EmbeddingResponse(service, *await service.prepare(len(data), build, renders=False))


class EmbeddingResponse(Response):
    """Runs a job wave after wave and sends its vectors; a client that goes away ends it."""

    def __init__(self, service: Service, job: Job, collector: EmbeddingCollector) -> None:
        super().__init__()
        self._service = service
        self._job = job
        self._collector = collector

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            for wave in waves(self._job):
                left = self._collector.left - len(wave.requests)
                async with running(self._service, wave, receive) as opened:
                    while self._collector.left > left:
                        self._collector.push(await opened.take())
        except DisconnectedError:
            return
        answer = Response(self._collector.body(), media_type="application/json")
        await answer(scope, receive, send)
