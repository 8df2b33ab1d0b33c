"""A ring for each test that wants one, and the C++ programs of the ring tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import builds
from weft.ring.segment import create_ring

HERE = Path(__file__).parent
HEADERS = HERE.parents[1] / "src" / "weft" / "ring"
RESIDENT = HEADERS.parent / "resident"
sys.path.insert(0, str(HERE))


@pytest.fixture
def ring():
    fds = create_ring(64, 1 << 20)
    yield fds
    fds.close()


@pytest.fixture(scope="session")
def build():
    """Compile one of the C++ programs beside this file; skips where there is no compiler."""

    def compile_program(name: str, *flags: str) -> Path:
        words = ["-std=c++20", "-O1", "-g", "-Wall", "-Wextra", "-Werror", *flags]
        words += [f"-I{HEADERS}", f"-I{HEADERS.parent}"]
        return builds.program([*words, HERE / f"{name}.cpp"], [HERE, HEADERS, RESIDENT])

    return compile_program
