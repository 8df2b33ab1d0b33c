"""FP8 E4M3 in Triton: rounds numbers and activations, and decodes bits where hardware cannot.

``float8.round_rows`` is the reference of ``round_rows``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.float8 import E4M3, LARGEST, SMALLEST, Rounded
from weft.kernels.triton.device import has_fp8
from weft.kernels.triton.launch import interpreted

_MOST = tl.constexpr(LARGEST)
_LEAST = tl.constexpr(SMALLEST)
_BLOCK = 8192  # inputs that one pass of a program holds


@triton.jit
def to_e4m3(x):
    """Round float32 numbers to the nearest of E4M3, ties to even, larger ones to 448; in float32.

    Adding and taking away 1.5 * 2**20 times the power of two below a number rounds it to 3 bits of
    mantissa. So a conversion that follows is exact, whatever its own rounding (the interpreter's
    cuts off), and devices without E4M3 get the same numbers.
    """
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    power = tl.where(power < 0.015625, 0.015625, power) * 1572864.0  # 2**-6: the least exponent
    x = (x + power) - power
    return tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))


@triton.jit
def not_finite(x):
    """Whether numbers are infinite or NaN.

    That y - y is not 0 does not tell: of a product y the compiler makes one fused operation, which
    gives its rounding error.
    """
    return (tl.abs(x) < float("inf")) == 0


@triton.jit
def from_bits(bits):
    """Return the float32 values of E4M3 bits (uint8); NaN becomes 480.

    Shifted into the places of float16, a number is 2**-8 of itself, subnormals included.
    """
    bits = bits.to(tl.int16)
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def row_scale(most, finite, static, STATIC: tl.constexpr):
    """Scale and factor of rows whose largest numbers are ``most``; see ``float8.round_rows``."""
    if STATIC:
        scale = tl.load(static)
        factor = 1.0 / scale
    else:
        usable = finite & (most >= _LEAST)
        scale = tl.where(usable, most / _MOST, 0.0)
        factor = tl.where(usable, _MOST / tl.where(usable, most, 1.0), 0.0)
    return tl.where(finite, scale, float("nan")), factor


@triton.jit
def _round_rows(
    x, static, codes, scales, stride, K: tl.constexpr, BLOCK: tl.constexpr, STATIC: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    wrong = tl.zeros([BLOCK], tl.int32)
    for start in tl.static_range(0, K, BLOCK):
        inside = start + at < K
        v = tl.load(x + row * stride + start + at, mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(v))
        wrong |= not_finite(v).to(tl.int32)
    most = tl.max(largest, 0)
    finite = tl.max(wrong, 0) == 0
    scale, factor = row_scale(most, finite, static, STATIC)
    tl.store(scales + row, scale)
    for start in tl.static_range(0, K, BLOCK):
        inside = start + at < K
        v = tl.load(x + row * stride + start + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.where(finite, v * factor, 0.0)
        tl.store(codes + row * K + start + at, to_e4m3(v).to(codes.dtype.element_ty), mask=inside)


def codes_dtype(device: torch.device) -> torch.dtype:
    """Return in which dtype a device gets activations that are rounded to E4M3."""
    return E4M3 if interpreted() or has_fp8(device) else torch.bfloat16


def round_rows(x: Tensor, scale: Tensor | None = None) -> Rounded:
    """Round x [T, K] to FP8; see ``float8.round_rows``."""
    rows, inputs = x.shape
    codes = torch.empty((rows, inputs), dtype=codes_dtype(x.device), device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        block = min(_BLOCK, triton.next_power_of_2(inputs))
        _round_rows[(rows,)](
            x if x.stride(1) == 1 else x.contiguous(),
            scales if scale is None else scale,
            codes,
            scales,
            x.stride(0) if x.stride(1) == 1 else inputs,
            K=inputs,
            BLOCK=block,
            STATIC=scale is not None,
            num_warps=4 if block <= 4096 else 8,
        )
    return Rounded(codes, scales)
