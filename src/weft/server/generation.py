"""Generated answers: whole, or as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from weft.api import (
    Builder,
    ChunkWriter,
    Collector,
    CompletionBody,
    Job,
    Notes,
    decode_body,
    describe_error,
)
from weft.api.decoding import Body
from weft.api.whole import Whole
from weft.core.errors import WeftError
from weft.core.plan import Update
from weft.server.body import read_body
from weft.server.errors import log_failure
from weft.server.exchange import BARE_SEND
from weft.server.service import DisconnectedError, OpenJob, Service

FRAME = (b"data: ", b"\n\n")
DONE = b"data: [DONE]\n\n"
EVENT_STREAM = "text/event-stream; charset=utf-8"
STREAM_HEADERS = {
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


class Streamed(Protocol):
    """Writes the events of a job; ``push`` also returns ids that a stop string has ended.

    The stream ends with ``last``, or with what ``failed`` makes of an error.
    """

    @property
    def done(self) -> bool: ...

    def push(self, updates: Seq[Update]) -> tuple[bytes, list[int]]: ...

    def last(self) -> bytes: ...

    def failed(self, error: WeftError) -> bytes: ...


async def _nothing(_: Any) -> None:
    """The empty end of an answer that is not stored."""


@dataclass(frozen=True, slots=True)
class Form:
    """An endpoint's form of answers.

    Attributes:
        keep: awaited when the answer is complete, before its end is sent.
        content_type: of the stream.
    """

    whole: Callable[[Job], Whole]
    stream: Callable[[Job], Streamed]
    keep: Callable[[Any], Awaitable[None]] = _nothing
    content_type: str = EVENT_STREAM


def chunked_form(service: Service) -> Form:
    """Objects and chunks of completions and chat completions."""
    tokenizer, texts = service.builder.tokenizer, service.texts
    return Form(
        lambda job: Collector(job, tokenizer, texts),
        lambda job: _EventStream(job, tokenizer, texts, FRAME),
    )


class _EventStream(ChunkWriter):
    """Chunks as server-sent events, with OpenAI's mark of the end."""

    def last(self) -> bytes:
        return super().last() + DONE

    def failed(self, error: WeftError) -> bytes:
        return FRAME[0] + orjson.dumps(describe_error(error)[1]) + FRAME[1]


async def generate(
    service: Service,
    request: Request,
    body: type[Body],
    job_of: Callable[[Body, Builder, Notes], Job],
    form: Form,
) -> Response:
    """Read the body of a request and answer the job that it asks for. Raises what is wrong."""
    with service.metrics.counting_refusals():
        data = await read_body(request, service.options)
        return await answer(service, data, body, job_of, form)


async def answer(
    service: Service,
    data: bytes,
    body: type[Body],
    job_of: Callable[[Body, Builder, Notes], Job],
    form: Form,
) -> Response:
    """Answer the job that a body asks for. Raises what is wrong with it."""
    notes = service.notes()
    job = await service.prepare(
        len(data),
        lambda: job_of(decode_body(body, data, notes=notes), service.builder, notes),
        renders=body is not CompletionBody,
    )
    return Generation(service, job, form)


class Generation(Response):
    """Runs a job and sends its answer.

    Nothing is sent before the engine's first news, so a job that cannot start gets an HTTP error.
    A client that goes away frees everything at once; one that reads slowly is waited for, and gets
    what came meanwhile in larger chunks.
    """

    def __init__(self, service: Service, job: Job, form: Form) -> None:
        super().__init__()
        self._service = service
        self._job = job
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with running(self._service, self._job, receive) as job:
                if self._job.stream:
                    # A task of its own: each token wakes this coroutine, not all around it.
                    bare = scope.get(BARE_SEND, send)
                    await asyncio.create_task(self._stream(job, send, bare))
                else:
                    body = await self._collect(job)
                    await Response(body, media_type="application/json")(scope, receive, send)
        except DisconnectedError:
            return

    async def _collect(self, job: OpenJob) -> bytes:
        collector = self._form.whole(self._job)
        while not collector.done:
            job.stop(collector.push(await job.take()))
        await self._form.keep(collector)
        return collector.body()

    async def _stream(self, job: OpenJob, send: Send, send_part: Send) -> None:
        """Stream; chunks bypass the layers that wrap ``send``, which they do not need."""
        writer = self._form.stream(self._job)
        data, halted = writer.push(await job.take())
        job.stop(halted)
        given = {"content-type": self._form.content_type, **STREAM_HEADERS}
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
            await self._form.keep(writer)
            last = data + writer.last()
        except WeftError as error:
            log_failure(error)
            last = data + writer.failed(error)
        await send_part({"type": "http.response.body", "body": last, "more_body": False})


@contextlib.asynccontextmanager
async def running(service: Service, job: Job, receive: Receive) -> AsyncIterator[OpenJob]:
    """Submit a job and watch the connection while it runs.

    Raises:
        DisconnectedError: the client has gone (from ``take``).
        WeftError: the engine does not take the job, or something ended it.
        GrammarError: what the output has to follow cannot be compiled.
    """
    await service.check_grammar(job)
    with service.open(job) as opened:
        opened.submit()
        watcher = asyncio.create_task(opened.watch(receive))
        try:
            yield opened
        finally:
            watcher.cancel()
