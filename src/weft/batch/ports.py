"""Protocols of a batch: the source of lines, the asker, the order, and the sink of results."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec import Raw, Struct

from weft.batch.usage import Usage
from weft.core.errors import WeftError


class BatchLine(Struct, forbid_unknown_fields=True, kw_only=True):
    """One request in a batch's input."""

    custom_id: str
    method: str
    url: str
    body: Raw


def new_request_id() -> str:
    """An id for an answer."""
    return f"req_{secrets.token_hex(16)}"


class NobodyAnswersError(WeftError):
    """The engine or server does not answer, so the batch cannot continue; results are kept."""

    http_status = 503
    code = "nobody_answers"


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """The answer of an HTTP server to one request, or its equivalent.

    Attributes:
        body: JSON.
    """

    status: int
    request_id: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a line.

    Attributes:
        custom_id: None if the line has none that can be read.
        answer: None if the line was no request.
        error: OpenAI's error object and the line's number; None if the line has its answer.
        usage: tokens of the answer.
    """

    custom_id: str | None
    answer: LineAnswer | None = None
    error: Mapping[str, Any] | None = None
    usage: Usage = field(default_factory=Usage)


class LineSource(Protocol):
    """The lines of a batch, by index from 0."""

    def __len__(self) -> int: ...

    def number(self, index: int) -> int:
        """The number of a line as a person counts, from 1."""

    def line(self, index: int) -> BatchLine:
        """Read a line. Raises ParameterError if it is no request of this batch."""

    def custom_id(self, index: int) -> str | None:
        """The name of a line, also of one that is no request; None if it has none."""


class Sink(Protocol):
    """Takes results, each in one piece; whatever ends the program, none is lost or torn."""

    def done(self, index: int) -> bool:
        """Whether a line has its result."""

    def put(self, index: int, result: Result) -> None:
        """Store the result of a line. Raises WeftError if that fails."""

    def sync(self) -> None:
        """Make stored results survive a power failure; may be called on any thread."""


class Asker(Protocol):
    """Answers requests, many at once."""

    async def ask(self, number: int, line: BatchLine) -> LineAnswer:
        """Answer the request of line ``number``.

        Raises:
            NobodyAnswersError: the engine or server no longer answers any line.
            WeftError: the request is refused, or has failed for good; the answer would have been
                an error, as an answer with a status of 400 or more is.
        """


class LineOrder(Protocol):
    """Says which line goes next; each goes once."""

    @property
    def remaining(self) -> int:
        """Lines that were not handed out yet."""

    @property
    def ready(self) -> bool:
        """Whether lines that remain can be handed out; it says when that changes."""

    def next(self) -> int | None:
        """The index of a line to ask now; None while it is better to wait for the end of one.

        While none runs, some remain and it is ready, it is never None.
        """

    def ended(self, index: int, output: int | None) -> None:
        """A line that was handed out has its result of so many output tokens; None if it failed."""
