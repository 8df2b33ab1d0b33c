"""Makes the modules of ``benchmarks/gpu`` importable."""

import sys
from pathlib import Path

import pytest

PARTS = str(Path(__file__).parents[2] / "benchmarks" / "gpu")


@pytest.fixture(scope="module", autouse=True)
def _modules():
    sys.path.insert(0, PARTS)
    yield
    sys.path.remove(PARTS)
