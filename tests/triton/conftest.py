"""Kernels run on the GPU where there is one, else on the CPU, in Triton's interpreter.

Triton reads its variable when the first kernel is defined. Tensors are made where kernels run. Also
makes the helper modules of this folder and of ``numeric`` importable.
"""

import sys
from pathlib import Path

import pytest
import torch

import interpreted
import where

interpreted.prepare()
sys.path[:0] = [str(Path(__file__).parents[1] / "numeric"), str(Path(__file__).parent)]


@pytest.fixture(autouse=True)
def _where_kernels_run():
    with torch.device(where.NAME):
        yield
