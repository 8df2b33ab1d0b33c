"""The bell of a data folder: a file whose time of change says that there is something to do."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

BELL = "bell"
IN_ATTRIB, IN_MOVED_TO, IN_CREATE = 0x4, 0x80, 0x100  # of <sys/inotify.h>
CHANGES = IN_ATTRIB | IN_MOVED_TO | IN_CREATE


def ring_bell(folder: Path) -> None:
    """Let supervisors know that there is something to do, who may have no batch process."""
    fd = os.open(folder / BELL, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.utime(fd)
    os.close(fd)


def bell_stamp(folder: Path) -> int:
    """Changes when the bell of a data folder is rung; 0 before the first time."""
    with contextlib.suppress(OSError):
        return (folder / BELL).stat().st_mtime_ns
    return 0


@contextlib.contextmanager
def near_bell(folder: Path) -> Iterator[asyncio.Event]:
    """An event that is set when the bell may have been rung since the block began.

    A folder that is not there yet is watched for by the nearest one above it. Changes that another
    machine makes to a shared folder are not seen.

    Raises:
        OSError: no folder can be watched.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    loop, changed = asyncio.get_running_loop(), asyncio.Event()

    def on_change() -> None:
        loop.remove_reader(fd)
        changed.set()

    try:
        for place in (folder, *folder.parents):
            if libc.inotify_add_watch(fd, os.fsencode(place), CHANGES) >= 0:
                break
        else:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        loop.add_reader(fd, on_change)
        yield changed
    finally:
        loop.remove_reader(fd)
        os.close(fd)
