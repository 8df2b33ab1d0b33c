"""Launches the kernels of the probes in ``benchmarks/gpu``, for ``ahead``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "gpu"))


def launch(capability: int) -> None:
    """A kernel of a chain; from Hopper on also one that may begin before the one ahead ends."""
    from dependent import BLOCK, add_one

    for depends in (False, True)[: 2 if capability >= 90 else 1]:
        numbers = torch.zeros(2 * BLOCK)
        add_one[(2,)](numbers, numbers, SIZE=2 * BLOCK, BLOCK=BLOCK, DEPENDS=depends)
