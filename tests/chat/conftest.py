"""Fixtures of the tests of ``weft chat``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from speaking import SpeakingServer, speaking


@pytest.fixture
def state(tmp_path, monkeypatch) -> Path:
    """The state folder of this test's chats."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "weft" / "chat"


@pytest.fixture
def server(state) -> Iterator[SpeakingServer]:  # noqa: ARG001 - its chats keep their history there
    with speaking("one", "two") as running:
        yield running
