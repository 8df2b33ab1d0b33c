"""``/v1/batches``: creates, shows and cancels batches. The batch process answers their lines."""

from __future__ import annotations

import re
from typing import Annotated, Any

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weft.api import decode_body
from weft.api.endpoints import BATCH_ENDPOINTS
from weft.batch.errors import check_kind
from weft.batch.intake import Forecaster, file_demand
from weft.batch.promotion import BATCH_CLASS, PROMOTIONS
from weft.batch.records import BATCH_PREFIX, BatchRecord
from weft.batch.store import BatchStore
from weft.core.errors import ParameterError, suggest
from weft.server.body import read_body
from weft.server.data import DataFolder
from weft.server.errors import json_response
from weft.server.exchange import current_key, current_owner
from weft.server.files import ExpiresAfter, page_limit
from weft.server.keyfile import Key
from weft.server.service import Service

PATH = "/v1/batches"
END_HEADER = "x-weft-predicted-end"  # Unix time, as in the batch object
MOST_BATCHES, DEFAULT_BATCHES = 100, 20  # of a page
SHORTEST_S, LONGEST_S = 600, 7 * 86400
_WINDOW = re.compile(r"([1-9]\d{0,5})([smhd])")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class BatchBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /v1/batches``."""

    input_file_id: Annotated[str, Meta(max_length=256)]
    endpoint: Annotated[str, Meta(max_length=256)]
    completion_window: Annotated[str, Meta(max_length=16)]
    metadata: (
        Annotated[
            dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
            Meta(max_length=16),
        ]
        | None
    ) = None
    output_expires_after: ExpiresAfter | None = None


def batch_routes(service: Service, data: DataFolder) -> list[Route]:
    """The routes of batches."""
    handlers = _BatchHandlers(service, data)
    one = f"{PATH}/{{batch_id}}"
    return [
        Route(PATH, handlers.create, methods=["POST"]),
        Route(PATH, handlers.list, methods=["GET"]),
        Route(one, handlers.retrieve, methods=["GET"]),
        Route(f"{one}/cancel", handlers.cancel, methods=["POST"]),
    ]


class _BatchHandlers:
    """One method for each route."""

    def __init__(self, service: Service, data: DataFolder) -> None:
        self._service = service
        self._data = data

    async def create(self, request: Request) -> Response:
        body = decode_body(
            BatchBody,
            await read_body(request, self._service.options),
            notes=self._service.notes(),
        )
        self._service.own_builder().classes.check(BATCH_CLASS)
        _check_endpoint(body.endpoint)
        window_s = read_window(body.completion_window)
        owner, key = current_owner(), current_key()
        record = await self._data.run(lambda store: self._queue(store, owner, key, body, window_s))
        return json_response(record.to_object(), headers=end_header(record))

    def _queue(
        self, store: BatchStore, owner: bytes, key: Key | None, body: BatchBody, window_s: int
    ) -> BatchRecord:
        """Queue a batch, unless it would not end in time; on the thread of the store."""
        card, options = self._service.builder.card, self._service.options
        expiry = body.output_expires_after
        demand = file_demand(store, owner, body.input_file_id)
        forecaster = Forecaster(store, demand, options.strict_windows)
        return store.create_batch(
            owner,
            body.endpoint,
            body.input_file_id,
            window=body.completion_window,
            window_s=window_s,
            model=card.served_names[0],
            served=card.identity,
            metadata=body.metadata,
            judge=forecaster.judge,
            output_expires_s=None if expiry is None else expiry.seconds,
            **columns_of(key),
        )

    async def list(self, request: Request) -> Response:
        query, owner = request.query_params, current_owner()
        limit = page_limit(query.get("limit"), DEFAULT_BATCHES, MOST_BATCHES)
        after = query.get("after")
        page = await self._data.run(
            lambda store: store.list_batches(owner, after=after, limit=limit)
        )
        return json_response(page.to_object())

    async def retrieve(self, request: Request) -> Response:
        owner, batch_id = current_owner(), _id_of(request)
        record = await self._data.run(lambda store: store.batch(owner, batch_id))
        return json_response(record.to_object())

    async def cancel(self, request: Request) -> Response:
        owner, batch_id = current_owner(), _id_of(request)
        record = await self._data.run(lambda store: store.cancel_batch(owner, batch_id))
        return json_response(record.to_object())


def _id_of(request: Request) -> str:
    """The id in the path. Raises BatchNotFoundError for one of another API."""
    batch_id: str = request.path_params["batch_id"]
    check_kind(batch_id, BATCH_PREFIX)
    return batch_id


def columns_of(key: Key | None) -> dict[str, Any]:
    """What a batch keeps of the key that it belongs to."""
    if key is None:
        return {"promotable": " ".join(PROMOTIONS)}
    return {
        "payer": key.name,
        "account": key.account,
        "queued_limit": key.quota.max_queued_batch_tokens,
        "promotable": " ".join(name for name in PROMOTIONS if key.may_use(name)),
    }


def end_header(record: BatchRecord) -> dict[str, str]:
    """The predicted end, where there is one."""
    return {} if record.predicted_at is None else {END_HEADER: str(record.predicted_at)}


def _check_endpoint(endpoint: str) -> None:
    if endpoint not in BATCH_ENDPOINTS:
        raise ParameterError(
            f"endpoint must be one of {', '.join(BATCH_ENDPOINTS)}, not '{endpoint[:100]}'."
            f"{suggest(endpoint[:100], BATCH_ENDPOINTS)}",
            param="endpoint",
        )


def read_window(given: str) -> int:
    """Seconds of a ``completion_window``. Raises ParameterError."""
    match = _WINDOW.fullmatch(given)
    seconds = int(match[1]) * _UNIT_S[match[2]] if match else 0
    if not SHORTEST_S <= seconds <= LONGEST_S:
        raise ParameterError(
            "completion_window must be from 10m to 7d, such as 30m, 24h or 2d, not "
            f"'{given[:16]}'.",
            param="completion_window",
        )
    return seconds
