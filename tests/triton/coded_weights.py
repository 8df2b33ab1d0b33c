"""Weights of every form of codes with random numbers, and what they stand for."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.kernels.arrays import dtype_name, numpy_dtype
from weft.kernels.float4 import Float4
from weft.kernels.float8 import E4M3, Float8
from weft.kernels.quantized import Quantized
from weft.kernels.triton import matrix
from weft.kernels.triton.coded_matrix import CodedMatrix

# Bits, inputs that share a scale, the dtype of scales, and whether there are zero points.
INTEGERS = {
    "int4 by 32, zeros": (4, 32, "float16", True),
    "int4 by 32": (4, 32, "bfloat16", False),
    "int4 by 128, zeros": (4, 128, "float16", True),
    "int8 by 64": (8, 64, "bfloat16", False),
    "int8 by 32, zeros": (8, 32, "bfloat16", True),
    "int4 by row, zeros": (4, None, "float32", True),
    "int8 by row, zeros": (8, None, "float32", True),
}
KINDS = (*INTEGERS, "mxfp4", "e4m3 by 128", "e4m3 by 64", "e4m3 weights by 64")


def drawn(kind: str, outputs: int, inputs: int) -> Any:
    """Codes of a weight [outputs, inputs] as a checkpoint has them."""
    rng = np.random.default_rng(outputs + inputs)
    if kind == "mxfp4":
        codes = rng.integers(0, 16, (outputs, inputs), np.uint8)
        return Float4(codes, rng.integers(118, 126, (outputs, -(-inputs // 32)), np.uint8))
    if kind.startswith("e4m3"):
        group = int(kind.split()[-1])
        codes = rng.integers(0, 127, (outputs, inputs), np.uint8)
        codes |= rng.integers(0, 2, (outputs, inputs), np.uint8) << 7
        scales = rng.random((outputs, -(-inputs // group)), np.float32) * 1e-3 + 1e-4
        values = torch.from_numpy(codes).view(E4M3)
        how = "float" if "weights" in kind else "group"
        return Float8(values, torch.from_numpy(scales), how, group=group)
    bits, group, name, has_zeros = INTEGERS[kind]
    group = group or inputs
    values = rng.integers(0, 2**bits, (outputs, inputs), np.uint8)
    shape = (outputs, -(-inputs // group))
    scales = (rng.random(shape, np.float32) * 0.02 + 1e-3).astype(numpy_dtype(name))
    zeros = rng.integers(0, 2**bits, shape, np.uint8) if has_zeros else None
    return Quantized(values, scales, zeros, bits, group)


def drawn_weight(
    kind: str,
    shape: tuple[int, ...],
    tuning: Any,
    dtype: torch.dtype = torch.bfloat16,
    parameter: str = "down",
) -> tuple[CodedMatrix, Tensor]:
    """A matrix [N, K], or of experts [E, N, K], and the numbers that its codes stand for."""
    *experts, outputs, inputs = shape
    whole = drawn(kind, outputs * (experts or [1])[0], inputs)
    device = torch.empty(0).device  # where kernels run
    made = matrix.quantised(
        parameter,
        shape,
        dtype_name(dtype),
        whole.storage,
        device=device,
        tuning=tuning,
    )
    assert isinstance(made, CodedMatrix)
    for expert in range((experts or [1])[0]):
        one = made[expert] if experts else made
        for first, stop in ((0, 5), (5, outputs)):
            rows = slice(expert * outputs + first, expert * outputs + stop)
            one.write(first, whole.part(rows, slice(0, inputs)))
    return made, torch.as_tensor(whole.dequantize(), device=device).reshape(shape)
