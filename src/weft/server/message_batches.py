"""Anthropic's ``/v1/messages/batches``, on the store and the sessions of ``/v1/batches``."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
import orjson
from msgspec import Meta, Raw, Struct
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from weft.api import decode_body
from weft.api.message_lists import check_cursors, page_object
from weft.api.rules import Notes
from weft.api.sampling import LATEST
from weft.batch.demand import sample_demand
from weft.batch.errors import BatchNotFoundError, BatchNotOverError, check_kind
from weft.batch.folder import Upload
from weft.batch.intake import Forecaster
from weft.batch.lines import DuplicateIdError, TooManyLinesError
from weft.batch.messages import RESULTS_KEPT_S, message_batch, result_line
from weft.batch.promotion import BATCH_CLASS
from weft.batch.records import MESSAGES_PREFIX, UNFINISHED, BatchRecord
from weft.batch.store import BatchStore
from weft.core.errors import ParameterError, WeftError
from weft.server.batches import columns_of, end_header
from weft.server.body import BodyPieces, check_media
from weft.server.data import DataFolder
from weft.server.errors import (
    BodyTooLargeError,
    ShuttingDownError,
    error_response,
    json_response,
)
from weft.server.exchange import current_key, current_owner
from weft.server.files import page_limit
from weft.server.listsplit import MAX_REST_BYTES, ListSplitter
from weft.server.service import Service

PATH = "/v1/messages/batches"
JSON_LINES = "application/x-jsonl"
MOST_BATCHES, DEFAULT_BATCHES = 1000, 20  # of a page
WINDOW, WINDOW_S = "24h", 86400
PIECE_BYTES = 2**20  # collected before they are looked at
LINE_BYTES = 128  # of a line beside its request
SENT_LINES = 64  # results that are read together
_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_AUTHORITY = re.compile(r"[A-Za-z0-9_.:\[\]-]{1,255}")


class MessageRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """One request of a batch; its ``params`` are read when it is its turn."""

    custom_id: str
    params: Raw


class _Params(Struct):
    """What is read of a request at once."""

    model: Any = None


class MixedModelsError(ParameterError):
    """The requests of a batch name several models of the server."""

    code = "mixed_models"


class MessageBatchBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /v1/messages/batches``, after its requests were taken out."""

    requests: Annotated[list[Raw], Meta(max_length=0)]


def message_batch_routes(
    service: Service, data: DataFolder, others: Iterable[str] = ()
) -> list[Route]:
    """The routes of message batches.

    Args:
        others: names of the other models of the server.
    """
    handlers = _MessageBatchHandlers(service, data, frozenset(others))
    one = f"{PATH}/{{batch_id}}"
    return [
        Route(PATH, handlers.create, methods=["POST"]),
        Route(PATH, handlers.list, methods=["GET"]),
        Route(one, handlers.retrieve, methods=["GET"]),
        Route(one, handlers.delete, methods=["DELETE"]),
        Route(f"{one}/cancel", handlers.cancel, methods=["POST"]),
        Route(f"{one}/results", handlers.results, methods=["GET"]),
    ]


class _MessageBatchHandlers:
    """One method for each route."""

    def __init__(self, service: Service, data: DataFolder, others: frozenset[str]) -> None:
        self._service = service
        self._data = data
        self._others = others

    async def create(self, request: Request) -> Response:
        service, options, owner = self._service, self._service.options, current_owner()
        service.own_builder().classes.check(BATCH_CLASS)
        if service.draining:
            raise ShuttingDownError("The server is shutting down; try again in a moment.")
        check_media(request.headers)
        body = BodyPieces(request, options.body_timeout_s)
        more = LINE_BYTES * options.max_batch_lines
        upload: Upload | None = None
        with service.answering():
            try:
                _check_length(request, options.max_file_bytes + MAX_REST_BYTES)
                upload = await self._data.run(lambda store: store.begin_upload(owner, more))
                spool = RequestSpool(upload, service, service.notes(), self._others)
                await _pour(body, spool)
                await asyncio.to_thread(upload.keep)
                record = await self._queue(upload, owner, spool.count)
            except WeftError as error:
                await _abandon(upload)
                await body.discard()
                return error_response(error, closing=not body.complete)
            except BaseException:
                await asyncio.shield(_abandon(upload))
                raise
        shown = self._shown(record, request)
        shown.headers.update(end_header(record))
        return shown

    async def _queue(self, upload: Upload, owner: bytes, count: int) -> BatchRecord:
        card, key = self._service.builder.card, current_key()
        strict = self._service.options.strict_windows

        def queue(store: BatchStore) -> BatchRecord:
            demand = sample_demand(store.files_folder.path(upload.id))
            return store.create_message_batch(
                upload,
                owner,
                lines=count,
                window=WINDOW,
                window_s=WINDOW_S,
                keep_s=RESULTS_KEPT_S,
                model=card.served_names[0],
                served=card.identity,
                judge=Forecaster(store, demand, strict).judge,
                **columns_of(key),
            )

        return await self._data.run(queue)

    async def list(self, request: Request) -> Response:
        query, owner = request.query_params, current_owner()
        limit = page_limit(query.get("limit"), DEFAULT_BATCHES, MOST_BATCHES)
        after, before = query.get("after_id"), query.get("before_id")
        check_cursors(after, before)
        page = await self._data.run(
            lambda store: store.list_batches(
                owner, prefix=MESSAGES_PREFIX, after=after, before=before, limit=limit
            )
        )
        data = [
            message_batch(record, _results_url(record.id, request))
            for record in page.records
            if isinstance(record, BatchRecord)
        ]
        return json_response(page_object(data, has_more=page.has_more))

    async def retrieve(self, request: Request) -> Response:
        return self._shown(await self._find(request), request)

    async def cancel(self, request: Request) -> Response:
        owner, batch_id = current_owner(), _id_of(request)
        record = await self._data.run(lambda store: store.cancel_batch(owner, batch_id))
        return self._shown(record, request)

    async def delete(self, request: Request) -> Response:
        owner, batch_id = current_owner(), _id_of(request)
        await self._data.run(lambda store: store.delete_batch(owner, batch_id))
        return json_response({"id": batch_id, "type": "message_batch_deleted"})

    async def results(self, request: Request) -> Response:
        record = await self._find(request)
        if record.status in UNFINISHED:
            raise BatchNotOverError(f"The batch '{record.id}' has no results before it has ended.")
        names = [name for name in (record.output_file_id, record.error_file_id) if name]
        folder = await self._data.run(lambda store: store.files_folder)
        files = await asyncio.to_thread(_open_all, [folder.path(name) for name in names])
        if files is None:
            raise BatchNotFoundError(
                f"The results of the batch '{record.id}' are not kept any more."
            )
        return StreamingResponse(_results(files), media_type=JSON_LINES)

    async def _find(self, request: Request) -> BatchRecord:
        owner, batch_id = current_owner(), _id_of(request)
        return await self._data.run(lambda store: store.batch(owner, batch_id))

    def _shown(self, record: BatchRecord, request: Request) -> Response:
        return json_response(message_batch(record, _results_url(record.id, request)))


class RequestSpool:
    """Writes the requests of a body into an input file of batches, as they come.

    Args:
        others: names of models that none of them may name.

    Attributes:
        count: requests so far.
    """

    def __init__(
        self, upload: Upload, service: Service, notes: Notes, others: frozenset[str]
    ) -> None:
        options = service.options
        self.count = 0
        self._name = service.builder.card.served_names[0]
        self._others = others
        self._upload = upload
        self._notes = notes
        self._left = self._most = options.max_file_bytes
        self._most_lines = options.max_batch_lines
        self._splitter = ListSplitter("requests", options.max_body_bytes)
        self._ids: set[bytes] = set()  # hashes of them

    def feed(self, data: bytes) -> None:
        """Take a piece of the body. Raises WeftError for what is wrong with it."""
        self._left -= len(data)
        if self._left < 0:
            message = f"The body of the request is longer than {self._most} bytes."
            raise BodyTooLargeError(message)
        lines = [self._line(item) for item in self._splitter.feed(data)]
        if lines:
            self._upload.write(b"".join(lines))

    def finish(self) -> None:
        """The body has ended. Raises WeftError for what is wrong with it."""
        decode_body(MessageBatchBody, self._splitter.finish(), notes=self._notes)
        if not self.count:
            raise ParameterError("requests must have at least one request.", param="requests")

    def _line(self, item: bytes) -> bytes:
        at = f"requests[{self.count}]"
        self.count += 1
        if self.count > self._most_lines:
            raise TooManyLinesError(
                f"requests must have at most {self._most_lines} requests.", param="requests"
            )
        body = decode_body(MessageRequest, item, at, self._notes)
        if not _ID.fullmatch(body.custom_id):
            message = f"'{at}.custom_id' must have 1 to 64 letters, digits, '-' or '_'."
            raise ParameterError(message, param=f"{at}.custom_id")
        params = bytes(body.params)
        if not params.startswith(b"{"):
            name = f"{at}.params"
            raise ParameterError(f"'{name}' is wrong: expected object.", param=name)
        if self._others:
            self._check_model(params, at)
        digest = blake2b(body.custom_id.encode(), digest_size=16).digest()
        if digest in self._ids:
            message = f"An earlier request has the custom_id of {at}, '{body.custom_id}'."
            raise DuplicateIdError(message, param=f"{at}.custom_id")
        self._ids.add(digest)
        return orjson.dumps(
            {
                "custom_id": body.custom_id,
                "method": "POST",
                "url": "/v1/messages",
                "body": orjson.Fragment(_one_line(params)),
            },
            option=orjson.OPT_APPEND_NEWLINE,
        )

    def _check_model(self, params: bytes, at: str) -> None:
        try:
            model = msgspec.json.decode(params, type=_Params).model
        except (msgspec.DecodeError, RecursionError):
            return  # it has an error of its own when it is its turn
        if isinstance(model, str) and self._others & {model, model.removesuffix(LATEST)}:
            raise MixedModelsError(
                f"A batch is for one model, here '{self._name}', and {at} is for '{model}'; send a "
                "batch for each model.",
                param=f"{at}.params.model",
            )


def _one_line(params: bytes) -> bytes:
    """JSON without breaks between its parts."""
    if b"\n" not in params and b"\r" not in params:
        return params
    return bytes(msgspec.json.format(params, indent=-1))


async def _pour(body: BodyPieces, spool: RequestSpool) -> None:
    """Have the whole body spooled. Raises what is wrong with it."""
    waiting = bytearray()
    async for piece in body.parts():
        waiting += piece
        if len(waiting) >= PIECE_BYTES:
            data, waiting = bytes(waiting), bytearray()
            await asyncio.to_thread(spool.feed, data)
    await asyncio.to_thread(spool.feed, bytes(waiting))
    spool.finish()


async def _abandon(upload: Upload | None) -> None:
    if upload is not None:
        await asyncio.to_thread(upload.abandon)


def _check_length(request: Request, most: int) -> None:
    """Refuse at once what says that it is too long."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > most:
        raise BodyTooLargeError(f"The body of the request is longer than {most} bytes.")


def _id_of(request: Request) -> str:
    """The id in the path. Raises BatchNotFoundError for one of another API."""
    batch_id: str = request.path_params["batch_id"]
    check_kind(batch_id, MESSAGES_PREFIX)
    return batch_id


def _results_url(batch_id: str, request: Request) -> str:
    """Where results are, by the address that the request was sent to.

    A proxy that ends TLS says so in X-Forwarded-Proto; a client sees its own word at most.
    """
    path = f"{request.scope.get('root_path', '')}{PATH}/{batch_id}/results"
    host, scheme = request.headers.get("host", ""), request.url.scheme
    if request.headers.get("x-forwarded-proto", "").partition(",")[0].strip().lower() == "https":
        scheme = "https"
    return f"{scheme}://{host}{path}" if _AUTHORITY.fullmatch(host) else path


def _open_all(paths: list[Path]) -> list[BinaryIO] | None:
    """The files, open; None if one of them has expired."""
    files: list[BinaryIO] = []
    try:
        for path in paths:
            files.append(path.open("rb"))
    except FileNotFoundError:
        for file in files:
            file.close()
        return None
    return files


async def _results(files: list[BinaryIO]) -> AsyncIterator[bytes]:
    """All lines of files of results in Anthropic's form; closes the files."""
    try:
        for file in files:
            while data := await asyncio.to_thread(_next_lines, file):
                yield data
    finally:
        for file in files:
            file.close()


def _next_lines(file: BinaryIO) -> bytes:
    return b"".join(result_line(line) for line in islice(file, SENT_LINES))
