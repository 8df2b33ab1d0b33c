"""KV cache tensors as kernels address them, and E4M3 numbers from and to their bits.

Codes in E4M3 are bytes to a kernel wherever the GPU has no such type, and in the interpreter. No
code stands for what is not a number: ``kv_storage`` gives such rows a scale that is none.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.kv_storage import SCALED

SMALLEST = tl.constexpr(2.0**-100)  # as in ``kv_storage``


def is_scaled(cache: Tensor) -> bool:
    """Whether a cache holds codes of 8 bits and their scales."""
    return cache.dtype in SCALED


def as_bytes(cache: Tensor) -> Tensor:
    """Return the cache with E4M3 codes as bytes."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


def scales_of(cache: Tensor) -> Tensor | None:
    """Return the memory of a cache as float32, in which its scales are; None if it has none."""
    return cache.view(torch.float32) if is_scaled(cache) else None


@triton.jit
def encode_e4m3(x):
    """Return the E4M3 codes of float32 numbers of at most 448, to the nearest, ties to even."""
    bits = x.to(tl.uint32, bitcast=True)
    sign, size = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
    # 2^-6 and more: 20 bits of the mantissa go, the exponent's bias falls from 127 to 7.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Less: multiples of 2^-9, which is what the last bit of float32 is worth from 2^14 on.
    tiny = (tl.abs(x) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    return (sign | tl.where(size < 0x3C800000, tiny, normal)).to(tl.uint8)


@triton.jit
def decode(codes, TYPE: tl.constexpr):
    """Return numbers of a cache in a type of float that holds each of them; bytes are E4M3."""
    if codes.dtype == tl.uint8:
        bits = codes.to(tl.uint16)
        # The same bits as a float16 are 2^-8 of the number, also those without a leading 1.
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        codes = half.to(tl.float16, bitcast=True) * 256.0
    return codes.to(TYPE)
