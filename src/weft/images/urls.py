"""The bytes of an image from its URL."""

from __future__ import annotations

import base64
import binascii
import re

from weft.core.errors import ImageError

_DATA = re.compile(r"data:([^,]{0,256}),", re.IGNORECASE)
_SHOWN_CHARS = 60


def image_bytes(url: str, param: str) -> bytes:
    """Return the bytes of a data URL.

    Args:
        param: where the request has it, for errors.

    Raises:
        ImageError: it is another URL, or not what it should be.
    """
    head = _DATA.match(url)
    if head is None:
        shown = url[:_SHOWN_CHARS]
        raise ImageError(
            f"'{param}' is {shown!r}; weft fetches no images from other servers, send a data URL "
            "(data:image/png;base64,...).",
            param=param,
        )
    kind, *options = head[1].lower().split(";")
    if not kind.startswith("image/") or "base64" not in options:
        raise ImageError(f"'{param}' is not a data URL of an image in base64.", param=param)
    return decoded(url[head.end() :], param)


def decoded(text: str, param: str) -> bytes:
    """Return bytes that are written in base64. Raises ImageError if they are not."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ImageError(f"'{param}' has an image that is not valid base64.", param=param) from None
