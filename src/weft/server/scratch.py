"""A private folder in memory for a process and its children, removed when all have ended."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

MEMORY = Path("/dev/shm")
PREFIX = "weft-scratch-"
SWEEPER = "weft-sweeper"  # as ps shows it

# Waits until the process that made the folder has ended, however that was. A shell takes a tenth of
# the memory that Python would, and a server has one all the time.
_SWEEP = (
    "while read -r _; do :; done; "
    'for _ in 0 1 2 3 4 5 6 7 8 9; do rm -rf -- "$1"; [ -e "$1" ] || break; sleep 1; done'
)


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a folder that only this user can read, and that never comes to a disk.

    It is removed when the block ends, or by a process of its own when this one is killed. If that
    is killed as well, the next call removes the folder: its holder locks it, and the kernel takes
    the lock away when the holder ends.

    Raises:
        OSError: no folder can be made.
    """
    _remove_left()
    folder, held = _make()
    try:
        with _sweeper(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


@contextlib.contextmanager
def _sweeper(folder: Path) -> Iterator[None]:
    """A process that removes the folder when this one has ended; it ends with the block."""
    command = [SWEEPER, "-c", _SWEEP, SWEEPER, str(folder)]
    process = subprocess.Popen(
        command, executable="/bin/sh", stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        yield
    finally:
        process.kill()
        process.communicate()


def room(folder: Path) -> int:
    """Bytes that may be put into a folder in memory: others need some of it, too."""
    return shutil.disk_usage(folder).free // 2


def _make() -> tuple[Path, int]:
    """A folder, and the descriptor that holds its lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=MEMORY))
        held = _lock(folder)
        if held is not None:
            return folder, held
        shutil.rmtree(folder, ignore_errors=True)  # another process took it for an abandoned one


def _remove_left() -> None:
    for folder in MEMORY.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid != os.getuid():
                continue
            held = _lock(folder)
            if held is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(held)


def _lock(folder: Path) -> int | None:
    """Hold a folder; None if another process does, or if it is gone."""
    try:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        return None
    if os.fstat(held).st_nlink == 0:  # removed before it was locked
        os.close(held)
        return None
    return held
