"""Launch widths of row-wise kernels, and whether kernels are interpreted."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

FLOATS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# Threads for rows that are read once: so many that each holds at most 16 numbers of a row.
_WARPS = ((512, 1), (1024, 2), (2048, 4), (8192, 8))
MOST_WARPS = 16


def interpreted() -> bool:
    """Whether kernels run on the CPU: ``TRITON_INTERPRET=1`` was set before Triton was imported."""
    return bool(triton.knobs.runtime.interpret)


def warps(numbers: int) -> int:
    """Return the warps of a program that holds so many numbers at once."""
    return next((count for most, count in _WARPS if numbers <= most), MOST_WARPS)


def power_of_2(size: int) -> int:
    """Return the smallest power of 2 that is not below ``size``."""
    return int(triton.next_power_of_2(size))


def last_contiguous(x: Tensor) -> Tensor:
    """Return ``x`` with a contiguous last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()
