"""Reads ``multipart/form-data`` (RFC 7578) piece by piece; no part is ever held as a whole."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.message import Message

from weft.core.errors import ParameterError

MAX_HEADER_BYTES = 16 * 1024  # of the headers of one part
MAX_PARTS = 64
_BOUNDARY = re.compile(r"[0-9a-zA-Z'()+_,./:=? -]{0,69}[0-9a-zA-Z'()+_,./:=?-]")
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*(.*)")


class MultipartError(ParameterError):
    """The body is no form, or ends too early."""

    code = "invalid_multipart"


@dataclass(frozen=True, slots=True)
class PartHead:
    """The beginning of a part.

    Attributes:
        name: of the field.
        filename: None for a plain value.
    """

    name: str
    filename: str | None


def boundary_of(content_type: str) -> bytes:
    """The boundary that a Content-Type names. Raises MultipartError."""
    message = Message()
    message["content-type"] = content_type
    found = message.get_boundary() if message.get_content_type() == "multipart/form-data" else None
    if found is None or not _BOUNDARY.fullmatch(found):
        raise MultipartError(
            "The Content-Type must be multipart/form-data with a boundary, not "
            f"'{content_type[:100]}'."
        )
    return found.encode()


class MultipartReader:
    """Takes the body of a form as it comes.

    ``feed`` yields a `PartHead` for each part and then its bytes, in as many pieces as they come.

    Attributes:
        complete: the end of the form was seen; what follows it is ignored.
    """

    def __init__(self, boundary: bytes) -> None:
        self.complete = False
        self._mark = b"\r\n--" + boundary
        self._held = bytearray(b"\r\n")  # so that the first mark looks like the others
        self._state: Callable[[], PartHead | bytes | None] = self._preamble
        self._parts = 0

    def feed(self, data: bytes) -> Iterator[PartHead | bytes]:
        """Take more of the body. Raises MultipartError."""
        self._held += data
        while not self.complete:
            found = self._state()
            if found is None:
                return
            if found:
                yield found
        self._held.clear()

    def finish(self) -> None:
        """The body has ended. Raises MultipartError if the form has not."""
        if not self.complete:
            raise MultipartError("The body ends before the form does.")

    # Each state takes something off what is held and returns what came of it, perhaps nothing
    # (b""); None if it needs more.

    def _preamble(self) -> bytes | None:
        return b"" if self._up_to_mark() is not None else None

    def _body(self) -> bytes | None:
        return self._up_to_mark()

    def _up_to_mark(self) -> bytes | None:
        """What stands before the next mark, or before what may become one."""
        place = self._held.find(self._mark)
        if place >= 0:
            before = self._take(place)
            self._take(len(self._mark))
            self._state = self._after_mark
            return before
        sure = len(self._held) - len(self._mark) + 1
        return self._take(sure) if sure > 0 else None

    def _after_mark(self) -> bytes | None:
        """Two dashes end the form; else the rest of the line is blank."""
        if self._held[:2] == b"--":
            self.complete = True
            return b""
        end = self._held.find(b"\r\n")
        line = self._held[:end] if end >= 0 else self._held
        if len(line) > MAX_HEADER_BYTES or line.strip(b" \t\r-"):
            raise MultipartError("A boundary of the form is followed by something else.")
        if end < 0:
            return None
        self._take(end)  # the line's end stays, and begins the headers
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise MultipartError(f"The form has more than {MAX_PARTS} fields.")
        self._state = self._headers
        return b""

    def _headers(self) -> PartHead | bytes | None:
        end = self._held.find(b"\r\n\r\n")
        if max(end, len(self._held) if end < 0 else 0) > MAX_HEADER_BYTES:
            raise MultipartError("The headers of a field are too long.")
        if end < 0:
            return None
        lines = self._take(end).decode("utf-8", "replace").split("\r\n")[1:]
        self._take(4)
        self._state = self._body
        return _head_of(lines)

    def _take(self, size: int) -> bytes:
        taken = bytes(self._held[:size])
        del self._held[:size]
        return taken


def _head_of(lines: list[str]) -> PartHead:
    message = Message()
    for line in lines:
        match = _HEADER.fullmatch(line)
        if match is None:
            raise MultipartError("A header of a field is malformed.")
        message[match[1]] = match[2]
    name = message.get_param("name", header="content-disposition")
    if message.get_content_disposition() != "form-data" or not isinstance(name, str):
        raise MultipartError("A field of the form has no name.")
    encoding = str(message.get("content-transfer-encoding", "binary")).strip().lower()
    if encoding not in ("binary", "8bit", "7bit"):
        raise MultipartError("A field of the form is encoded; send its bytes as they are.")
    return PartHead(name, message.get_filename())
