"""How close a kernel must come to its float32 reference."""

from __future__ import annotations

import torch
from torch import Tensor

# Of the largest number of the truth. The interpreter cuts bfloat16 off where a GPU rounds.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPES = list(TOLERANCE)


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    gap = (found.float() - expected.float()).abs().max().item()
    assert gap <= TOLERANCE[found.dtype] * max(1.0, expected.float().abs().max().item())
