"""What is shown of a start: nothing, lines or bars, and bars only on a terminal."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator

import pytest

from weft.core import starting
from weft.core.logs import set_up_logs
from weft.core.starting import bar_class, has_bars, progress_bar, show_start, told_at_start


@pytest.fixture
def terminal(monkeypatch, capsys) -> Iterator[Callable[[], str]]:
    """Standard error as a terminal, with bars from the first moment on; called, what it shows."""
    monkeypatch.setattr(starting, "BAR_AFTER_S", 0)
    show_start("bars")
    before = logging.getLogger().handlers[:]
    yield lambda: capsys.readouterr().err
    logging.basicConfig(handlers=before, force=True)
    show_start("bars")


def load() -> None:
    with progress_bar("loading weights", 4096) as done:
        for _ in range(4):
            done(1024)


def test_bars_are_for_terminals(terminal, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    load()
    shown = terminal()
    assert "weft: loading weights" in shown
    assert "/4.00k [" in shown
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    load()
    with bar_class()(total=3) as bar:  # as the hub's library makes one
        bar.update(3)
    assert terminal() == ""


@pytest.mark.parametrize(
    ("shown", "bars", "expected"),
    [(None, True, (False, False)), ("bars", True, (True, False)), ("lines", True, (True, True)),
     ("lines", False, (False, True))],
)  # fmt: skip
def test_a_process_shows_what_it_is_told_to(terminal, monkeypatch, shown, bars, expected):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    set_up_logs("test", "warning", "text")
    show_start(shown, bars=bars)
    told_at_start("loading a model")
    assert (has_bars(), "weft: loading a model" in terminal()) == expected
    load()
    assert ("loading weights" in terminal()) == expected[0]
