"""A kernel that takes part in programmatic dependent launch, for ``ahead`` and the interpreter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.triton import device, pdl


@triton.jit
def double_kernel(x, PDL: tl.constexpr):
    pdl.wait(PDL)
    pdl.launch_dependents(PDL)
    at = x + tl.program_id(0)
    tl.store(at, tl.load(at) * 2)


def double(x: Tensor) -> None:
    """Double numbers in place."""
    double_kernel[(len(x),)](x, **pdl.options(x.device))


def launch(capability: int) -> None:
    device.capability = lambda _: divmod(capability, 10)
    double(torch.empty(4))
