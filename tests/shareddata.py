"""Data that lies beside the repository: traces, workloads, API descriptions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SHARED = Path(__file__).parents[2] / "shared" / "data"


def need(name: str) -> Path:
    """A file or folder; skips the test if it is not there, fails if ``WEFT_TEST_DATA=required``."""
    path = SHARED / name
    if path.exists():
        return path
    message = f"{name} does not lie beside the repository"
    if os.environ.get("WEFT_TEST_DATA") == "required":
        pytest.fail(message)
    pytest.skip(message)
