"""Life and death of processes that belong together. Linux only."""

from __future__ import annotations

import os
import select
import threading

from setproctitle import setproctitle


def set_process_title(title: str) -> None:
    """Show ``title`` in ps and top."""
    setproctitle(title)


def die_with(parent_pid: int) -> None:
    """End this process at once when another one ends, however it ends.

    A thread waits on a pidfd: unlike PR_SET_PDEATHSIG this does not fire when the thread that
    started this process ends before its process does.
    """
    try:
        parent = os.pidfd_open(parent_pid)
    except ProcessLookupError:
        os._exit(1)
    threading.Thread(target=_wait_and_exit, args=(parent,), daemon=True).start()


def _wait_and_exit(pidfd: int) -> None:
    select.select([pidfd], [], [])
    os._exit(1)
