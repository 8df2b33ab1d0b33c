"""KV cache tensors as kernels address them, and E4M3 numbers from and to their bits.

Codes in E4M3 are bytes to a kernel wherever the GPU has no such type, and in the interpreter. No
code stands for what is not a number: ``kv_storage`` gives such rows a scale that is none.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.kv_storage import SCALED

SMALLEST = tl.constexpr(2.0**-100)  # as in ``kv_storage``
# Four codes become four bfloat16, exactly. Of int8 the low seven bits are or-ed into 128, the sign
# into -128, of which it makes -256; their sum is the code.
_INT8_TO_BFLOAT16 = tl.constexpr("""
{
    .reg .b32 a, b, c, d, one;
    mov.b32 one, 0x3F803F80;
    prmt.b32 a, $2, 0, 0x4140;
    prmt.b32 b, $2, 0, 0x4342;
    lop3.b32 c, a, 0x00800080, 0xC300C300, 0xEA;
    lop3.b32 d, b, 0x00800080, 0xC300C300, 0xEA;
    lop3.b32 a, a, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 b, b, 0x007F007F, 0x43004300, 0xEA;
    fma.rn.bf16x2 $0, a, one, c;
    fma.rn.bf16x2 $1, b, one, d;
}
""")
# E4M3 goes by float16 and float32, since no instruction makes bfloat16 of float16.
_E4M3_TO_BFLOAT16 = tl.constexpr("""
{
    .reg .b16 a, b, c, d;
    .reg .b32 x, y;
    .reg .f32 p, q, r, s;
    mov.b32 {a, b}, $2;
    cvt.rn.f16x2.e4m3x2 x, a;
    cvt.rn.f16x2.e4m3x2 y, b;
    mov.b32 {a, b}, x;
    mov.b32 {c, d}, y;
    cvt.f32.f16 p, a;
    cvt.f32.f16 q, b;
    cvt.f32.f16 r, c;
    cvt.f32.f16 s, d;
    cvt.rn.bf16x2.f32 $0, q, p;
    cvt.rn.bf16x2.f32 $1, s, r;
}
""")


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


if triton.knobs.runtime.interpret:

    def factors(codes: Any, TYPE: Any, AS_LOADED: Any) -> Any:
        """Return what ``decode`` does; interpreted kernels have no layouts and no PTX."""
        del AS_LOADED
        return decode(codes, TYPE)

else:

    @triton.jit
    def factors(codes, TYPE: tl.constexpr, AS_LOADED: tl.constexpr):
        """Return what ``decode`` does, as factors of a product.

        Args:
            AS_LOADED: convert codes before they are laid out for the product, for one that sums
                over rows: they would be fetched byte by byte.
        """
        if codes.dtype == tl.int8 and TYPE == tl.bfloat16:  # noqa: SIM300
            return tl.inline_asm_elementwise(
                _INT8_TO_BFLOAT16, "=r,=r,r", [codes], tl.bfloat16, not AS_LOADED, 4
            )
        if codes.dtype == tl.float8e4nv and TYPE == tl.bfloat16:  # noqa: SIM300
            return tl.inline_asm_elementwise(
                _E4M3_TO_BFLOAT16, "=r,=r,r", [codes], tl.bfloat16, not AS_LOADED, 4
            )
        return decode(codes, TYPE)
