"""A file of packed weights: a header of JSON, then each matrix and array on pages of its own.

    magic | version | bytes of the header | blake2b of the header | header | sections

The header names the key that the weights were packed for, and for each section its place, what its
bytes mean and their blake2b. Whoever reads the file checks all of the header; of the sections only
their bounds, unless it is asked to verify them. Nothing in the file is run or unpickled.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import stat
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.core.placement import interleaving
from weft.kernels.arrays import numpy_dtype
from weft.kernels.storage import PackedForm
from weft.models.bounds import MOST_PACKED_HEADER_BYTES

MAGIC, VERSION = b"weftpack", 1
PAGE = 4096
CHUNK_BYTES = 4 << 20  # a multiple of a large page
SMALL_BYTES = 64 << 10
MOST_BUFFERS = 512  # of one call; systems allow 1024
AHEAD_BYTES = 128 << 10  # of one call; most systems read no more than that for one
DTYPES = {name: numpy_dtype(name) for name in ("float32", "bfloat16")}
_START = struct.Struct("<8sIQ32s")
_NO_DIGEST = "0" * 32

MapMatrix = Callable[[PackedForm, memoryview], Any]


class PackedFileError(Exception):
    """A file of packed weights cannot be used; the words say why."""


@dataclass(frozen=True)
class PackedSection:
    """A matrix or an array in the file.

    Attributes:
        name: the parameter.
        part: which of its matrices, where it has one for each expert.
        offset: from the start of the sections.
        form: of a matrix; None for an array, which has dtype and shape.
    """

    name: str
    part: int | None
    offset: int
    nbytes: int
    form: PackedForm | None
    dtype: str | None
    shape: tuple[int, ...]


def write_packed(
    file: int,
    about: Mapping[str, Any],
    weights: Mapping[str, Any],
    between: Callable[[], None] = lambda: None,
) -> None:
    """Write weights to an empty file and synchronise it.

    Args:
        file: its descriptor.
        about: what the header says beside the sections; JSON.
        weights: by parameter: a packed matrix, a tuple of them, or an array.
        between: called after some MiB each; may wait, or raise to give up.

    Raises:
        OSError: the disk is full, or fails.
    """
    numbers = list(_sections(weights))
    sections = [section for section, _ in numbers]
    digests = [_NO_DIGEST] * len(sections)
    start = _round_up(_START.size + len(_header(about, sections, digests)))

    def parts() -> Iterator[memoryview]:
        yield memoryview(bytes(start))
        for place, (section, memory) in enumerate(numbers):
            digest = blake2b(digest_size=16)
            for first in range(0, section.nbytes, CHUNK_BYTES):
                part = memory[first : first + CHUNK_BYTES]
                digest.update(part)
                yield part
            digests[place] = digest.hexdigest()
            yield memoryview(bytes(_round_up(section.nbytes) - section.nbytes))

    _write_chunks(file, parts(), between)
    header = _header(about, sections, digests)
    beginning = _START.pack(MAGIC, VERSION, len(header), _digest(header))
    _write_all(file, [memoryview(beginning + header)], 0)
    os.fsync(file)


def packed_bytes(weights: Mapping[str, Any]) -> int:
    """Return the bytes of a file of these weights, about."""
    return sum(_round_up(section.nbytes) for section, _ in _sections(weights)) + PAGE


class PackedFile:
    """An open file whose header is checked.

    Attributes:
        about: what the header says beside the sections.
        sections: in the order of the file.
        nbytes: of the file.
    """

    def __init__(self, path: Path) -> None:
        """Open a file.

        Raises:
            FileNotFoundError, NotADirectoryError: there is none.
            PackedFileError: it cannot be read, others may write to it, or it is not such a file.
        """
        try:
            self._file = path.open("rb", buffering=0)
        except (FileNotFoundError, NotADirectoryError):
            raise
        except OSError as error:
            raise PackedFileError(f"it cannot be read ({error.strerror})") from error
        try:
            self._read_header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> PackedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _read_header(self) -> None:
        found = os.fstat(self._file.fileno())
        self.nbytes = found.st_size
        if not stat.S_ISREG(found.st_mode):
            raise PackedFileError("it is not a file")
        if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
            raise PackedFileError("other users may write to it")
        beginning = self._file.read(_START.size)
        if len(beginning) < _START.size or not beginning.startswith(MAGIC):
            raise PackedFileError("it is not a file of packed weights, or was not finished")
        _, version, size, digest = _START.unpack(beginning)
        if version != VERSION:
            raise PackedFileError(f"its version is {version}, not {VERSION}")
        if size > min(MOST_PACKED_HEADER_BYTES, self.nbytes):
            raise PackedFileError(f"its header has {size} bytes, more than any model's or the file")
        header = self._file.read(size)
        if len(header) < size or _digest(header) != digest:
            raise PackedFileError("its header is damaged")
        try:
            self.about, listed = _parsed(header)
            self.sections = [_section(entry) for entry in listed]
            self._digests = [str(entry["digest"]) for entry in listed]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise PackedFileError(f"its header cannot be read ({error})") from error
        self._start = _round_up(_START.size + size)
        self._check_places()

    def _check_places(self) -> None:
        at = 0
        for section in self.sections:
            if section.offset != at or section.nbytes < 0:
                raise PackedFileError(f"section '{section.name}' is out of place")
            at += _round_up(section.nbytes)
        if self._start + at != self.nbytes:
            raise PackedFileError(f"it has {self.nbytes} bytes, not {self._start + at}")

    def weights(
        self, map_matrix: MapMatrix, *, verify: bool = False, nodes: Sequence[int] = ()
    ) -> dict[str, Any]:
        """Map the file read-only and return its weights, which keep the map.

        Args:
            map_matrix: makes a matrix of its form and its bytes.
            verify: compare all bytes with their digests.
            nodes: NUMA nodes on which pages that are not in the page cache yet lie in turns.

        Raises:
            PackedFileError: a section does not have the bytes that it should have.
        """
        if not self.sections:
            return {}
        pages = mmap.mmap(self._file.fileno(), self.nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
        _read_ahead(os.dup(self._file.fileno()), nodes)
        memory = memoryview(pages)
        if verify:
            self._verify(memory, nodes)
        found: dict[str, Any] = {}
        for section in self.sections:
            try:
                weight = _weight(section, self._bytes_of(section, memory), map_matrix)
            except (ValueError, TypeError, KeyError) as error:
                raise PackedFileError(f"section '{section.name}': {error}") from error
            if section.part is None:
                complete = section.name not in found
                found[section.name] = weight
            else:
                before = found.setdefault(section.name, ())
                complete = isinstance(before, tuple) and section.part == len(before)
                found[section.name] = (*before, weight) if complete else ()
            if not complete:
                raise PackedFileError(f"section '{section.name}' is there twice, or in parts")
        return found

    def _bytes_of(self, section: PackedSection, memory: memoryview) -> memoryview:
        first = self._start + section.offset
        return memory[first : first + section.nbytes]

    def _verify(self, memory: memoryview, nodes: Sequence[int]) -> None:
        def digest(section: PackedSection) -> str:
            with interleaving(nodes):
                return blake2b(self._bytes_of(section, memory), digest_size=16).hexdigest()

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            digests = threads.map(digest, self.sections)
            for section, kept, found in zip(self.sections, self._digests, digests, strict=True):
                if kept != found:
                    raise PackedFileError(f"the bytes of section '{section.name}' have changed")


def _read_ahead(file: int, nodes: Sequence[int]) -> None:
    """Begin to read a file that is not in the page cache, beside the caller; closes it."""

    def read() -> None:
        with (
            contextlib.suppress(OSError),
            os.fdopen(file, "rb", buffering=0),
            interleaving(nodes),
        ):
            size = os.fstat(file).st_size
            for first in range(0, size, AHEAD_BYTES):
                os.posix_fadvise(file, first, AHEAD_BYTES, os.POSIX_FADV_WILLNEED)

    threading.Thread(target=read, name="weft-read-ahead", daemon=True).start()


def _sections(weights: Mapping[str, Any]) -> Iterator[tuple[PackedSection, memoryview]]:
    """Yield all sections in the order of the file, and their bytes.

    Norms and biases come first: they are read at each start, and would take in pages of matrices.
    """
    at = 0
    for name, weight in sorted(weights.items(), key=lambda item: not _is_small(item[1])):
        parts = enumerate(weight) if isinstance(weight, tuple) else [(None, weight)]
        for part, matrix in parts:
            if isinstance(matrix, np.ndarray):
                form, dtype, shape = None, matrix.dtype.name, matrix.shape
                memory = np.ascontiguousarray(matrix).reshape(-1).view(np.uint8).data
            else:
                form, dtype, shape, memory = matrix.form, None, (), matrix.memory
            yield PackedSection(name, part, at, memory.nbytes, form, dtype, shape), memory
            at += _round_up(memory.nbytes)


def _is_small(weight: Any) -> bool:
    return isinstance(weight, np.ndarray) and weight.nbytes <= SMALL_BYTES


def _header(about: Mapping[str, Any], sections: list[PackedSection], digests: list[str]) -> bytes:
    listed = [
        {**asdict(section), "digest": digest}
        for section, digest in zip(sections, digests, strict=True)
    ]
    return json.dumps({"about": dict(about), "sections": listed}).encode()


def _parsed(header: bytes) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    found = json.loads(header)
    about, listed = found["about"], found["sections"]
    if not (isinstance(about, dict) and isinstance(listed, list)):
        raise ValueError("not as it is written")
    return about, listed


def _section(entry: Mapping[str, Any]) -> PackedSection:
    fields = {name: entry[name] for name in PackedSection.__dataclass_fields__}
    integers = [fields["offset"], fields["nbytes"], *fields["shape"]]
    integers += [fields["part"]] if fields["part"] is not None else []
    if not all(type(number) is int and 0 <= number < 2**62 for number in integers):
        raise ValueError("a size is not one")
    if fields["form"] is not None:
        form = dict(fields["form"])
        fields["form"] = PackedForm(**form | {"shape": tuple(form["shape"])})
    return PackedSection(**fields | {"name": str(fields["name"]), "shape": tuple(fields["shape"])})


def _weight(section: PackedSection, memory: memoryview, map_matrix: MapMatrix) -> Any:
    if section.form is not None:
        return map_matrix(section.form, memory)
    dtype = DTYPES[str(section.dtype)]
    if section.nbytes != math.prod(section.shape) * dtype.itemsize:
        raise ValueError(f"{section.nbytes} bytes are not {list(section.shape)} of {dtype}")
    array: NDArray[Any] = np.frombuffer(memory, np.uint8).view(dtype).reshape(section.shape)
    return array


def _write_chunks(file: int, parts: Iterator[memoryview], between: Callable[[], None]) -> None:
    """Write parts one behind the other, in pieces of which the page cache makes large pages."""
    at, size = 0, 0
    batch: list[memoryview] = []
    for part in parts:
        while part:
            room = CHUNK_BYTES - (at + size) % CHUNK_BYTES
            batch.append(part[:room])
            size += len(batch[-1])
            if len(batch[-1]) == room or len(batch) == MOST_BUFFERS:
                _write_all(file, batch, at)
                between()
                at, size, batch = at + size, 0, []
            part = part[room:]
    _write_all(file, batch, at)
    between()


def _write_all(file: int, buffers: list[memoryview], offset: int) -> None:
    while buffers:
        done = os.pwritev(file, buffers, offset)
        offset += done
        while buffers and done >= len(buffers[0]):
            done -= len(buffers[0])
            buffers = buffers[1:]
        if done:
            buffers = [buffers[0][done:], *buffers[1:]]


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=32).digest()


def _round_up(size: int) -> int:
    return -(-size // PAGE) * PAGE
