"""The HTTP application: routes and middleware."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from types import MappingProxyType
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from weft import __version__
from weft.api import (
    DetokenizeBody,
    ModelCard,
    TokenizeBody,
    decode_body,
    detokenize,
    model_entries,
    model_object,
    tokenize,
)
from weft.api.bodies import FIXED_LIMITS
from weft.api.classes import CLASS_HEADER, USUAL
from weft.api.rules import HEADER
from weft.api.sampling import check_model
from weft.core.errors import WeftError
from weft.core.ports import EngineClient
from weft.core.settings import settings_of
from weft.ring.target_board import TargetBoard
from weft.server.accounts import RATE_HEADERS, Accounts
from weft.server.auth import KEYLESS_PATHS, OPENAPI, RequireKey, Reserved
from weft.server.background import Background
from weft.server.batches import batch_routes
from weft.server.body import read_body
from weft.server.data import DataFolder
from weft.server.errorforms import ErrorForms
from weft.server.errors import handle_bug, handle_http_error, handle_weft_error, json_response
from weft.server.exchange import Observe, current_key, log_exchange
from weft.server.files import file_routes
from weft.server.front_page import front_routes, page_paths
from weft.server.generation import endpoint_routes
from weft.server.hosts import CheckHost, hosts_checked
from weft.server.keyfile import Key
from weft.server.keys import KeyRing
from weft.server.life import Life, open_life
from weft.server.loom import PATH as LOOM
from weft.server.loom import loom_routes
from weft.server.message_batches import message_batch_routes
from weft.server.messages import PATH as MESSAGES
from weft.server.messages import anthropic_error, message_routes
from weft.server.metrics import CONTENT_TYPE
from weft.server.model_lists import PATH as MODELS
from weft.server.model_lists import VERSION, model_list_response, model_response
from weft.server.ollama import PATH as OLLAMA
from weft.server.ollama import ollama_error, ollama_routes
from weft.server.options import ServerOptions
from weft.server.probe import EngineProbe, NoProbe
from weft.server.quota_board import QuotaBoard
from weft.server.response_store import ResponseStore
from weft.server.responses import response_routes
from weft.server.run_store import RunStore
from weft.server.service import Service
from weft.server.targets import PATH as TARGETS
from weft.server.targets import target_routes
from weft.server.tracing import Tracer, make_exporter
from weft.server.usage import PATH as USAGE
from weft.server.usage import usage_routes
from weft.server.usage_store import UsageStore
from weft.text import ChatTemplate, Tokenizer

METRICS = "/metrics"
ERROR_FORMS = {
    (MESSAGES, ""): anthropic_error,
    (MODELS, VERSION): anthropic_error,
    (OLLAMA, ""): ollama_error,
}


def create_app(
    client: EngineClient,
    tokenizer: Tokenizer,
    chat_template: ChatTemplate | None,
    card: ModelCard,
    options: ServerOptions,
    *,
    probe: EngineProbe | None = None,
    quotas: QuotaBoard | None = None,
    targets: TargetBoard | None = None,
) -> Starlette:
    """Return the ASGI application that serves one model.

    Args:
        client: takes sequences; its sinks may be called on any thread.
        chat_template: None if the model has none; chats are then refused.
        card: what requests are checked against; ``served_names`` has at least one.
        probe: live facts of the engine for ``/ready``, ``/metrics`` and ``/server_info``.
        quotas: what API keys use over all request planes; by default this one is alone.
        targets: where the engine looks for changes of targets, if it does.

    Raises:
        ConfigError: stored responses, or the usage of keys, cannot be read.

    ``app.state.service`` is the `Service`, ``app.state.keys`` the `KeyRing`.
    """
    common = Common(options, [row.name for row in card.classes], quotas)
    service = Service(
        client, tokenizer, chat_template, card, options, probe or NoProbe(), common.accounts
    )
    model = ModelParts(service, common, targets)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        model.start()
        yield
        await model.close()
        common.close()

    app = make_app(model.routes, common, lifespan)
    app.state.service = service
    return app


class Common:
    """What all models of a request plane share.

    Args:
        classes: names of service classes.

    Raises:
        ConfigError: stored responses cannot be read.
    """

    def __init__(
        self, options: ServerOptions, classes: Seq[str], quotas: QuotaBoard | None = None
    ) -> None:
        self.options = options
        self.accounts = Accounts(quotas or QuotaBoard.alone(), options.max_requests_per_key)
        endpoint = options.otlp_endpoint
        self.tracer = None if endpoint is None else Tracer(make_exporter(endpoint))
        self.store = ResponseStore(
            options.responses_db, options.max_responses_bytes, options.responses_keep_s
        )
        self.data = DataFolder(options)
        self.keys = KeyRing(options.api_key, options.api_key_file, classes)

    def close(self) -> None:
        if self.tracer is not None:
            self.tracer.close()
        self.store.close()
        self.accounts.close()
        self.data.close()


class ModelParts:
    """The service of one model, what it keeps, and its routes.

    Args:
        others: names of the other models of the server.

    Raises:
        ConfigError: the usage of keys cannot be read.
    """

    def __init__(
        self,
        service: Service,
        common: Common,
        targets: TargetBoard | None,
        others: Seq[str] = (),
    ) -> None:
        options = common.options
        self.service = service
        self._usage = UsageStore(options.usage_db, options.usage_keep_days)
        self._life = open_life(options.responses_db)
        self._background = _background(service, common.store, self._life, others)
        self._watching: asyncio.Task[None] | None = None
        self.routes = [
            *_routes(_PlainHandlers(service)),
            *front_routes(options.ui),
            *endpoint_routes(service),
            *message_routes(service),
            *ollama_routes(service),
            *response_routes(service, common.store, self._background),
            *usage_routes(self._usage),
            *target_routes(service, targets),
            *file_routes(service, common.data),
            *batch_routes(service, common.data),
            *message_batch_routes(service, common.data, others),
            *loom_routes(service, common.data, common.keys),
        ]

    def start(self) -> None:
        """Begin to look after responses in the background, and to keep what keys use."""
        self._watching = asyncio.create_task(self._background.watch())
        self.service.usage = self._usage
        self._usage.start_from(self.service.metrics.uses())  # those of a predecessor

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await self._background.close()
        self.service.close()
        self._usage.close(self.service.metrics.fresh_uses())
        self._life.close()


def make_app(
    routes: Seq[BaseRoute],
    common: Common,
    lifespan: Callable[[Starlette], contextlib.AbstractAsyncContextManager[None]],
    reserved: Mapping[str, Reserved] = MappingProxyType({}),
) -> Starlette:
    """The application of routes, with what stands around all of them.

    Args:
        reserved: more pages that only some keys may read.
    """
    app = Starlette(
        routes=list(routes),
        middleware=_middleware(common, {**_reserved(common.options), **reserved}),
        exception_handlers={
            WeftError: handle_weft_error,
            HTTPException: handle_http_error,
            Exception: handle_bug,
        },
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.keys = common.keys
    return app


def _background(
    service: Service, store: ResponseStore, life: Life, others: Iterable[str]
) -> Background:
    options = service.options
    runs = RunStore(
        store,
        life,
        served=service.builder.card.identity,
        most=options.max_background_responses,
        max_bytes=options.max_responses_bytes,
        others=tuple(others),
    )
    return Background(service, store, runs)


def for_admins(options: ServerOptions, what: str, code: str) -> Reserved:
    """A page that only the keys of administrators may read."""
    message = f"{what} for those that --admin-key names."
    return Reserved(frozenset(options.admin_key), message, code)


def _reserved(options: ServerOptions) -> dict[str, Reserved]:
    """Pages that only some keys may read."""
    admin = {
        USAGE: for_admins(options, "The usage of keys is", "usage_not_allowed"),
        TARGETS: for_admins(options, "The targets of classes are", "targets_not_allowed"),
    }
    if not options.metrics_key:
        return admin
    message = "The metrics of this server are for other keys."
    metrics = Reserved(frozenset(options.metrics_key), message, "metrics_not_allowed")
    loom = Reserved(
        frozenset((*options.metrics_key, *options.admin_key)),
        "The loom of this server is for the keys that --metrics-key and --admin-key name.",
        "loom_not_allowed",
    )
    return {**admin, METRICS: metrics, LOOM: loom}


def _middleware(common: Common, reserved: Mapping[str, Reserved]) -> list[Middleware]:
    """CORS stands before the keys: a browser's preflight request cannot bear one."""
    options, tracer = common.options, common.tracer
    middleware = [
        Middleware(ErrorForms, forms=ERROR_FORMS),
        *([Middleware(CheckHost, options=options)] if hosts_checked(options) else []),
        Middleware(
            RequireKey,
            keys=common.keys,
            accounts=common.accounts,
            reserved=reserved,
            open_paths=KEYLESS_PATHS | page_paths() if options.ui else KEYLESS_PATHS,
        ),
    ]
    if options.cors_origin:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(options.cors_origin),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", HEADER, CLASS_HEADER, *RATE_HEADERS],
        )
        middleware.insert(0, cors)
    tell = [log_exchange] if tracer is None else [log_exchange, tracer.tell]
    return [Middleware(Observe, tell=tell), *middleware]


def _routes(handlers: _PlainHandlers) -> list[Route]:
    def route(path: str, method: str, handler: Callable[[Request], Awaitable[Response]]) -> Route:
        return Route(path, handler, methods=[method])

    return [
        route(MODELS, "GET", handlers.models),
        route(f"{MODELS}/{{name:path}}", "GET", handlers.model),
        route("/tokenize", "POST", handlers.tokenize),
        route("/detokenize", "POST", handlers.detokenize),
        route("/health", "GET", handlers.health),
        route("/ready", "GET", handlers.ready),
        route(METRICS, "GET", handlers.metrics),
        route("/server_info", "GET", handlers.server_info),
        route("/version", "GET", handlers.version),
        route(OPENAPI, "GET", handlers.openapi),
    ]


def _limits(options: ServerOptions) -> dict[str, Any]:
    """Every bound on a request: those that an operator sets, then the fixed ones."""
    set_by_operator = {
        name: getattr(options, name)
        for name in settings_of(ServerOptions)
        if name.startswith("max_") or name.endswith(("_timeout_s", "keep_alive_s"))
    }
    return {**set_by_operator, **FIXED_LIMITS}


def _public(info: Mapping[str, Any]) -> dict[str, Any]:
    """Facts of the engine without where the model lies on this machine."""
    return {name: value for name, value in info.items() if name != "folder"}


def sees_keys(options: ServerOptions) -> bool:
    """Whether the request that is being answered may see in metrics what each key uses."""
    key = current_key()
    return key is None or key.name in (*options.metrics_key, *options.admin_key)


def _classes_of(key: Key | None, card: ModelCard) -> dict[str, Any]:
    """The classes that whoever asks may use, and the one of requests that ask for none."""
    names = [row.name for row in card.classes]
    if key is None:
        return {"usable": names, "default": USUAL}
    return {"usable": [name for name in names if key.may_use(name)], "default": key.default_class}


class _PlainHandlers:
    """One method for each route."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._description = b""

    async def models(self, request: Request) -> Response:
        return model_list_response(request, model_entries(self._service.builder.card))

    async def model(self, request: Request) -> Response:
        card = self._service.builder.card
        entry = model_object(check_model(request.path_params["name"], card), card)
        return model_response(request, entry)

    async def tokenize(self, request: Request) -> Response:
        service = self._service
        data = await read_body(request, service.options)

        def work() -> Response:
            notes = service.notes()
            body = decode_body(TokenizeBody, data, notes=notes)
            return json_response(tokenize(body, service.builder, service.texts, notes))

        return await service.compute(len(data), work, renders=True)

    async def detokenize(self, request: Request) -> Response:
        service = self._service
        data = await read_body(request, service.options)

        def work() -> Response:
            return json_response(detokenize(decode_body(DetokenizeBody, data), service.builder))

        return await service.compute(len(data), work)

    async def health(self, _: Request) -> Response:
        return json_response({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        state, kills = self._service.state, self._service.probe.memory_kills()
        body: dict[str, Any] = {"status": state}
        if kills:
            body["engines_killed_for_memory"] = kills
        return json_response(body, 200 if state == "ready" else 503)

    async def metrics(self, _: Request) -> Response:
        page = self._service.metrics.render(by_key=sees_keys(self._service.options))
        return Response(page, media_type=CONTENT_TYPE)

    async def version(self, _: Request) -> Response:
        return json_response({"version": __version__})

    async def openapi(self, request: Request) -> Response:
        """The description of all routes, made when it is first asked for."""
        if not self._description:
            self._description = await describe(request.app.routes, self._service.options)
        return Response(self._description, media_type="application/json")

    async def server_info(self, _: Request) -> Response:
        return json_response(server_info(self._service))


async def describe(routes: Iterable[BaseRoute], options: ServerOptions) -> bytes:
    """The OpenAPI description of routes, as JSON."""
    from weft.server.openapi import describe_routes  # of use to few servers

    return orjson.dumps(await asyncio.to_thread(describe_routes, list(routes), options.root_path))


def server_info(service: Service) -> dict[str, Any]:
    """The answer of ``/server_info``."""
    card = service.builder.card
    return {
        "version": __version__,
        "model": {
            "names": card.served_names,
            "max_model_len": card.max_model_len,
            "vocab_size": card.vocab_size,
            "system_fingerprint": card.system_fingerprint,
            "chat": service.builder.chat_template is not None,
            "tokenizer": service.builder.tokenizer.encoder.name,
        },
        "classes": _classes_of(current_key(), card),
        "limits": _limits(service.options),
        "engine": _public(service.probe.info()),
    }
