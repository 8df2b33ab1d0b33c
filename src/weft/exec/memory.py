"""Host memory for KV and copies: whole pages, zero until written."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import InvariantError, OutOfMemoryError
from weft.core.settings import format_bytes
from weft.kernels.arrays import numpy_dtype

if TYPE_CHECKING:
    from torch import Tensor


def host_zeros(nbytes: int) -> NDArray[np.uint8]:
    """Return zeros [nbytes] uint8, whose pages are taken when they are first written.

    Large pages if possible. Writing zeros to all of the memory took most of the start.
    """
    return np.frombuffer(_pages(nbytes), np.uint8)[:nbytes]


def map_file(fd: int, nbytes: int) -> NDArray[np.uint8]:
    """Return the first bytes of a file [nbytes] uint8, which all that map them write and read.

    Raises:
        OSError: they cannot be mapped.
    """
    pages = mmap.mmap(fd, nbytes)
    _want_large(pages)
    return np.frombuffer(pages, np.uint8)


class Arena:
    """Hands out memory array by array, each from the beginning of a page.

    Args:
        data: [nbytes] uint8.
    """

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self._data, self._used = data, 0

    def __call__(self, shape: Sequence[int], dtype: str) -> NDArray[Any]:
        """Return the next array.

        Raises:
            InvariantError: it does not fit in.
        """
        kind = numpy_dtype(dtype)
        size = math.prod(shape) * kind.itemsize
        if size > len(self._data) - self._used:
            raise InvariantError(f"{size} bytes do not fit into {len(self._data)}")
        array = self._data[self._used : self._used + size].view(kind).reshape(tuple(shape))
        self._used += self.room((size,))
        return array

    @staticmethod
    def room(sizes: Iterable[int]) -> int:
        """Bytes of an arena for arrays of these sizes in bytes."""
        return sum(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes)


def pinned_zeros(nbytes: int) -> Tensor:
    """Return zeros [nbytes] uint8 that a GPU copies from and to beside the caller.

    torch's own allocator of such memory rounds every size up to a power of two: of 20 GiB it takes
    32. Nobody but the caller sees to it that no copy runs when the memory is freed.

    Raises:
        OutOfMemoryError: the driver does not pin so much.
    """
    import torch

    pages = _PinnedPages(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _want_large(pages)
    data = torch.frombuffer(pages, dtype=torch.uint8)
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = data.data_ptr()
    status = runtime.cudaHostRegister(address, len(pages), 0)
    if int(status):
        raise OutOfMemoryError(
            f"The driver does not pin {format_bytes(nbytes)} of the host's memory (CUDA error "
            f"{int(status)}); set host_kv_memory lower, or allow more (ulimit -l)."
        )
    pages.unregister = partial(runtime.cudaHostUnregister, address)
    return data[:nbytes]


class _PinnedPages(mmap.mmap):
    """Pages that a driver is told of before they are unmapped.

    A callback of a weak reference would come after that: what maps other memory there meanwhile
    could not be pinned, or would lose its pin.
    """

    unregister: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unregister is not None and not sys.is_finalizing():
            self.unregister()


def give_back(start: int, nbytes: int, *, shared: bool = False) -> int:
    """Give whole pages back to the system, which are zeros until they are written again.

    Args:
        start: an address in memory of ``host_zeros``, from which nothing is needed any more.
        shared: it is of ``map_file``, and nobody else needs anything either.

    Returns:
        How many bytes were given: those of the pages that lie wholly within.
    """
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (start + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if size <= 0:
        return 0
    if _madvise(first, size, mmap.MADV_REMOVE if shared else mmap.MADV_DONTNEED):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return size


def _madvise(start: int, size: int, advice: int) -> int:
    call = ctypes.CDLL(None, use_errno=True).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return int(call(start, size, advice))


def _pages(nbytes: int) -> mmap.mmap:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = mmap.mmap(-1, max(1, nbytes), flags=flags)
    _want_large(pages)
    return pages


def _want_large(pages: mmap.mmap) -> None:
    with contextlib.suppress(OSError):  # a kernel without large pages
        pages.madvise(mmap.MADV_HUGEPAGE)
