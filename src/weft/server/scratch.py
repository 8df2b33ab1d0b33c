"""A private folder in memory for a process and its children, removed when all have ended."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

MEMORY = Path("/dev/shm")
PREFIX = "weft-scratch-"

# Waits until the process that made the folder has ended, however that was.
_SWEEP = """
import os, shutil, sys, time
import setproctitle
setproctitle.setproctitle("weft-sweeper")
sys.stdin.buffer.read()
for _ in range(100):
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    if not os.path.exists(sys.argv[1]):
        break
    time.sleep(0.1)
"""


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
    command = [sys.executable, "-I", "-c", _SWEEP, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
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
