"""An open safetensors file: its header, checked by the library, and its tensors, mapped."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from weft.core.errors import CheckpointError, short
from weft.kernels.arrays import numpy_dtype
from weft.models.bounds import MOST_HEADER_BYTES

DTYPES = {  # of what is read, by the names of safetensors
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "uint8",  # exponents
    "I8": "int8",
    "U8": "uint8",
    "I32": "int32",
    "I64": "int64",
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as its file's header describes it."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    offset: int  # bytes from the start of the file


class SafetensorsFile:
    """A safetensors file, of which nothing but the header is read before a tensor is asked for."""

    def __init__(self, path: Path, files: ExitStack, folder: Path | None = None) -> None:
        """Check the header with the library, which is held open on ``files``.

        Args:
            folder: of the model; tensors of a file in one of its folders are named by that, too, as
                in ``2_Dense/linear.weight``.

        Raises:
            CheckpointError: the file is damaged, or its header is longer than that of any model.
        """
        _check_header(path)
        self._path = path
        inside = Path() if folder is None else path.parent.relative_to(folder)
        self._home = "" if inside == Path() else f"{inside.as_posix()}/"
        try:
            self._library = files.enter_context(safe_open(path, framework="numpy"))
            self._bytes = np.memmap(path, np.uint8, "r")
        except (OSError, ValueError, SafetensorError) as error:
            raise CheckpointError(
                f"cannot read {path}: {short(error)}; the file is damaged or incomplete, fetch it "
                "again"
            ) from error

    def tensors(self) -> Iterator[StoredTensor]:
        """Yield what the header says of each tensor."""
        size = int.from_bytes(self._bytes[:8].tobytes(), "little")
        header = json.loads(self._bytes[8 : 8 + size].tobytes())
        for name in self._library.keys():  # noqa: SIM118 - not a dict
            view = self._library.get_slice(name)
            offset = 8 + size + header[name]["data_offsets"][0]
            shape = tuple(view.get_shape())
            yield StoredTensor(self._home + name, self._path, shape, view.get_dtype(), offset)

    def read(self, tensor: StoredTensor) -> NDArray[Any]:
        """Return a tensor of one of ``DTYPES``: a view of the mapped file, not to be written."""
        kind = numpy_dtype(DTYPES[tensor.dtype])
        count = math.prod(tensor.shape) * kind.itemsize
        found = np.asarray(self._bytes)[tensor.offset : tensor.offset + count]
        return np.require(found.view(kind), requirements="A").reshape(tensor.shape)


def _check_header(path: Path) -> None:
    """Raise CheckpointError if the header of a safetensors file is longer than that of any model.

    The library takes one of 100 MB, most of which may be spaces.
    """
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if size > MOST_HEADER_BYTES:
        raise CheckpointError(
            f"cannot read {path}: its header has {size} bytes, {MOST_HEADER_BYTES} are supported; "
            "the file is damaged, fetch it again"
        )
