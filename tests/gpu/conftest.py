"""Engines run on the GPU where there is one, else on the CPU with a device that stands in for it.

WEFT_TEST_DEVICE chooses. Makes the helper modules of this folder and of ``numeric`` importable.
"""

import sys
from pathlib import Path

import pytest
import torch

import interpreted

sys.path.insert(0, str(Path(__file__).parents[1] / "numeric"))
sys.path.insert(0, str(Path(__file__).parent))

from graphed import use_graphs

interpreted.prepare()


@pytest.fixture(autouse=True)
def _executor(monkeypatch):
    """The graph executor, with few sizes; torch with one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    use_graphs(monkeypatch)
    yield
    torch.set_num_threads(before)
