"""Errors of the API layer, and the form of every error that a client gets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from weft.core.errors import (
    NonFiniteLogitsError,
    ParameterError,
    RequestCrashedError,
    RequestOutOfMemoryError,
    WeftError,
    suggest,
)
from weft.core.logs import REQUEST_ID


class InvalidJSONError(ParameterError):
    """The body is not JSON."""

    code = "invalid_json"


class UnsupportedParameterError(ParameterError):
    """OpenAI's API has the parameter, but weft does not support it."""

    code = "unsupported_parameter"

    def __init__(self, name: str, detail: str = "") -> None:
        super().__init__(f"weft does not support the parameter '{name}'.{detail}", param=name)


class UnknownParameterError(ParameterError):
    """No API has the parameter."""

    code = "unknown_parameter"

    def __init__(self, name: str, known: Iterable[str]) -> None:
        hint = suggest(name.rsplit(".", 1)[-1], known)
        super().__init__(f"Unknown parameter: '{name}'.{hint}", param=name)


class MissingParameterError(ParameterError):
    """A required parameter is not there."""

    code = "missing_required_parameter"

    def __init__(self, name: str) -> None:
        super().__init__(f"Missing required parameter: '{name}'.", param=name)


class UnknownModelError(WeftError):
    """The request names a model that is not served."""

    http_status = 404
    code = "model_not_found"


class DeadlineExceededError(WeftError):
    """The time that a request had is over."""

    http_status = 504
    code = "deadline_exceeded"

    def __init__(self) -> None:
        super().__init__("The time that this request had is over.")


class CancelledError(WeftError):
    """The engine ended a request before it was complete."""

    http_status = 503
    code = "request_cancelled"


# Of the errors with status 500.
_TELLING = {NonFiniteLogitsError.code, RequestCrashedError.code, RequestOutOfMemoryError.code}

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def error_type(status: int) -> str:
    """OpenAI's ``type`` of an error with an HTTP status."""
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


def error_object(
    message: str, *, status: int, code: str | None, param: str | None = None
) -> dict[str, Any]:
    """The body of an error answer, with all four keys."""
    return {"error": {"message": message, "type": error_type(status), "param": param, "code": code}}


def describe_error(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and the body for an error; bugs reveal no internals."""
    if isinstance(error, WeftError) and (error.http_status != 500 or error.code in _TELLING):
        status, message, code = error.http_status, error.message, error.code
        return status, error_object(message, status=status, code=code, param=error.param)
    message = f"Internal error; the log of the server has the details of {REQUEST_ID.get()}."
    return 500, error_object(message, status=500, code="internal_error")
