"""``/v1/files``: uploads as a stream, lists, content, deletion."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Annotated, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from weft.api import decode_body
from weft.api.errors import InvalidJSONError, MissingParameterError
from weft.batch.folder import FileTooLargeError, Upload
from weft.batch.records import PURPOSES, UPLOADED, FileRecord
from weft.core.errors import ParameterError, WeftError, suggest
from weft.server.body import BodyPieces
from weft.server.data import DataFolder
from weft.server.errors import ShuttingDownError, error_response, json_response
from weft.server.exchange import current_owner
from weft.server.multipart import MultipartReader, PartHead, boundary_of
from weft.server.service import Service

PATH = "/v1/files"
MOST_FILES = 10_000  # of a page
WRITE_BYTES = 2**20  # collected for one write
MAX_VALUE_BYTES = 1024  # of a plain field
MAX_FILENAME_CHARS = 256
FORM_BYTES = 64 * 1024  # of a form beside its file
EXPIRY_S = (3600, 30 * 86400)
EXPIRY = "expires_after"
BATCH_EXPIRY_S = 30 * 86400  # of files for batches that say nothing
_INTEGER = re.compile(r"\d{1,12}")
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f/\\]")


class ExpiresAfter(Struct, forbid_unknown_fields=True, kw_only=True):
    """When a file is removed."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=EXPIRY_S[0], le=EXPIRY_S[1])]


class ForeignOriginError(WeftError):
    """A page of another site asks."""

    http_status = 403
    code = "origin_not_allowed"


def file_routes(service: Service, data: DataFolder) -> list[Route]:
    """The routes of files."""
    handlers = _FileHandlers(service, data)
    one = f"{PATH}/{{file_id}}"
    return [
        Route(PATH, handlers.create, methods=["POST"]),
        Route(PATH, handlers.list, methods=["GET"]),
        Route(one, handlers.retrieve, methods=["GET"]),
        Route(one, handlers.delete, methods=["DELETE"]),
        Route(f"{one}/content", handlers.content, methods=["GET"]),
    ]


class _FileHandlers:
    """One method for each route."""

    def __init__(self, service: Service, data: DataFolder) -> None:
        self._service = service
        self._data = data

    async def create(self, request: Request) -> Response:
        service = self._service
        if service.draining:
            raise ShuttingDownError("The server is shutting down; try again in a moment.")
        _check_origin(request, service.options.cors_origin)
        boundary = boundary_of(request.headers.get("content-type", ""))
        form = _Form(self._data, current_owner())
        body = BodyPieces(request, service.options.body_timeout_s)
        with service.answering():
            try:
                self._check_length(request)
                await form.read(body.parts(), MultipartReader(boundary))
                record = await form.keep()
            except WeftError as error:
                await form.abandon()
                await body.discard()
                return error_response(error, closing=not body.complete)
            except BaseException:
                await asyncio.shield(form.abandon())
                raise
        return json_response(record.to_object())

    def _check_length(self, request: Request) -> None:
        """Refuse at once what says that it is too long."""
        declared, most = request.headers.get("content-length", ""), self._limit
        if declared.isdecimal() and int(declared) > most + FORM_BYTES:
            raise FileTooLargeError(
                f"The file has more than {most} bytes, which is the most.", param="file"
            )

    @property
    def _limit(self) -> int:
        return self._service.options.max_file_bytes

    async def list(self, request: Request) -> Response:
        query = request.query_params
        limit = page_limit(query.get("limit"), MOST_FILES, MOST_FILES)
        order, purpose = query.get("order", "desc"), query.get("purpose")
        if order not in ("asc", "desc"):
            raise ParameterError("order must be asc or desc.", param="order")
        owner, after = current_owner(), query.get("after")
        page = await self._data.run(
            lambda store: store.list_files(
                owner, after=after, limit=limit, order=order, purpose=purpose
            )
        )
        return json_response(page.to_object())

    async def retrieve(self, request: Request) -> Response:
        return json_response((await self._find(request)).to_object())

    async def delete(self, request: Request) -> Response:
        owner, file_id = current_owner(), request.path_params["file_id"]
        await self._data.run(lambda store: store.delete_file(owner, file_id))
        return json_response({"id": file_id, "object": "file", "deleted": True})

    async def content(self, request: Request) -> Response:
        record = await self._find(request)
        path = await self._data.run(lambda store: store.files_folder.path(record.id))
        return FileResponse(path, media_type="application/octet-stream", filename=record.filename)

    async def _find(self, request: Request) -> FileRecord:
        owner, file_id = current_owner(), request.path_params["file_id"]
        return await self._data.run(lambda store: store.file(owner, file_id))


class _Form:
    """The fields of an upload; its file goes to the disk as it comes."""

    def __init__(self, data: DataFolder, owner: bytes) -> None:
        self._data = data
        self._owner = owner
        self._values: dict[str, bytes] = {}
        self._field = ""
        self._filename: str | None = None
        self._upload: Upload | None = None
        self._waiting = bytearray()  # bytes of the file for the next write

    async def read(self, pieces: AsyncIterator[bytes], reader: MultipartReader) -> None:
        """Take the whole body. Raises what is wrong with it."""
        async for piece in pieces:
            for part in reader.feed(piece):
                if isinstance(part, PartHead):
                    await self._begin(part)
                elif self._field == "file":
                    self._waiting += part
                else:
                    self._add(part)
            if len(self._waiting) >= WRITE_BYTES:
                await self._write()
        reader.finish()
        await self._write()

    async def _begin(self, head: PartHead) -> None:
        name = head.name
        if name not in FIELDS:
            raise ParameterError(
                f"Unknown field of the form: '{name[:100]}'.{suggest(name[:100], FIELDS)}",
                param=name[:100],
            )
        if name in self._values or (name == "file" and self._upload is not None):
            raise ParameterError(f"The field '{name}' is given twice.", param=name)
        self._field = name
        if name == "file":
            shown = _UNPRINTABLE.sub("_", head.filename or "")[:MAX_FILENAME_CHARS]
            self._filename = shown or "file"
            self._upload = await self._data.run(lambda store: store.begin_upload(self._owner))
        else:
            self._values[name] = b""

    def _add(self, part: bytes) -> None:
        self._values[self._field] += part
        if len(self._values[self._field]) > MAX_VALUE_BYTES:
            raise ParameterError(f"The field '{self._field}' is too long.", param=self._field)

    async def _write(self) -> None:
        if self._upload is not None and self._waiting:
            data, self._waiting = bytes(self._waiting), bytearray()
            await asyncio.to_thread(self._upload.write, data)

    async def keep(self) -> FileRecord:
        """Keep the file. Raises what is wrong with the form."""
        purpose, expiry_s = self._purpose(), self._expiry_s()
        upload, filename = self._upload, self._filename
        if upload is None or filename is None:
            raise MissingParameterError("file")
        if expiry_s is None and purpose == "batch":
            expiry_s = BATCH_EXPIRY_S
        await asyncio.to_thread(upload.keep)
        record = await self._data.run(
            lambda store: store.add_file(upload, self._owner, purpose, filename, expiry_s)
        )
        self._upload = None
        return record

    async def abandon(self) -> None:
        """Leave nothing of the file."""
        upload, self._upload = self._upload, None
        if upload is not None:
            await asyncio.to_thread(upload.abandon)

    def _purpose(self) -> str:
        purpose = self._value("purpose")
        if purpose is None:
            raise MissingParameterError("purpose")
        if purpose not in UPLOADED:
            raise ParameterError(
                f"purpose must be one of {', '.join(UPLOADED)}, not '{purpose[:100]}'."
                f"{suggest(purpose[:100], UPLOADED)}",
                param="purpose",
            )
        return purpose

    def _expiry_s(self) -> int | None:
        whole = self._value(
            EXPIRY
        )  # as JSON, which is how descriptions of APIs put objects in forms
        anchor = self._value(f"{EXPIRY}[anchor]")
        seconds = self._value(f"{EXPIRY}[seconds]")
        if anchor is None and seconds is None:
            return None if whole is None else _read_expiry(whole)
        if whole is not None:
            raise ParameterError(f"{EXPIRY} is given twice.", param=EXPIRY)
        if anchor != "created_at":
            raise ParameterError(
                "expires_after.anchor must be created_at.", param="expires_after[anchor]"
            )
        low, high = EXPIRY_S
        if not _INTEGER.fullmatch(seconds or "") or not low <= int(seconds or 0) <= high:
            raise ParameterError(
                f"expires_after.seconds must be from {low} to {high}.",
                param="expires_after[seconds]",
            )
        return int(seconds or 0)

    def _value(self, name: str) -> str | None:
        value = self._values.get(name)
        return None if value is None else value.decode("utf-8", "replace")


FIELDS = ("file", "purpose", EXPIRY, f"{EXPIRY}[anchor]", f"{EXPIRY}[seconds]")
assert set(UPLOADED) <= {*PURPOSES}


def _read_expiry(given: str) -> int:
    """The seconds of an ``expires_after``. Raises ParameterError."""
    try:
        return decode_body(ExpiresAfter, given.encode(), EXPIRY).seconds
    except InvalidJSONError:
        raise ParameterError(f"{EXPIRY} is not valid JSON.", param=EXPIRY) from None


def page_limit(given: str | None, default: int, most: int) -> int:
    """The ``limit`` of a list. Raises ParameterError."""
    if given is None:
        return default
    if not _INTEGER.fullmatch(given) or not 1 <= int(given) <= most:
        raise ParameterError(f"limit must be from 1 to {most}.", param="limit")
    return int(given)


def _check_origin(request: Request, allowed: tuple[str, ...]) -> None:
    """Refuse forms of foreign pages: browsers send those without asking the server first.

    The page at ``/`` has the host that the request is for. Its scheme is not compared: a proxy may
    speak HTTPS for a server that does not.
    """
    origin = request.headers.get("origin")
    own = (f"http://{(host := request.headers.get('host', ''))}", f"https://{host}")
    if origin is not None and origin not in (*own, *allowed) and "*" not in allowed:
        raise ForeignOriginError(
            f"Pages of '{origin[:100]}' may not upload files; cors_origin lets them."
        )
