"""The results of ``weft batch`` on disk: a journal of two files, and a state file.

The state file says what the batch is. Who writes results holds a lock on it.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
from pathlib import Path

import msgspec
from msgspec import Struct

from weft.batch.journal import Journal, ResultsError, explained, open_to_append, sync_folder
from weft.batch.lines import InputChangedError, InputFile
from weft.core.errors import ConfigError

VERSION = 1
STATE_SUFFIX = ".state"
_DIGEST_CHARS = 16  # of the input's digest, in the ids of its results


class _State(Struct, forbid_unknown_fields=True, kw_only=True):
    version: int
    input: str
    digest: str
    lines: int
    answered_by: str


class Results(Journal):
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
        prefix = source.digest[:_DIGEST_CHARS]
        super().__init__(output, errors, source, prefix, f"remove it, or {_RESTART}")
        self._input = source
        self._state = open_to_append(self._state_path)
        try:
            self._lock()
            if restart:
                self._clear()
            self._begin(answered_by)
            for path in (output, errors):
                if path == errors and retry_errors:
                    self._files[path] = open_to_append(path)
                    os.ftruncate(self._files[path], 0)
                    os.fsync(self._files[path])  # no old error comes back beside its new answer
                self.recover(path)
        except BaseException:
            self.close()
            raise
        sync_folder(output.parent)
        self.resumed = self.answered + self.refused

    def close(self) -> None:
        """Close files and lock; an empty file of errors is removed. May be called twice."""
        empty = self.errors in self._files and os.fstat(self._files[self.errors]).st_size == 0
        if empty:
            self.errors.unlink(missing_ok=True)
        super().close()
        if self._state >= 0:
            os.close(self._state)
            self._state = -1

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
        source = self._input
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
            with explained(self.output):
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
