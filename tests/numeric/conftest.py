"""Makes the helper modules of this folder importable; torch and the kernels have one thread.

Threads of several processes that run tests wait for each other in vain. Tests of threads set them,
and tests of instruction sets choose one; the next test has one thread and the widest set again.
"""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from graphed import use_graphs

from weft.kernels.cpu import attention


@pytest.fixture(autouse=True)
def _one_thread():
    before, isa = torch.get_num_threads(), attention.isa()
    torch.set_num_threads(1)
    attention.set_threads(1)
    yield
    torch.set_num_threads(before)
    attention.use_isa(isa)


@pytest.fixture(params=["eager", "graphs"])
def executor(request, monkeypatch) -> str:
    """Which executor the engines of a test have."""
    if request.param == "graphs":
        use_graphs(monkeypatch)
    return request.param
