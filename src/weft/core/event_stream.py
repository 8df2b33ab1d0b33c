"""The data of server-sent events, out of the bytes of a stream."""

from __future__ import annotations

from weft.core.errors import WeftError

MOST_LINE_BYTES = 64 * 2**20


class LongLineError(WeftError):
    """A stream of events has a line without an end."""

    code = "endless_event"

    def __init__(self) -> None:
        super().__init__("The server sends an event without an end.")


class EventSplitter:
    """Finds the lines with data. Lines end as the standard says, so not within JSON."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, part: bytes) -> list[bytes]:
        """The data that is complete with these bytes. Raises LongLineError."""
        *lines, self._rest = (self._rest + part).split(b"\n")
        if len(self._rest) > MOST_LINE_BYTES:
            raise LongLineError()
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
