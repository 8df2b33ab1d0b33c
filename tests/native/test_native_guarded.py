"""The kernels as they are installed touch no byte beyond the tensors that they are given."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "guarded.py"


def run(side: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), side]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("side", ["before", "after"])
def test_no_byte_beyond_a_tensor_is_touched(side: str) -> None:
    done = run(side)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "good\n"


def test_a_byte_beyond_a_tensor_ends_the_process() -> None:
    assert run("beyond").returncode == -signal.SIGSEGV
