"""Reading the body of a request within its limit."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from weft.server.errors import BodyTooLargeError

DISCARDED_BYTES = 64 * 2**20  # of a body that is too long; a client still writing sees no answer


async def read_body(request: Request, limit: int) -> bytes:
    """Return the body.

    Raises:
        BodyTooLargeError: it is longer than ``limit``; never more than that is held.
    """
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
