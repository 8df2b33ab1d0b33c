"""The input of a batch: a file of lines; memory holds only their offsets."""

from __future__ import annotations

import os
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Raw, Struct

from weft.api.decoding import decode_body
from weft.api.endpoints import BATCH_ENDPOINTS
from weft.api.errors import UnsupportedParameterError
from weft.batch.ports import BatchLine
from weft.core.errors import ConfigError, ParameterError, WeftError, suggest

MAX_LINE_BYTES = 64 * 2**20
MAX_ID_CHARS = 1024
_BUFFER_BYTES = 2**20


class DuplicateIdError(ParameterError):
    """An earlier line has the same custom_id."""

    code = "duplicate_custom_id"


class UnknownUrlError(ParameterError):
    """A line names a URL that batches do not support."""

    code = "unknown_url"


class TooManyLinesError(ParameterError):
    """The input has more lines than a batch may have."""

    code = "too_many_lines"


class InputChangedError(WeftError):
    """The input is not what it was when the batch began."""

    http_status = 409
    code = "input_changed"


class InputFile:
    """JSON lines, each a request. Blank lines do not count.

    The file is read once from end to end. 20 bytes a line stay in memory; for a moment it is 60.

    Args:
        most: lines that there may be.

    Attributes:
        path: of the file.
        digest: SHA-256 of its bytes, in hexadecimal.

    Raises:
        ConfigError: there is no such file, or it is none that can be read again.
        TooManyLinesError: it has more lines than there may be.
    """

    def __init__(self, path: Path, most: int | None = None) -> None:
        self.path = path
        self._most = most
        self._numbers, self._crcs, self._lengths = array("I"), array("I"), array("I")
        self._offsets = array("Q")
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            with open(self._fd, "rb", buffering=_BUFFER_BYTES, closefd=False) as file:
                if not file.seekable():
                    raise ConfigError(f"'{path}' cannot be read twice; write it to a file first.")
                self.digest, ids = self._survey(file)
        except OSError as error:
            raise ConfigError(f"Cannot read '{path}': {error.strerror}.", param="input") from None
        self._repeats = self._find_repeats(ids)

    def __len__(self) -> int:
        return len(self._offsets)

    def number(self, index: int) -> int:
        """The number of a line, from 1; blank lines are counted, too."""
        return self._numbers[index]

    def index(self, number: int) -> int:
        """The index of the line with a number; -1 if there is none, or it is blank."""
        index = bisect_left(self._numbers, number)
        return index if index < len(self) and self._numbers[index] == number else -1

    def line(self, index: int) -> BatchLine:
        """Read a line.

        Raises:
            ParameterError: it is no request of a batch.
            DuplicateIdError: an earlier line has its custom_id.
            UnknownUrlError: its url is none of the endpoints.
            InputChangedError: the file was written to meanwhile.
        """
        if self._lengths[index] > MAX_LINE_BYTES:
            raise ParameterError(
                f"The line has more than {MAX_LINE_BYTES} bytes, which is the most."
            )
        line = parse_line(self._read(index))
        first = self._repeats.get(index)
        if first is not None:
            raise DuplicateIdError(
                f"Line {self.number(first)} has the same custom_id.", param="custom_id"
            )
        return line

    def custom_id(self, index: int) -> str | None:
        """The custom_id of a line, also of one that is no request; None if it has none."""
        return _id_of(self._read(index)) or None

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _read(self, index: int) -> bytes:
        data = os.pread(self._fd, self._lengths[index], self._offsets[index])
        if zlib.crc32(data) != self._crcs[index]:
            raise InputChangedError(
                f"{self.path}:{self.number(index)}: the line was changed while the batch was "
                "running; results so far are kept, but belong to the old file."
            )
        return data

    def _survey(self, file: Any) -> tuple[str, array[int]]:
        """Record the offsets of lines; return the digest of the file and hashes of custom_ids."""
        digest, ids, offset = sha256(), array("Q"), 0
        for number, (line, length) in enumerate(_pieces(file, digest.update), 1):
            if line.strip():
                self._offsets.append(offset)
                self._lengths.append(min(length, MAX_LINE_BYTES + 1))
                self._numbers.append(number)
                self._crcs.append(zlib.crc32(line))
                ids.append(_id_hash(line))
                if len(ids) == self._most:
                    self._check_end(file)
            offset += length
        return digest.hexdigest(), ids

    def _check_end(self, file: Any) -> None:
        """Raise TooManyLinesError if lines follow that are not blank."""
        place = file.tell()
        while line := file.readline(_BUFFER_BYTES):
            if line.strip():
                os.close(self._fd)
                raise TooManyLinesError(f"The file has more than {self._most} lines.")
        file.seek(place)

    def _find_repeats(self, hashes: array[int]) -> dict[int, int]:
        """Lines whose custom_id an earlier one has -> the first of these."""
        import numpy as np  # request planes read lines, but not whole files

        values = np.frombuffer(hashes, np.uint64) if hashes else np.zeros(0, np.uint64)
        order = np.argsort(values, kind="stable")
        same = np.flatnonzero((np.diff(values[order]) == 0) & (values[order[1:]] != 0))
        firsts: dict[str, int] = {}
        repeats = {}
        for index in sorted({int(order[i + step]) for i in same for step in (0, 1)}):
            name = _id_of(self._read(index))
            if firsts.setdefault(name, index) != index:
                repeats[index] = firsts[name]
        return repeats


def _pieces(file: Any, update: Any) -> Iterator[tuple[bytes, int]]:
    """Lines with their lengths; of one that is too long only the beginning."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        update(line)
        length, rest = len(line), line
        while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE_BYTES + 1)
            update(rest)
            length += len(rest)
        yield line, length


class _Identified(Struct):
    custom_id: str


_ids = msgspec.json.Decoder(_Identified)


def _id_of(data: bytes) -> str:
    try:
        return _ids.decode(data).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""


def _id_hash(data: bytes) -> int:
    """64 bits of the custom_id's hash; 0 for a line without one."""
    name = _id_of(data)
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest()) if name else 0


class _Head(Struct):
    """The fields of a body that the batch itself reads."""

    stream: bool | None = None


def parse_line(data: bytes) -> BatchLine:
    """Read a line of a batch.

    Raises:
        ParameterError: it is not JSON, a field is missing, unknown or malformed, or it asks for a
            stream; the error names the field.
        UnknownUrlError: its url is none of the endpoints.
    """
    line: BatchLine = _decode(BatchLine, data)
    if not 0 < len(line.custom_id) <= MAX_ID_CHARS:
        raise ParameterError(
            f"custom_id must have 1 to {MAX_ID_CHARS} characters.", param="custom_id"
        )
    if line.url not in BATCH_ENDPOINTS:
        raise UnknownUrlError(
            f"url must be one of {', '.join(BATCH_ENDPOINTS)}, not '{line.url[:100]}'."
            f"{suggest(line.url[:100], BATCH_ENDPOINTS)}",
            param="url",
        )
    if line.method != "POST":
        raise ParameterError(f"method must be POST, not '{line.method[:100]}'.", param="method")
    if _decode(_Head, line.body, "body").stream:
        raise UnsupportedParameterError("stream", " A batch writes whole answers; leave it out.")
    return line


def _decode(kind: type[Any], data: bytes | Raw, at: str = "") -> Any:
    try:
        return decode_body(kind, data, at)
    except ParameterError as error:
        error.message = error.message.replace("The body of the request", "The line", 1)
        error.args = (error.message,)
        raise
