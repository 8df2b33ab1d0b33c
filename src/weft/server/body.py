"""Reads the body of a request within its limit."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from weft.core.errors import WeftError
from weft.server.errors import (
    BodyTooLargeError,
    BodyTooSlowError,
    ShuttingDownError,
    UnsupportedMediaError,
)
from weft.server.options import ServerOptions

logger = logging.getLogger("weft.requests")

FORM = "application/x-www-form-urlencoded"
DISCARDED_BYTES = 64 * 2**20  # of a body that is too long; a client still writing sees no answer

_CURL = re.compile(r"curl/[\w.+-]+")  # no page can make a browser say this in a request of a form


async def read_body(request: Request, options: ServerOptions) -> bytes:
    """Return the body.

    Raises:
        UnsupportedMediaError: the headers say that it is something else than plain JSON.
        BodyTooLargeError: it is longer than ``max_body_bytes``; never more than that is held.
        BodyTooSlowError: it was not there after ``body_timeout_s``.
        ShuttingDownError: it was not there when the server ended.
    """
    check_media(request.headers)
    try:
        async with asyncio.timeout(options.body_timeout_s):
            body = await _read(request, options.max_body_bytes)
    except TimeoutError:
        message = f"The body of the request was not there after {options.body_timeout_s:g} s."
        raise BodyTooSlowError(message) from None
    except asyncio.CancelledError:  # uvicorn's last word to what is open
        message = "The server was shut down before the body of the request was there."
        raise ShuttingDownError(message) from None
    if options.log_requests:
        logger.info("body", extra={"fields": {"body": body.decode(errors="replace")}})
    return body


class BodyPieces:
    """The body of an upload, piece by piece; however long it is, each piece has its time.

    Attributes:
        complete: all of it was read.
    """

    def __init__(self, request: Request, patience_s: float) -> None:
        self.complete = False
        self._stream = request.stream()
        self._patience_s = patience_s

    async def parts(self) -> AsyncIterator[bytes]:
        """Each piece. Raises BodyTooSlowError, ShuttingDownError."""
        while True:
            try:
                async with asyncio.timeout(self._patience_s):
                    piece = await anext(self._stream)
            except StopAsyncIteration:
                self.complete = True
                return
            except TimeoutError:
                raise BodyTooSlowError.silent(self._patience_s) from None
            except ClientDisconnect:
                raise HTTPException(400) from None
            yield piece

    async def discard(self) -> None:
        """Read on for a while: a client that is still writing would not see our answer."""
        left = DISCARDED_BYTES
        try:
            async for piece in self.parts():
                left -= len(piece)
                if left < 0:
                    return
        except (WeftError, RuntimeError, HTTPException):
            return


def check_media(headers: Headers) -> None:
    """Raise UnsupportedMediaError for bodies that are not JSON.

    Pages of other sites can make a browser post to any address as long as the type is that of a
    form, plain text or unknown, so a server without keys must not take those for JSON. Browsers say
    where such a page comes from; other clients may leave the type out, and curl's ``-d`` calls
    everything a form by default.
    """
    given = headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    silent = not given or (kind == FORM and _CURL.fullmatch(headers.get("user-agent", "")))
    if kind != "application/json" and not (silent and "origin" not in headers):
        said = f"not '{given[:100]}'" if given else "and a web page has to say so"
        raise UnsupportedMediaError(f"The Content-Type must be application/json, {said}.")
    encoding = headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        message = f"The body must not be compressed; its Content-Encoding is '{encoding[:100]}'."
        raise UnsupportedMediaError(message)


async def _read(request: Request, limit: int) -> bytes:
    declared = request.headers.get("content-length", "")
    too_large = declared.isdecimal() and int(declared) > limit
    if too_large and "expect" in request.headers:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit or too_large:
                parts.clear()
                too_large = True
                if size > limit + DISCARDED_BYTES:
                    break
            else:
                parts.append(part)
    except ClientDisconnect:
        raise HTTPException(400) from None
    if too_large:
        raise _too_large(limit)
    return b"".join(parts)


def _too_large(limit: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"The body of the request is longer than {limit} bytes.")
