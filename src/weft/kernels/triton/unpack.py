"""PTX that unpacks codes of four bits to bfloat16, for ``inline_asm_elementwise``."""

from __future__ import annotations

# Codes become 128 more than each in bfloat16: or-ed into the last bits of 128. Two units of 16 bits
# have four pairs, one of each quarter of a group; of four bytes each is put into 16 bits first, and
# the results are two pairs of the low bits, then two of the high ones.
QUARTERS_TO_BFLOAT16 = """
{
    .reg .b32 a, b, c;
    shr.u32 a, $4, 4;
    shr.u32 b, $4, 8;
    shr.u32 c, $4, 12;
    lop3.b32 $0, $4, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 $1, a, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 $2, b, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 $3, c, 0x000F000F, 0x43004300, 0xEA;
}
"""
HALVES_TO_BFLOAT16 = """
{
    .reg .b32 a, b, c, d;
    prmt.b32 a, $4, 0, 0x4140;
    prmt.b32 b, $4, 0, 0x4342;
    shr.u32 c, a, 4;
    shr.u32 d, b, 4;
    lop3.b32 $0, a, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 $1, b, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 $2, c, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 $3, d, 0x000F000F, 0x43004300, 0xEA;
}
"""
# Four bytes of pairs of E2M1 codes become bfloat16: both bytes of a number are looked up by three
# bits of its code, then its sign is or-ed in.
E2M1_TO_BFLOAT16 = """
{
    .reg .b32 s, t, p, q, u, v, a, b, c, d;
    and.b32 s, $4, 0x7777;
    shr.u32 t, $4, 16;
    and.b32 t, t, 0x7777;
    prmt.b32 p, $4, 0, 0x1404;
    prmt.b32 q, $4, 0, 0x3424;
    shl.b32 u, p, 4;
    shl.b32 v, q, 4;
    prmt.b32 a, 0xC0800000, 0xC0804000, s;
    prmt.b32 b, 0x3F3F3F00, 0x40404040, s;
    prmt.b32 c, 0xC0800000, 0xC0804000, t;
    prmt.b32 d, 0x3F3F3F00, 0x40404040, t;
    prmt.b32 s, a, b, 0x6240;
    prmt.b32 t, c, d, 0x6240;
    prmt.b32 a, a, b, 0x7351;
    prmt.b32 c, c, d, 0x7351;
    lop3.b32 $0, u, 0x80008000, s, 0xEA;
    lop3.b32 $1, v, 0x80008000, t, 0xEA;
    lop3.b32 $2, p, 0x80008000, a, 0xEA;
    lop3.b32 $3, q, 0x80008000, c, 0xEA;
}
"""
