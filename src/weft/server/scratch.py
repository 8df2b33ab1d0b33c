"""A private folder for one process and its children, gone with it or at the next start."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "weft-scratch-"


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a folder that only this user can read; it is removed when the block ends.

    What a process has left that was killed is removed first: a folder's holder locks it, and the
    kernel takes the lock away when the holder ends.

    Raises:
        OSError: no folder can be made.
    """
    _remove_left(Path(tempfile.gettempdir()))
    folder, held = _make()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def _make() -> tuple[Path, int]:
    """A folder, and the descriptor that holds its lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        held = _lock(folder)
        if held is not None:
            return folder, held  # else somebody has just taken it for one that was left


def _remove_left(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid != os.getuid() or folder.is_symlink():
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
