"""The results of a batch on disk: two files of lines that act as a journal, and a state file.

What is done is what stands in the files. A line is appended by one write, so that a killed program
leaves whole lines, and at most a torn one at the end, which is cut off when the batch goes on. The
ids of results say which line of which input they belong to, so that nothing is asked twice and
nothing is taken for a result of another input. ``sync`` makes it outlive a loss of power, too; the
runner calls it every second.

The state file says what the batch is. Who writes results holds a lock on it.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
from array import array
from collections.abc import Iterator
from pathlib import Path

import msgspec
import orjson
from msgspec import Raw, Struct

from weft.batch.lines import InputChangedError, InputFile
from weft.batch.ports import Result
from weft.batch.usage import Usage, usage_of
from weft.core.errors import ConfigError, WeftError

VERSION = 1
STATE_SUFFIX = ".state"
_ID = re.compile(r"batch_req_([0-9a-f]{16})([0-9a-f]{8})")
_DIGEST_CHARS = 16  # of the input's digest, in the ids of its results


class ResultsError(WeftError):
    """The files of results cannot be written, or hold what this batch has not written."""

    code = "bad_results"


class _State(Struct, forbid_unknown_fields=True, kw_only=True):
    version: int
    input: str
    digest: str
    lines: int
    answered_by: str


class Results:
    """The sink of a batch whose results go into files.

    Args:
        errors: gets the lines without a result; it is there only if there are any.
        answered_by: who answers, in words that must be the same when the batch goes on.
        restart: begin anew, whatever is there.
        retry_errors: discard the errors of an earlier run, and run their lines again.

    Attributes:
        answered, refused: lines in either file.
        usage: tokens of all answers.
        resumed: lines that had their result before.

    Raises:
        InputChangedError: the batch was begun with another input.
        ConfigError: a file is no result of a batch, or the batch was begun otherwise.
        ResultsError: another process is writing, or a file cannot be written or read.
    """

    def __init__(
        self,
        output: Path,
        errors: Path,
        source: InputFile,
        answered_by: str,
        *,
        restart: bool = False,
        retry_errors: bool = False,
    ) -> None:
        self._state_path = output.with_name(output.name + STATE_SUFFIX)
        _check_paths(source.path, output, errors, self._state_path)
        self.output, self.errors = output, errors
        self.answered = self.refused = 0
        self.usage = Usage()
        self._source = source
        self._done = bytearray(len(source))
        self._outputs = array("I", bytes(4 * len(source)))  # tokens of answers
        self._prefix = source.digest[:_DIGEST_CHARS]
        self._files: dict[Path, int] = {}
        self._state = _open(self._state_path)
        try:
            self._lock()
            if restart:
                self._clear()
            self._begin(answered_by)
            for path in (output, errors):
                self._files[path] = _open(path)
                if path == errors and retry_errors:
                    os.ftruncate(self._files[path], 0)
                    os.fsync(self._files[path])  # no old error comes back beside its new answer
                self._recover(path)
        except BaseException:
            self.close()
            raise
        _sync_folder(output.parent)
        self.resumed = self.answered + self.refused

    # -- the sink -----------------------------------------------------------------------------

    def done(self, index: int) -> bool:
        return bool(self._done[index])

    def put(self, index: int, result: Result) -> None:
        """Append the result of a line.

        Raises:
            ResultsError: it cannot be written.
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
            "id": f"batch_req_{self._prefix}{number:08x}",
            "custom_id": result.custom_id,
            "response": response,
            "error": result.error,
        }
        path = self.output if result.error is None else self.errors
        self._append(path, orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
        self._count(index, path, result.usage)

    def outputs(self) -> dict[int, int]:
        """Output tokens by index of the lines that have their answer with a count."""
        return {index: count for index, count in enumerate(self._outputs) if count}

    def sync(self) -> None:
        """Make written results survive a power failure. Raises ResultsError."""
        for path, fd in self._files.items():
            with _explained(path):
                os.fsync(fd)

    def close(self) -> None:
        """Close files and lock; an empty file of errors is removed. May be called twice."""
        empty = self.errors in self._files and os.fstat(self._files[self.errors]).st_size == 0
        if empty:
            self.errors.unlink(missing_ok=True)
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()
        if self._state >= 0:
            os.close(self._state)
            self._state = -1

    def _append(self, path: Path, data: bytes) -> None:
        with _explained(path):
            written = os.write(self._files[path], data)
            while written < len(data):
                written += os.write(self._files[path], data[written:])

    def _count(self, index: int, path: Path, usage: Usage) -> None:
        self._done[index] = 1
        if path == self.output:
            self._outputs[index] = usage.output_tokens
        self.answered += path == self.output
        self.refused += path == self.errors
        self.usage += usage

    # -- beginning and going on ----------------------------------------------------------------

    def _lock(self) -> None:
        try:
            fcntl.flock(self._state, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ResultsError(
                f"Another weft batch is writing '{self.output}'; wait for it, or choose another "
                "output."
            ) from None

    def _clear(self) -> None:
        """Remove an earlier batch; if this is interrupted, the earlier one remains."""
        self.errors.unlink(missing_ok=True)
        self.output.unlink(missing_ok=True)
        os.ftruncate(self._state, 0)

    def _begin(self, answered_by: str) -> None:
        """Check that input and asker are those of the batch so far, or record them."""
        source = self._source
        state = _State(
            version=VERSION,
            input=str(source.path),
            digest=source.digest,
            lines=len(source),
            answered_by=answered_by,
        )
        before = self._read_state()
        if before is None:
            self._check_unused()
            with _explained(self.output):
                os.pwrite(self._state, msgspec.json.encode(state), 0)
                os.fsync(self._state)
            return
        if before.version != VERSION:
            raise ConfigError(f"'{self.output}' was written by another version of weft; {_RESTART}")
        if before.digest != state.digest:
            raise InputChangedError(
                f"'{source.path}' is not the input that '{self.output}' was begun with (before: "
                f"'{before.input}', {before.lines} lines, SHA-256 {before.digest[:12]}...; now "
                f"{state.lines} lines, {state.digest[:12]}...); {_RESTART}"
            )
        if before.answered_by != answered_by:
            raise ConfigError(
                f"'{self.output}' was begun with {before.answered_by}, not with {answered_by}; "
                f"continue with that, or {_RESTART}"
            )

    def _read_state(self) -> _State | None:
        """Read the state file; None if it is empty, or was cut off before any result."""
        data = os.pread(self._state, 2**20, 0)
        try:
            return msgspec.json.decode(data, type=_State)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None

    def _check_unused(self) -> None:
        """Raise ConfigError rather than overwrite files that are not from a batch."""
        for path in (self.output, self.errors):
            if path.exists() and path.stat().st_size:
                self._state_path.unlink()
                raise ConfigError(
                    f"'{path}' exists already, but not from a batch; choose another name, or "
                    f"{_RESTART}",
                    param="output",
                )

    def _recover(self, path: Path) -> None:
        """Count the results in a file, and cut off a torn line at its end."""
        with open(self._files[path], "rb", closefd=False) as file:
            end = 0
            for number, data in enumerate(file, 1):
                if data.endswith(b"\n"):
                    self._take(path, number, data)
                    end += len(data)
        with _explained(path):
            os.ftruncate(self._files[path], end)

    def _take(self, path: Path, number: int, data: bytes) -> None:
        """Count a line of a file in. Raises ResultsError if it is no result, or the second."""
        index, result = -1, _read_result(data)
        if result is not None and (match := _ID.fullmatch(result.id)) is not None:
            index = self._source.index(int(match[2], 16)) if match[1] == self._prefix else -1
        if result is None or index < 0 or self._done[index]:
            raise ResultsError(
                f"{path}:{number}: this line is no result of this batch, or the second one of its "
                f"line; remove it, or {_RESTART}"
            )
        usage = Usage() if result.response is None else usage_of(result.response.body)
        self._count(index, path, usage)


_RESTART = "begin anew with --restart, which deletes what is there."


def _check_paths(source: Path, output: Path, errors: Path, state: Path) -> None:
    """Raise ConfigError if files would overwrite one another, or are folders."""
    for name, path in (("output", output), ("errors", errors)):
        if path.is_dir():
            raise ConfigError(f"'{path}' is a folder; {name} must be a file.", param=name)
    files = {"input": source, "output": output, "errors": errors, "state": state}
    for (first, one), (second, other) in itertools.combinations(files.items(), 2):
        if _same(one, other):
            raise ConfigError(
                f"'{one}' and '{other}' are one file, which cannot be both {first} and {second} "
                f"of a batch (its state is in '{state}'); choose another name.",
                param="errors" if "errors" in (first, second) else "output",
            )


def _same(one: Path, other: Path) -> bool:
    """Whether two paths lead, or will lead, to one file through any kind of link."""
    with contextlib.suppress(OSError):
        return one.samefile(other)
    return os.path.realpath(one) == os.path.realpath(other)


class _Response(Struct):
    body: Raw


class _Result(Struct):
    id: str
    response: _Response | None = None


_results = msgspec.json.Decoder(_Result)


def _read_result(data: bytes) -> _Result | None:
    """A line of a file of results; None if it is no result."""
    try:
        return _results.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _one_line(body: bytes) -> bytes:
    return body if b"\n" not in body else orjson.dumps(orjson.loads(body))


def _open(path: Path) -> int:
    with _explained(path):
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)


def _sync_folder(folder: Path) -> None:
    """Make new files survive a power failure, where the file system supports that."""
    fd = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):
        os.fsync(fd)
    os.close(fd)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ResultsError(f"Cannot write '{path}': {error.strerror}.") from None
