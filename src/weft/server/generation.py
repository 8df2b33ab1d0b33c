"""Endpoints whose answers the engine computes: their routes, and answers whole or streamed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from weft.api import Job
from weft.api.asked import Asked, Streamed
from weft.api.endpoints import ENDPOINTS, EVENT_STREAM, Endpoint
from weft.core.errors import WeftError
from weft.server.accounts import Bill
from weft.server.body import read_body
from weft.server.errors import json_response, log_failure
from weft.server.exchange import BARE_SEND
from weft.server.service import DisconnectedError, OpenJob, Service

STREAM_HEADERS = {
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


async def _nothing(_: Any) -> None:
    """The empty end of an answer that is not stored."""


def endpoint_routes(service: Service) -> list[Route]:
    """A route for each endpoint whose answers are not stored."""
    return [_route(service, row) for row in ENDPOINTS.values() if not row.stored]


def _route(service: Service, row: Endpoint) -> Route:
    async def handle(request: Request) -> Response:
        with service.metrics.counting_refusals():
            data = await read_body(request, service.options)
            notes = service.notes()
            asked = await service.prepare(
                None if row.repeats else len(data),
                lambda: row.read(data, service.own_builder(), service.texts, notes),
                renders=row.renders,
            )
        if isinstance(asked, Asked):
            return Generation(service, asked, content_type=row.content_type)
        return json_response(asked)

    return Route(row.path, handle, methods=["POST"])


class Generation(Response):
    """Runs a job and sends its answer.

    Nothing is sent before the engine's first news, so a job that cannot start gets an HTTP error.
    A client that goes away frees everything at once; one that reads slowly is waited for, and gets
    what came meanwhile in larger chunks.

    Args:
        keep: awaited when the answer is complete, before its end is sent.
        content_type: of a stream.
    """

    def __init__(
        self,
        service: Service,
        asked: Asked,
        keep: Callable[[Any], Awaitable[None]] = _nothing,
        content_type: str = EVENT_STREAM,
    ) -> None:
        super().__init__()
        self._service = service
        self._asked = asked
        self._keep = keep
        self._content_type = content_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        job, writer = self._asked.job, self._asked.stream
        bill = self._service.charged(job)
        try:
            if job.stream and writer is not None:
                async with running(self._service, job, receive, bill) as opened:
                    # A task of its own: each token wakes this coroutine, not all around it.
                    bare = scope.get(BARE_SEND, send)
                    await asyncio.create_task(self._stream(opened, writer(), send, bare))
            else:
                body = await self._collect(receive, bill)
                await Response(body, media_type="application/json")(scope, receive, send)
        except DisconnectedError:
            return
        finally:
            bill.settle()

    async def _collect(self, receive: Receive, bill: Bill) -> bytes:
        """The whole answer; parts of a job, if it has several, leave room for other clients."""
        whole = self._asked.whole()
        for part in self._asked.parts():
            left = len(part.requests)
            async with running(self._service, part, receive, bill) as opened:
                while left and not whole.done:
                    updates = await opened.take()
                    left -= sum(update.finish is not None for update in updates)
                    opened.stop(whole.push(updates))
                if whole.done:
                    await self._keep(whole)
        return whole.body()

    async def _stream(self, job: OpenJob, writer: Streamed, send: Send, send_part: Send) -> None:
        """Stream; parts of the body need nothing from the layers that wrap ``send``."""
        data, halted = writer.push(await job.take())
        job.stop(halted)
        given = {"content-type": self._content_type, **STREAM_HEADERS}
        headers = [(name.encode(), value.encode()) for name, value in given.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            while not writer.done:
                if data:
                    part = {"type": "http.response.body", "body": data, "more_body": True}
                    await send_part(part)
                    data = b""
                data, halted = writer.push(await job.take())
                if halted:
                    job.stop(halted)
            await self._keep(writer)
            last = data + writer.last()
        except WeftError as error:
            log_failure(error)
            last = data + writer.failed(error)
        await send_part({"type": "http.response.body", "body": last, "more_body": False})


@contextlib.asynccontextmanager
async def running(
    service: Service, job: Job, receive: Receive, bill: Bill
) -> AsyncIterator[OpenJob]:
    """Submit a job and watch the connection while it runs.

    Raises:
        DisconnectedError: the client has gone (from ``take``).
        WeftError: the engine does not take the job, or something ended it.
        GrammarError: what the output has to follow cannot be compiled.
    """
    await service.check_grammar(job)
    with service.open(job, bill) as opened:
        opened.submit()
        watcher = asyncio.create_task(opened.watch(receive))
        try:
            yield opened
        finally:
            watcher.cancel()
