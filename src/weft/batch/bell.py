"""The bell of a data folder: a file whose time of change says that there is something to do."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

BELL = "bell"


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
