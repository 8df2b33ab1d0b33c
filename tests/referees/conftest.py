"""Makes the scripts that tests here use importable, and starts one server for them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from live import Server, serving

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "clients" / "common"), str(HERE.parent / "server")]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("referees")) as running:
        yield running
