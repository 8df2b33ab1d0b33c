"""The file without a name in which KV outlives the engine that computed it.

The supervisor makes it, and each engine maps it in turn; a standby maps it as well, but touches
nothing before its turn. The first page names what the content depends on, the pages behind it
record what each block holds (``kv.record``), and the KV follows. Nothing is left when the last
process ends.
"""

from __future__ import annotations

import os

HEADER_BYTES = 4096
IDENTITY_BYTES = 16


def create_kv_file() -> int:
    """Return the descriptor of an empty file; an engine gives it its size."""
    return os.memfd_create("weft-kv", os.MFD_CLOEXEC)


def fits(fd: int, identity: bytes, size: int) -> bool:
    """Whether the file is for KV of this identity and has this size."""
    return os.fstat(fd).st_size == size and os.pread(fd, IDENTITY_BYTES, 0) == identity


def make_fit(fd: int, identity: bytes, size: int) -> None:
    """Make the file one of this identity and size, empty if it was another one.

    No other engine may use it. The identity comes last: who dies before it leaves a file that fits
    nobody.

    Raises:
        OSError: there cannot be a file of this size.
    """
    if not fits(fd, identity, size):
        os.ftruncate(fd, 0)
        os.ftruncate(fd, size)
        os.pwrite(fd, identity, 0)


def forget_kv(fd: int) -> None:
    """Give all memory of the file back; what maps it finds zeros. No engine may use it."""
    identity, size = os.pread(fd, IDENTITY_BYTES, 0), os.fstat(fd).st_size
    os.ftruncate(fd, 0)
    os.ftruncate(fd, size)
    os.pwrite(fd, identity, 0)


def used_bytes(fd: int) -> int:
    """Memory that the file takes."""
    return 512 * os.fstat(fd).st_blocks  # stat(2) counts in these
