"""The HTTP application of several models: finds the model of each request."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Any

import msgspec
from msgspec import Struct
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from weft.api import decode_body
from weft.api.endpoints import ENDPOINTS
from weft.api.ollama_models import list_models, running_models
from weft.batch.store import BatchStore
from weft.core.errors import ModelAsleepError, WeftError
from weft.ring.model_board import LOAD, UNLOAD
from weft.server.app import (
    METRICS,
    Common,
    describe,
    for_admins,
    make_app,
    sees_keys,
    server_info,
)
from weft.server.auth import OPENAPI
from weft.server.batches import PATH as BATCHES
from weft.server.batches import BatchBody
from weft.server.body import read_body
from weft.server.errors import BodyTooSlowError, json_response
from weft.server.exchange import current_owner, inner_path
from weft.server.listsplit import ListSplitter
from weft.server.loom import PATH as LOOM
from weft.server.message_batches import PATH as MESSAGE_BATCHES
from weft.server.metrics import CONTENT_TYPE
from weft.server.model_lists import PATH as MODELS
from weft.server.model_lists import model_list_response, model_response
from weft.server.models import Held, Models, PlaneModel
from weft.server.service import DisconnectedError
from weft.server.targets import PATH as TARGETS

ORDERS = {f"{MODELS}/load": LOAD, f"{MODELS}/unload": UNLOAD}
# Requests that an engine has to answer.
WAKING = frozenset({
    *(("POST", row.path) for row in ENDPOINTS.values()),
    *(("POST", "/v1/responses"), ("POST", "/api/pull"), ("PUT", TARGETS)),
})  # fmt: skip
# Requests for which a model is loaded that was never awake, though no body names it.
LOADING = frozenset({*WAKING, ("POST", MESSAGE_BATCHES)})
# Those that show what only a model that was awake once has.
SHOWING = frozenset({("GET", LOOM), ("GET", TARGETS)})
# Paths whose bodies name a model.
NAMING = frozenset({
    *(path for method, path in WAKING if method == "POST"),
    *("/v1/responses/input_tokens", "/v1/messages/count_tokens"),
    *("/tokenize", "/detokenize", "/api/show"),
})  # fmt: skip
FIRST_LINE_BYTES = 2**20  # of a file of a batch, in which its model is looked for


class _ModelNames(Struct):
    """What a body says of its model; all else is for whoever answers it."""

    model: Any = None
    name: Any = None


class _FirstLine(Struct):
    """A line of a batch."""

    body: _ModelNames | None = None


class _FirstRequest(Struct):
    """A request of a batch of messages."""

    params: _ModelNames | None = None


class OrderBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /v1/models/load`` and ``unload``."""

    model: str


def create_models_app(models: Models, common: Common) -> Starlette:
    """The application; ``app.state.service`` is what the server drains."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await models.start()
        yield
        await models.close()
        common.close()

    handlers = _Handlers(models, common)
    reserved = for_admins(common.options, "Loading and unloading models is", "models_not_allowed")
    app = make_app(handlers.routes(), common, lifespan, dict.fromkeys(ORDERS, reserved))
    app.router.default = handlers.dispatch
    app.state.service = models
    return app


class _Handlers:
    """What concerns all models, and the way to the routes of one."""

    def __init__(self, models: Models, common: Common) -> None:
        self._models = models
        self._common = common
        self._options = replace(common.options, log_requests=False)  # who answers logs the body
        self._description = b""

    def routes(self) -> list[Route]:
        gets: dict[str, Callable[[Request], Awaitable[Response]]] = {
            MODELS: self.list,
            f"{MODELS}/{{name:path}}": self.show,
            "/api/tags": self.tags,
            "/api/ps": self.running,
            "/ready": self.ready,
            METRICS: self.metrics,
            "/server_info": self.server_info,
            OPENAPI: self.openapi,
        }
        return [
            *(Route(path, self.order, methods=["POST"]) for path in ORDERS),
            *(Route(path, handler, methods=["GET"]) for path, handler in gets.items()),
        ]

    # -- requests for one model ---------------------------------------------------------------

    async def dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the model answer that a request names, or else the first one."""
        if scope["type"] != "http":
            return
        path, method, held = inner_path(scope), scope["method"], Held(receive)
        receive = held.receive
        wakes = (method, path) in WAKING
        if method == "POST" and path in (*NAMING, BATCHES):
            body = await read_body(Request(scope, receive), self._options)
            whole: Message = {"type": "http.request", "body": body, "more_body": False}
            receive = _replayed([whole], receive)
            in_body = path in NAMING
            model = self._model_in(body) if in_body else await self._model_of_batch(body)
        else:
            named = Request(scope).query_params.get("model")
            if named:
                model = self._models.find(named)
            elif (method, path) == ("POST", MESSAGE_BATCHES):
                model, receive = await self._model_of_messages(receive)
            else:
                model = self._models.known()
            if model.parts is None and (method, path) not in LOADING:
                if (method, path) in SHOWING:
                    raise model.refused or _not_loaded(model)
                model = self._models.known()
        if not wakes and model.parts is not None:
            await (await model.open())(scope, receive, send)
            return
        with model.entered():
            try:
                router = await model.ready(self._options, lambda: self._models.stopped, held)
            except DisconnectedError:
                return
            await router(scope, receive, send)

    def _model_in(self, body: bytes) -> PlaneModel:
        """The model that a body names. What is wrong with the body else, others say."""
        try:
            said = msgspec.json.decode(body, type=_ModelNames)
        except (msgspec.DecodeError, RecursionError):
            return self._models.known()
        return self._find(said)

    def _find(self, said: _ModelNames) -> PlaneModel:
        name = said.model or said.name
        if not isinstance(name, str):
            return self._models.known() if name else self._models.find(None)
        services = self._models.services
        with services[0].metrics.counting_refusals() if services else contextlib.nullcontext():
            return self._models.find(name)

    async def _model_of_batch(self, body: bytes) -> PlaneModel:
        """The model of the first line of the file that a new batch names."""
        try:
            file_id, owner = decode_body(BatchBody, body).input_file_id, current_owner()

            def first_line(store: BatchStore) -> bytes:
                store.file(owner, file_id)
                with store.files_folder.path(file_id).open("rb") as file:
                    return file.readline(FIRST_LINE_BYTES)

            line = msgspec.json.decode(await self._common.data.run(first_line), type=_FirstLine)
        except (WeftError, OSError, msgspec.DecodeError, RecursionError):
            return self._models.known()  # whose handler says what is wrong
        return self._of_first(line.body)

    async def _model_of_messages(self, receive: Receive) -> tuple[PlaneModel, Receive]:
        """The model of the first request of a batch of messages, and what gives its body again.

        Raises:
            BodyTooSlowError: that request was not there in time.
        """
        splitter = ListSplitter("requests", self._options.max_body_bytes)
        seen: list[Message] = []
        first: bytes | None = None
        try:
            while first is None and (not seen or seen[-1].get("more_body", False)):
                async with asyncio.timeout(self._options.body_timeout_s):
                    seen.append(await receive())
                first = next(splitter.feed(seen[-1].get("body", b"")), None)
            given = msgspec.json.decode(first or b"{}", type=_FirstRequest)
        except TimeoutError:
            raise BodyTooSlowError.silent(self._options.body_timeout_s) from None
        except (WeftError, msgspec.DecodeError, RecursionError):
            given = _FirstRequest()  # the handler of whatever model says what is wrong
        return self._of_first(given.params), _replayed(seen, receive)

    def _of_first(self, said: _ModelNames | None) -> PlaneModel:
        """The model of a batch, by its first request."""
        try:
            return self._find(said or _ModelNames())
        except WeftError:
            return self._models.known()  # each line has an error of its own then

    # -- models -------------------------------------------------------------------------------

    async def order(self, request: Request) -> Response:
        """Load or unload a model."""
        body = decode_body(OrderBody, await read_body(request, self._common.options))
        model = self._models.find(body.model)
        patience_s = self._common.options.max_request_timeout_s
        await model.order(ORDERS[inner_path(request.scope)], patience_s)
        return json_response({"id": model.names[0], "object": "model", **model.describe()})

    async def list(self, request: Request) -> Response:
        found = [entry for model in self._models.models for entry in model.objects()]
        return model_list_response(request, found)

    async def show(self, request: Request) -> Response:
        name = request.path_params["name"]
        model = self._models.find(name)
        return model_response(request, {**model.objects()[0], "id": name})

    async def tags(self, _: Request) -> Response:
        found = [list_models(model.card())["models"] for model in self._models.models]
        return json_response({"models": [entry for entries in found for entry in entries]})

    async def running(self, _: Request) -> Response:
        awake = [model for model in self._models.models if model.row.state == "awake"]
        found = [running_models(model.card())["models"] for model in awake]
        return json_response({"models": [entry for entries in found for entry in entries]})

    # -- the server ---------------------------------------------------------------------------

    async def ready(self, _: Request) -> Response:
        state = self._models.state
        states = {model.names[0]: model.state for model in self._models.models}
        return json_response({"status": state, "models": states}, 200 if state == "ready" else 503)

    async def metrics(self, _: Request) -> Response:
        from weft.server.metric_families import render  # no start waits for it
        from weft.server.model_metrics import model_families

        rows = {model.names[0]: model.row for model in self._models.models}
        page = render(
            [service.metrics for service in self._models.services],
            by_key=sees_keys(self._common.options),
            more=model_families(rows),
        )
        return Response(page, media_type=CONTENT_TYPE)

    async def openapi(self, request: Request) -> Response:
        """The description of all routes, those of a model among them; made once."""
        if not self._description:
            known = self._models.known().parts
            assert known is not None
            routes = [*request.app.routes, *known.routes]
            self._description = await describe(routes, self._common.options)
        return Response(self._description, media_type="application/json")

    async def server_info(self, request: Request) -> Response:
        """Of the model that the query names, or the first one that was awake, and of all."""
        named = request.query_params.get("model")
        model = self._models.find(named) if named else self._models.known()
        if model.service is None:
            model = self._models.known()
        assert model.service is not None
        return json_response({**server_info(model.service), "models": self._models.describe()})


def _not_loaded(model: PlaneModel) -> ModelAsleepError:
    return ModelAsleepError(
        f"The model '{model.names[0]}' was not loaded yet; a request that an engine has to answer "
        "loads it, or POST /v1/models/load."
    )


def _replayed(seen: Iterable[Message], receive: Receive) -> Receive:
    """What gives messages once more, and then what else comes."""
    left = deque(seen)

    async def again() -> Message:
        return left.popleft() if left else await receive()

    return again
