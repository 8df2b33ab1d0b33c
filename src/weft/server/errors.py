"""Every error as HTTP, in OpenAI's form."""

from __future__ import annotations

import http
import logging
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from weft.api.errors import describe_error, error_object
from weft.core.errors import WeftError
from weft.core.logs import REQUEST_ID
from weft.server.exchange import EXCHANGE

logger = logging.getLogger("weft.server")


class BodyTooLargeError(WeftError):
    """The body is longer than the server reads."""

    http_status = 413
    code = "request_too_large"


class UnsupportedMediaError(WeftError):
    """The body is not JSON, or it is compressed."""

    http_status = 415
    code = "unsupported_media_type"


class BodyTooSlowError(WeftError):
    """The body did not arrive in time."""

    http_status = 408
    code = "request_timeout"

    @classmethod
    def silent(cls, patience_s: float) -> BodyTooSlowError:
        return cls(f"Nothing more of the body came for {patience_s:g} s.")


class ShuttingDownError(WeftError):
    """The server takes no more requests, or gave up waiting for this one."""

    http_status = 503
    code = "shutting_down"
    retry_after_s = 1


def json_response(
    content: Any, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """A response of JSON."""
    return Response(orjson.dumps(content), status, headers, media_type="application/json")


def log_failure(error: Exception) -> None:
    """Log an internal failure; a client's mistake gets no line of its own."""
    exchange = EXCHANGE.get()
    if exchange is not None:
        exchange.error = error.code if isinstance(error, WeftError) else "internal_error"
    if not isinstance(error, WeftError) or error.http_status == 500:
        logger.error("%s: %s", type(error).__name__, error, exc_info=error)


async def handle_weft_error(_: Request, error: Exception) -> Response:
    """Answer for a typed error, or any other."""
    return error_response(error)


def error_response(error: Exception, *, closing: bool = False) -> Response:
    """The answer for an error.

    Args:
        closing: the connection has to be closed, since the request was not read to its end.
    """
    log_failure(error)
    status, body = describe_error(error)
    headers = {}
    if isinstance(error, WeftError) and error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if closing or isinstance(error, (BodyTooLargeError, BodyTooSlowError)):
        headers["connection"] = "close"
    return json_response(body, status, headers)


async def handle_http_error(request: Request, error: Exception) -> Response:
    """Answer for an error of the router: no such path, wrong method."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path[:200]}"
    messages = {
        404: f"There is no such path: {where}.",
        405: f"The path does not take this method: {where}.",
    }
    status = error.status_code
    message = messages.get(status, f"{http.HTTPStatus(status).phrase}.")
    code = {404: "not_found", 405: "method_not_allowed"}.get(status)
    body = error_object(message, status=status, code=code)
    return json_response(body, status, dict(error.headers or {}))


async def handle_bug(_: Request, error: Exception) -> Response:
    """Answer an unexpected exception; the server logs it with its trace."""
    status, body = describe_error(error)
    return json_response(body, status, {"x-request-id": REQUEST_ID.get()})
