"""Results as lines of two files, which are the journal of a batch: what stands there is done.

A line is appended by one write, so that a killed program leaves whole lines, and at most a torn one
at the end, which is cut off when the batch goes on. The ids of results say which line of which
batch they belong to, so that nothing is asked twice and nothing is taken for a result of another
batch. ``sync`` makes it outlive a loss of power, too; the runner calls it every second.
"""

from __future__ import annotations

import contextlib
import os
import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec
import orjson
from msgspec import Raw, Struct

from weft.batch import points
from weft.batch.ports import LineSource, Result
from weft.batch.usage import Usage, usage_of
from weft.core.errors import WeftError

GIVEN_UP = ("batch_cancelled", "batch_expired")  # codes of lines that were never answered
_NUMBER = re.compile(r"[0-9a-f]{8}")  # of a line, at the end of an id


class ResultsError(WeftError):
    """The files of results cannot be written, or hold what this batch has not written."""

    code = "bad_results"


class NumberedLines(LineSource, Protocol):
    """Lines that can also be found by their numbers."""

    def index(self, number: int) -> int:
        """The index of the line with a number; -1 if there is none, or it is blank."""


class Journal:
    """The sink of a batch whose results go into files. ``recover`` opens them.

    Args:
        errors: gets the lines without a result.
        prefix: what ids of results have before the number of their line.
        repair: what a person may do about a file that holds something else.

    Attributes:
        answered, refused: lines in either file.
        given_up: of those refused, the ones that were never answered.
        usage: tokens of all answers.
    """

    def __init__(
        self, output: Path, errors: Path, source: NumberedLines, prefix: str, repair: str = ""
    ) -> None:
        self.output, self.errors = output, errors
        self.answered = self.refused = self.given_up = 0
        self.usage = Usage()
        self._source = source
        self._prefix = f"batch_req_{prefix}"
        self._repair = repair
        self._done = bytearray(len(source))
        self._outputs = array("I", bytes(4 * len(source)))  # tokens of answers
        self._files: dict[Path, int] = {}

    def recover(self, path: Path) -> None:
        """Open a file, count the results in it, and cut off a torn line at its end.

        Raises:
            ResultsError: it cannot be opened, or holds what this batch has not written.
        """
        if path not in self._files:
            self._files[path] = open_to_append(path)
        with open(self._files[path], "rb", closefd=False) as file:
            end = 0
            for number, data in enumerate(file, 1):
                if data.endswith(b"\n"):
                    self._take(path, number, data)
                    end += len(data)
        with explained(path):
            os.ftruncate(self._files[path], end)

    def done(self, index: int) -> bool:
        return bool(self._done[index])

    def put(self, index: int, result: Result) -> None:
        """Append the result of a line.

        Raises:
            ResultsError: it cannot be written; the file is as it was.
        """
        number = self._source.number(index)
        response = None
        if result.answer is not None:
            answer = result.answer
            response = {
                "status_code": answer.status,
                "request_id": answer.request_id,
                "body": orjson.Fragment(_one_line(answer.body)),
            }
        line = {
            "id": f"{self._prefix}{number:08x}",
            "custom_id": result.custom_id,
            "response": response,
            "error": result.error,
        }
        path = self.output if result.error is None else self.errors
        points.reached("line answered")
        self._append(path, orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
        points.reached("line appended")
        code = None if result.error is None else result.error.get("code")
        self._count(index, path, result.usage, code)

    def outputs(self) -> dict[int, int]:
        """Output tokens by index of the lines that have their answer with a count."""
        return {index: count for index, count in enumerate(self._outputs) if count}

    def sync(self) -> None:
        """Make written results survive a power failure. Raises ResultsError."""
        for path, fd in list(self._files.items()):
            with explained(path):
                os.fsync(fd)

    def close(self) -> None:
        """Give the files up. May be called twice."""
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()

    def _append(self, path: Path, data: bytes) -> None:
        fd = self._files[path]
        end = os.fstat(fd).st_size
        written = 0
        with explained(path):
            try:
                while written < len(data):
                    written += os.write(fd, data[written:])
            except OSError:
                if written:
                    os.ftruncate(fd, end)
                raise

    def _count(self, index: int, path: Path, usage: Usage, code: Any) -> None:
        self._done[index] = 1
        if path == self.output:
            self._outputs[index] = usage.output_tokens
        self.answered += path == self.output
        self.refused += path == self.errors
        self.given_up += code in GIVEN_UP
        self.usage += usage

    def _take(self, path: Path, number: int, data: bytes) -> None:
        """Count a line of a file in. Raises ResultsError if it is no result, or the second."""
        index, result = -1, _read_result(data)
        if result is not None and result.id.startswith(self._prefix):
            digits = result.id.removeprefix(self._prefix)
            index = self._source.index(int(digits, 16)) if _NUMBER.fullmatch(digits) else -1
        if result is None or index < 0 or self._done[index]:
            raise ResultsError(
                f"{path}:{number}: this line is no result of this batch, or the second one of its "
                f"line{self._repair and f'; {self._repair}'}"
            )
        usage = Usage() if result.response is None else usage_of(result.response.body)
        code = None if result.error is None else result.error.code
        self._count(index, path, usage, code)


class _Response(Struct):
    body: Raw


class _Error(Struct):
    code: Any = None  # some servers have numbers


class _Result(Struct):
    id: str
    response: _Response | None = None
    error: _Error | None = None


_results = msgspec.json.Decoder(_Result)


def _read_result(data: bytes) -> _Result | None:
    """A line of a file of results; None if it is something else."""
    try:
        return _results.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _one_line(body: bytes) -> bytes:
    return body if b"\n" not in body else orjson.dumps(orjson.loads(body))


def open_to_append(path: Path, mode: int = 0o666) -> int:
    """Open a file, made if need be. Raises ResultsError."""
    with explained(path):
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, mode)


def sync_folder(folder: Path) -> None:
    """Make new files survive a power failure, where the file system supports that."""
    fd = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):
        os.fsync(fd)
    os.close(fd)


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Raise ResultsError for what the system says about a file."""
    try:
        yield
    except OSError as error:
        raise ResultsError(f"Cannot write '{path}': {error.strerror}.") from None
