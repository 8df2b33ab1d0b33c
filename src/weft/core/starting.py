"""The lines of a start that users see, and on a terminal its bars where it takes long."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from weft.core.logs import notice

SHOWN = ("bars", "lines")  # bars alone, or lines as well
BAR_AFTER_S = 1.0  # what is done sooner has none
_LINES, _BARS = logging.getLogger("weft.start.lines"), logging.getLogger("weft.start.bars")


def show_start(shown: str | None, *, bars: bool = True) -> None:
    """Say what this process shows of its start; without this call, bars.

    Args:
        shown: one of ``SHOWN``; None: nothing.
        bars: whether bars are allowed; without a terminal there are none in any case.
    """
    _LINES.setLevel(logging.INFO if shown == "lines" else logging.CRITICAL)
    _BARS.setLevel(logging.INFO if shown and bars else logging.CRITICAL)


def told_at_start(message: str) -> None:
    """A notice about the start of this process, where lines are shown."""
    if _LINES.level == logging.INFO:
        notice(message)


def has_bars() -> bool:
    """Whether this process shows bars."""
    return _BARS.level != logging.CRITICAL and sys.stderr.isatty()


@contextmanager
def progress_bar(what: str, total_bytes: int) -> Iterator[Callable[[int], Any]]:
    """A bar for something that may take long; yields what counts bytes that are done."""
    if not has_bars():
        yield lambda _: None
        return
    with bar_class()(desc=f"weft: {what}", total=total_bytes, **IN_BYTES) as shown:
        yield shown.update


IN_BYTES = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}


def bar_class() -> Any:
    """tqdm's bar, but gone when it is done, and only where bars are shown."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            options |= {"leave": False, "delay": BAR_AFTER_S, "disable": not has_bars()}
            super().__init__(*arguments, **options)

    return Bar
