"""Host memory for KV and copies: whole pages, zero until written."""

from __future__ import annotations

import contextlib
import mmap
import weakref

import torch
from torch import Tensor

from weft.core.errors import OutOfMemoryError
from weft.core.settings import format_bytes


def host_zeros(nbytes: int) -> Tensor:
    """Return zeros [nbytes] uint8, whose pages are taken when they are first written.

    Large pages if possible. Writing zeros to all of the memory took most of the start.
    """
    return torch.frombuffer(_pages(nbytes), dtype=torch.uint8)[:nbytes]


def pinned_zeros(nbytes: int) -> Tensor:
    """Return zeros [nbytes] uint8 that a GPU copies from and to beside the caller.

    torch's own allocator of such memory rounds every size up to a power of two: of 20 GiB it takes
    32. Nobody but the caller sees to it that no copy runs when the memory is freed.

    Raises:
        OutOfMemoryError: the driver does not pin so much.
    """
    pages = _pages(nbytes)
    data = torch.frombuffer(pages, dtype=torch.uint8)
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = data.data_ptr()
    status = runtime.cudaHostRegister(address, len(pages), 0)
    if int(status):
        raise OutOfMemoryError(
            f"The driver does not pin {format_bytes(nbytes)} of the host's memory (CUDA error "
            f"{int(status)}); set host_kv_memory lower, or allow more (ulimit -l)."
        )
    weakref.finalize(pages, runtime.cudaHostUnregister, address).atexit = False
    return data[:nbytes]


def _pages(nbytes: int) -> mmap.mmap:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = mmap.mmap(-1, max(1, nbytes), flags=flags)
    with contextlib.suppress(OSError):  # a kernel without large pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
