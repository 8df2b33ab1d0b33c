"""Reads the header of a GGUF file; checks counts and lengths against the file before use.

The reader of the ``gguf`` package builds whatever the header asks for, an array of 2^60 numbers
too, and takes seconds for the vocabulary of a real file, which is seldom needed. Torch-free.

Layout (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): magic, version, the number of
tensors and of fields; fields (key, type, value); descriptions of tensors; the data of the tensors,
aligned.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import CheckpointError, short
from weft.models.bounds import MOST_LISTED

MOST_FIELDS = 2**16
MOST_TENSORS = 2**17
MOST_STRINGS = 2**22  # in all arrays together; a vocabulary and its merges have a million
MOST_HEADER_BYTES = 2**28
MOST_KEY_BYTES = 2**16
MOST_DIMS = 4

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIifBQqd", strict=True))
_BOOL, _STRING, _ARRAY = 7, 8, 9
_DTYPES = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "I8": "i1", "I16": "<i2"}
_DTYPES |= {"I32": "<i4", "I64": "<i8"}


@dataclass(frozen=True)
class GgufTensor:
    """A tensor as the header describes it.

    Attributes:
        shape: inputs first, as the file has it.
        kind: the type of the ``gguf`` package.
        data: outputs first; numbers of floats and integers, bytes of quantised blocks.
    """

    shape: tuple[int, ...]
    kind: Any
    data: NDArray[Any]


@dataclass(frozen=True)
class GgufHeader:
    """The header of a GGUF file.

    Attributes:
        fields: the metadata. A list of strings, or a very long one, is a text that says so, unless
            all lists were asked for.
    """

    fields: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_header(path: Path, *, lists: bool = False) -> GgufHeader:
    """Read the header of a file, whose tensors stay mapped.

    Args:
        lists: whether to read also lists of strings and very long ones, which takes a second.

    Raises:
        CheckpointError: the file is damaged, or larger in some respect than that of any model.
    """
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return _HeaderReader(data, lists=lists).read()
    except (OSError, ValueError, struct.error) as error:
        raise CheckpointError(
            f"cannot read {path}: {short(error)}; the file is damaged or incomplete, fetch it again"
        ) from error


class _HeaderReader:
    """A place in a file that moves on with every value that is read. Raises ValueError."""

    def __init__(self, data: mmap.mmap, *, lists: bool) -> None:
        self._data = data
        self._lists = lists
        self._at = 0
        self._end = min(len(data), MOST_HEADER_BYTES)
        self._strings = 0

    def read(self) -> GgufHeader:
        if self._take(4) != _MAGIC:
            raise ValueError("it is no GGUF file")
        version = self._number("I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version} of the format is not supported")
        num_tensors, num_fields = self._number("Q"), self._number("Q")
        if num_tensors > MOST_TENSORS or num_fields > MOST_FIELDS:
            raise ValueError(f"it has {num_tensors} tensors and {num_fields} fields")
        fields: dict[str, Any] = {}
        for _ in range(num_fields):
            name = self._name()
            _check_new(name, fields)
            fields[name] = self._value(self._number("I"))
        described: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(num_tensors):
            name = self._name()
            _check_new(name, described)
            described[name] = self._description()
        start = _aligned(self._at, fields.get("general.alignment", 32))
        tensors = {name: self._tensor(name, start, *found) for name, found in described.items()}
        return GgufHeader(fields, tensors)

    def _take(self, size: int) -> bytes:
        self._skip(size)
        return self._data[self._at - size : self._at]

    def _skip(self, size: int) -> None:
        if size > self._end - self._at:
            raise ValueError(f"its header ends within {size} bytes at {self._at}")
        self._at += size

    def _number(self, code: str) -> Any:
        (value,) = struct.unpack("<" + code, self._take(struct.calcsize(code)))
        return value

    def _name(self) -> str:
        size = self._number("Q")
        if size > MOST_KEY_BYTES:
            raise ValueError(f"a name has {size} bytes")
        return self._take(size).decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._take(self._number("Q")).decode()
        if kind == _ARRAY:
            return self._array(self._number("I"), self._number("Q"))
        if kind not in _SCALARS:
            raise ValueError(f"a field has the unknown type {kind}")
        value = self._number(_SCALARS[kind])
        return bool(value) if kind == _BOOL else value

    def _string(self) -> str:
        """A string of a list; of a vocabulary some are cut within a character."""
        return self._take(self._number("Q")).decode(errors="replace")

    def _array(self, kind: int, count: int) -> list[Any] | str:
        if kind == _STRING:
            self._strings += count
            if self._strings > MOST_STRINGS:
                raise ValueError(f"it has lists of {self._strings} strings")
            if self._lists:
                return [self._string() for _ in range(count)]
            for _ in range(count):
                self._skip(self._number("Q"))
            return f"a list of {count} strings"
        if kind not in _SCALARS:
            raise ValueError(f"a field is a list of the type {kind}")
        size = struct.calcsize(_SCALARS[kind])
        if count > MOST_LISTED and not self._lists:
            self._skip(count * size)
            return f"a list of {count} numbers"
        return list(struct.unpack(f"<{count}{_SCALARS[kind]}", self._take(count * size)))

    def _description(self) -> tuple[tuple[int, ...], int, int]:
        """The shape of a tensor, its type, and where it begins after the header."""
        num_dims = self._number("I")
        if not 1 <= num_dims <= MOST_DIMS:
            raise ValueError(f"a tensor has {num_dims} dimensions")
        shape = struct.unpack(f"<{num_dims}Q", self._take(8 * num_dims))
        return shape, self._number("I"), self._number("Q")

    def _tensor(
        self, name: str, start: int, shape: tuple[int, ...], kind: int, offset: int
    ) -> GgufTensor:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        found = GGMLQuantizationType(kind)  # ValueError: unknown
        block, block_bytes = GGML_QUANT_SIZES[found]
        columns = shape[0]
        row_bytes = columns // block * block_bytes
        size = row_bytes
        for rows in shape[1:]:
            size *= rows
        at = start + offset
        if not size or columns % block or at + size > len(self._data):
            raise ValueError(f"tensor '{name}' of shape {list(shape)} lies outside of the file")
        dtype = np.dtype(_DTYPES.get(found.name, "u1"))
        flat = np.frombuffer(self._data, dtype, size // dtype.itemsize, at)
        data = flat.reshape(*reversed(shape[1:]), row_bytes // dtype.itemsize)
        return GgufTensor(shape, found, data)


def _check_new(name: str, known: Mapping[str, Any]) -> None:
    if name in known:
        raise ValueError(f"'{name}' is there twice")


def _aligned(at: int, alignment: Any) -> int:
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"the alignment {alignment!r} is no power of two")
    return -(-at // alignment) * alignment
