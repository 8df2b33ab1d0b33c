"""``/v1/responses``: routes, conversations that continue stored responses, and storing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import get_args

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weft.api import Job, decode_body
from weft.api.endpoints import EVENT_STREAM, answer_response
from weft.api.errors import UnsupportedParameterError
from weft.api.response_answers import ResponseAnswer
from weft.api.response_body import Include, ResponseBody, response_job
from weft.api.response_events import events_after, replay
from weft.api.response_items import Item, read_items
from weft.core.errors import ParameterError
from weft.server.background import Background
from weft.server.body import read_body
from weft.server.errors import json_response
from weft.server.exchange import current_owner
from weft.server.generation import STREAM_HEADERS, Generation
from weft.server.response_store import ResponseStore, Stored
from weft.server.service import Service

PATH = "/v1/responses"
MOST_ITEMS = 100  # of a page
DEFAULT_ITEMS = 20
MOST_DIGITS = 15  # of the number of an event


def response_routes(service: Service, store: ResponseStore, background: Background) -> list[Route]:
    """The routes of responses."""
    handlers = _ResponseHandlers(service, store, background)
    one = f"{PATH}/{{response_id}}"
    return [
        Route(PATH, handlers.create, methods=["POST"]),
        Route(f"{PATH}/input_tokens", handlers.count, methods=["POST"]),
        Route(one, handlers.retrieve, methods=["GET"]),
        Route(one, handlers.delete, methods=["DELETE"]),
        Route(f"{one}/cancel", handlers.cancel, methods=["POST"]),
        Route(f"{one}/input_items", handlers.input_items, methods=["GET"]),
    ]


@dataclass(frozen=True, slots=True)
class _AskedResponse:
    """A checked body, its bytes, its own input, and the job of the whole conversation."""

    data: bytes
    body: ResponseBody
    items: list[Item]
    job: Job


class _ResponseHandlers:
    """One method for each route."""

    def __init__(self, service: Service, store: ResponseStore, background: Background) -> None:
        self._service = service
        self._store = store
        self._background = background

    async def create(self, request: Request) -> Response:
        with self._service.metrics.counting_refusals():
            asked = await self._read(request)
        if asked.body.background:
            return await self._begin(asked, current_owner())
        service = self._service
        answer = answer_response(asked.job, asked.body, service.builder, service.texts)
        return Generation(service, answer, self._keeper(asked, current_owner()))

    async def _begin(self, asked: _AskedResponse, owner: bytes) -> Response:
        """Let a response be made in the background; its stream may be left and resumed."""
        items = orjson.dumps(asked.items)
        response = await self._background.start(asked.job, asked.data, items, owner)
        if asked.job.stream:
            return await self._background.follow(owner, asked.job.id, -1)
        return Response(response, media_type="application/json")

    async def count(self, request: Request) -> Response:
        asked = await self._read(request)
        tokens = asked.job.prompt_tokens
        return json_response({"object": "response.input_tokens", "input_tokens": tokens})

    async def _read(self, request: Request) -> _AskedResponse:
        service = self._service
        data = await read_body(request, service.options)
        notes = service.notes()

        def decode() -> tuple[ResponseBody, list[Item]]:
            body = decode_body(ResponseBody, data, notes=notes)
            return body, read_items(body.input, notes=notes)

        body, items = await service.prepare(len(data), decode, renders=False)
        self._check_store(body)
        before: list[Item] = []
        if body.previous_response_id is not None:
            before = await self._store.conversation(current_owner(), body.previous_response_id)
        job = await service.prepare(
            None if before else len(data),
            lambda: response_job(body, before + items, service.own_builder(), notes),
        )
        return _AskedResponse(data, body, items, job)

    @property
    def _stores(self) -> bool:
        """Whether a response that is stored here is found by every request plane."""
        options = self._service.options
        return options.responses_db is not None or options.frontends in (None, 1)

    def _check_store(self, body: ResponseBody) -> None:
        """Refuse requests that need a missing store; without a request, store nothing."""
        for name in ("store", "previous_response_id", "background"):
            if getattr(body, name) and not self._stores:
                raise UnsupportedParameterError(
                    name,
                    " This server has several request planes, and there is no folder in memory in "
                    "which they could share stored responses; with --responses-db FILE they do.",
                )
        if body.background and body.store is False:
            raise ParameterError("A background response has to be stored.", param="background")

    def _keeper(
        self, asked: _AskedResponse, owner: bytes
    ) -> Callable[[ResponseAnswer], Awaitable[None]]:
        """What stores the answer, if it is to be stored."""

        async def keep(answer: ResponseAnswer) -> None:
            if asked.body.store is not False and self._stores:
                items, previous = orjson.dumps(asked.items), asked.body.previous_response_id
                cuts = orjson.dumps(answer.cuts()) if asked.job.stream else None
                stored = Stored(answer.id, owner, previous, items, answer.body(), cuts)
                await self._store.save(stored)

        return keep

    async def retrieve(self, request: Request) -> Response:
        _check_include(request)
        after = _starting_after(request)
        stored = await self._load(request)
        if after is None:
            return Response(stored.response, media_type="application/json")
        if orjson.loads(stored.response)["background"]:
            return await self._background.follow(current_owner(), stored.id, after)

        def tell() -> bytes:
            cuts = None if stored.cuts is None else orjson.loads(stored.cuts)
            return events_after(replay(stored.response, cuts), 0, after)

        events = await self._service.compute(len(stored.response), tell)
        return Response(events, headers=STREAM_HEADERS, media_type=EVENT_STREAM)

    async def delete(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        await self._store.delete(current_owner(), response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        response = await self._background.cancel(
            current_owner(), request.path_params["response_id"]
        )
        return Response(response, media_type="application/json")

    async def input_items(self, request: Request) -> Response:
        _check_include(request)
        query = request.query_params
        limit, order, after = query.get("limit"), query.get("order", "desc"), query.get("after")
        if order not in ("asc", "desc"):
            raise ParameterError("order must be asc or desc.", param="order")
        items: list[Item] = orjson.loads((await self._load(request)).items)
        if order == "desc":
            items.reverse()
        if after is not None:
            places = [place for place, item in enumerate(items, 1) if item["id"] == after]
            if not places:
                raise ParameterError(f"There is no item '{after[:100]}'.", param="after")
            items = items[places[0] :]
        page = items[: _limit(limit)]
        return json_response(
            {
                "object": "list",
                "data": page,
                "first_id": page[0]["id"] if page else "",
                "last_id": page[-1]["id"] if page else "",
                "has_more": len(page) < len(items),
            }
        )

    async def _load(self, request: Request) -> Stored:
        return await self._store.load(current_owner(), request.path_params["response_id"])


def _starting_after(request: Request) -> int | None:
    """The number of the last event that the client has, -1 if it has none; None for no stream.

    A client that connects again sends its first query and, as a header, what it has got since.
    """
    query = request.query_params
    stream = query.get("stream", "false")
    if stream not in ("true", "false"):
        raise ParameterError("stream must be true or false.", param="stream")
    given = query.get("starting_after")
    if stream == "false":
        if given is not None:
            raise ParameterError("starting_after needs stream=true.", param="starting_after")
        return None
    header = request.headers.get("last-event-id")
    return max(_number(given, "starting_after"), _number(header, "Last-Event-ID"))


def _number(given: str | None, param: str) -> int:
    if not given:
        return -1
    if not (given.isascii() and given.isdecimal() and len(given) <= MOST_DIGITS):
        raise ParameterError(f"{param} must be the number of an event.", param=param)
    return int(given)


def _limit(given: str | None) -> int:
    if given is None:
        return DEFAULT_ITEMS
    short = given.isascii() and given.isdecimal() and len(given) <= len(str(MOST_ITEMS))
    if not short or not 1 <= int(given) <= MOST_ITEMS:
        raise ParameterError(f"limit must be from 1 to {MOST_ITEMS}.", param="limit")
    return int(given)


def _check_include(request: Request) -> None:
    """Check ``include``: known values have no effect, unknown ones are refused."""
    query = request.query_params
    for name in query.getlist("include") + query.getlist("include[]"):
        if name not in get_args(Include):
            raise ParameterError(f"'{name[:100]}' cannot be included.", param="include")
