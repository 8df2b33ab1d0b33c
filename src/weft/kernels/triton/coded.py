"""Products with weights as codes with a scale for each group of inputs, in Triton.

A program multiplies the codes of a group, less their zero points, with the activations as they are:
both are exact in bfloat16. The sum over a group is scaled in float32 and added to those before it,
in ascending order; with few rows the inputs are split into parts as in ``gemm.py``. So the numbers
are those of ``Quantized``, ``Float4`` and ``Float8`` but for the rounding of float32 sums.

Block-scaled FP8 is the same product of FP8 with FP8: each group of a row of activations is rounded
with a scale of its own (DeepSeek-V3 2024, section 3.3), and a group's sum is scaled by both.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.float8 import E4M3
from weft.kernels.triton import pdl
from weft.kernels.triton.coded_matrix import TILE, CodedMatrix
from weft.kernels.triton.device import has_fp8
from weft.kernels.triton.fp8 import codes_dtype, from_bits, not_finite, row_scale, to_e4m3
from weft.kernels.triton.gemm import SplitProduct, add_parts, finish
from weft.kernels.triton.launch import interpreted, last_contiguous, power_of_2
from weft.kernels.triton.unpack import (
    E2M1_TO_BFLOAT16,
    HALVES_TO_BFLOAT16,
    QUARTERS_TO_BFLOAT16,
)

Operand: TypeAlias = tl.dtype

_ADD_BLOCK = 1024  # outputs that a program of ``add_parts`` takes
_PIECES = 8  # groups that a program of ``_round_groups`` and ``_gather_rows`` takes
_TL = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_TILE = tl.constexpr(TILE)


_QUARTERS, _HALVES = tl.constexpr(QUARTERS_TO_BFLOAT16), tl.constexpr(HALVES_TO_BFLOAT16)
_E2M1 = tl.constexpr(E2M1_TO_BFLOAT16)


@triton.jit
def decoded(codes, zero, CODE: tl.constexpr, PLACE: tl.constexpr, OPERAND: tl.constexpr):
    """Return the numbers of codes, of E2M1 2**-14 of them, as ``tl.dot`` takes them.

    A code or-ed into the last bits of 2**23 is a float32 without a conversion.

    Args:
        zero: zero points plus 2**23 in float32, of integers.
        PLACE: of four bits, which of a unit.
    """
    if CODE == "e4m3":
        number = codes
    elif CODE == "e4m3 bits":
        number = from_bits(codes)
    elif CODE == "e2m1":
        bits = (codes >> (4 * PLACE)).to(tl.int16)
        half = ((bits & 8) << 12) | ((bits & 7) << 9)
        number = half.to(tl.float16, bitcast=True)
    else:
        if CODE == "int4":
            codes = (codes >> (4 * PLACE)) & 15
        number = (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - zero
    return number.to(OPERAND)


@triton.jit
def zero_points(zero, at, inside, CODE: tl.constexpr, ZEROS: tl.constexpr):
    """Return zero points [N, 1] plus 2**23 in float32, as ``decoded`` takes them."""
    if ZEROS:
        point = tl.load(zero + at, mask=inside, other=0).to(tl.float32)
    else:
        point = tl.full(at.shape, 8.0 if CODE == "int4" else 128.0, tl.float32)
    return (point + 8388608.0)[:, None]


@triton.jit
def scales_at(scale, at, inside, CODE: tl.constexpr, OPERAND: tl.constexpr):
    """Return scales [N] in float32; of E2M1 they are exponents, the least of which is taken for 0.

    2**14 goes into those of what ``decoded`` returns.
    """
    if CODE == "e2m1":
        exponent = tl.load(scale + at, mask=inside, other=0).to(tl.int32)
        exponent += 0 if tl.bfloat16 == OPERAND else 14
        factor = (exponent << 23).to(tl.float32, bitcast=True)
    else:
        factor = tl.load(scale + at, mask=inside, other=0.0).to(tl.float32)
    return factor


@triton.jit
def _slice(x_at, k, m_in, first, K: tl.constexpr, EVEN: tl.constexpr, OPERAND: tl.constexpr):
    inside = m_in[None, :] if EVEN else (first + k < K)[:, None] & m_in[None, :]
    return tl.load(x_at, mask=inside, other=0.0).to(OPERAND)


@triton.jit
def activations(
    x_at,
    k,
    m_in,
    first,
    K: tl.constexpr,
    EVEN: tl.constexpr,
    OPERAND: tl.constexpr,
    INPUTS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Return the parts [k, m] of a group of inputs from ``first`` on; beyond the last input 0."""
    a = _slice(x_at, k, m_in, first, K, EVEN, OPERAND)
    b, c, d = a, a, a
    if PARTS > 1:
        b = _slice(x_at + INPUTS, k, m_in, first + INPUTS, K, EVEN, OPERAND)
    if PARTS > 2:
        c = _slice(x_at + 2 * INPUTS, k, m_in, first + 2 * INPUTS, K, EVEN, OPERAND)
        d = _slice(x_at + 3 * INPUTS, k, m_in, first + 3 * INPUTS, K, EVEN, OPERAND)
    return a, b, c, d


@triton.jit
def product(
    codes,
    zero,
    a,
    b,
    c,
    d,
    acc,
    CODE: tl.constexpr,
    PARTS: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add the products of one group to sums [N, M].

    Args:
        codes: [N, units of a group].
        a, b, c, d: the activations of the ``PARTS`` of a group.
    """
    if CODE == "int4" and tl.bfloat16 == OPERAND:
        point = (zero - 8388480.0).to(tl.bfloat16)  # 2**23 - 128
        if PARTS == 4:
            all4: tl.constexpr = (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16)
            w0, w1, w2, w3 = tl.inline_asm_elementwise(
                _QUARTERS, "=r,=r,=r,=r,r", [codes], dtype=all4, is_pure=True, pack=2
            )
            acc = tl.dot(w0 - point, a, acc, input_precision=PRECISION)
            acc = tl.dot(w1 - point, b, acc, input_precision=PRECISION)
            acc = tl.dot(w2 - point, c, acc, input_precision=PRECISION)
            acc = tl.dot(w3 - point, d, acc, input_precision=PRECISION)
        else:
            both: tl.constexpr = (tl.bfloat16, tl.bfloat16)
            w0, w1 = tl.inline_asm_elementwise(
                _HALVES, "=r,=r,=r,=r,r", [codes], dtype=both, is_pure=True, pack=4
            )
            acc = tl.dot(w0 - point, a, acc, input_precision=PRECISION)
            acc = tl.dot(w1 - point, b, acc, input_precision=PRECISION)
    elif CODE == "e2m1" and tl.bfloat16 == OPERAND:
        halves: tl.constexpr = (tl.bfloat16, tl.bfloat16)
        w0, w1 = tl.inline_asm_elementwise(
            _E2M1, "=r,=r,=r,=r,r", [codes], dtype=halves, is_pure=True, pack=4
        )
        acc = tl.dot(w0, a, acc, input_precision=PRECISION)
        acc = tl.dot(w1, b, acc, input_precision=PRECISION)
    else:
        acc = tl.dot(decoded(codes, zero, CODE, 0, OPERAND), a, acc, input_precision=PRECISION)
        if PARTS > 1:
            acc = tl.dot(decoded(codes, zero, CODE, 1, OPERAND), b, acc, input_precision=PRECISION)
        if PARTS > 2:
            acc = tl.dot(decoded(codes, zero, CODE, 2, OPERAND), c, acc, input_precision=PRECISION)
            acc = tl.dot(decoded(codes, zero, CODE, 3, OPERAND), d, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["M"])
def coded_gemm(
    x,  # [M, K]
    w,  # [tiles, PIECES, TILE, units of a piece]
    row_scales,  # [PIECES, M] float32, of rounded activations
    scale,  # [PIECES, N], or [1, N]
    zero,  # the same of uint8
    bias,  # [N]
    residual,  # [M, N]
    out,  # [M, N], or parts [SPLITS, M, N] float32
    M,
    x_stride,
    residual_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    CODE: tl.constexpr,
    PARTS: tl.constexpr,
    WHOLE: tl.constexpr,
    ZEROS: tl.constexpr,
    ROUNDED: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    FLAGS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """One block of outputs of one block of rows, summed over one part of the inputs.

    WHOLE: an output has one scale, which multiplies its whole sum.

    Grid: (blocks of rows * blocks of outputs, SPLITS), as ``gemm``'s.
    """
    row_blocks = tl.cdiv(M, BLOCK_M)
    block, part = tl.program_id(0), tl.program_id(1)
    m = (block % row_blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (block // row_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_in, n_in = m < M, n < N
    EACH: tl.constexpr = BLOCK_K // GROUP if BLOCK_K > GROUP else 1  # pieces of a step
    PIECES: tl.constexpr = (K + GROUP - 1) // GROUP
    STEPS: tl.constexpr = (PIECES + EACH * SPLITS - 1) // (EACH * SPLITS)
    EVEN: tl.constexpr = STEPS * EACH * SPLITS * GROUP == K
    INPUTS: tl.constexpr = GROUP // PARTS  # units of a piece of an output
    k = tl.arange(0, INPUTS)
    start = part * (STEPS * EACH)
    tile = (n // _TILE).to(tl.int64) * PIECES + start
    w_at = w + (tile * _TILE + n % _TILE)[:, None] * INPUTS + k[None, :]
    x_at = x + m.to(tl.int64)[None, :] * x_stride + (start * GROUP + k)[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if WHOLE:
        zeros = zero_points(zero, n, n_in, CODE, ZEROS)
    pdl.wait(PDL)
    pdl.launch_dependents(PDL)
    for step in range(STEPS):
        for number in tl.static_range(EACH):
            piece = start + step * EACH + number
            inside = n_in if EVEN else n_in & (piece < PIECES)
            first = piece * GROUP
            codes = tl.load(w_at + number * (_TILE * INPUTS), mask=inside[:, None], other=0.0)
            a, b, c, d = activations(
                x_at + number * GROUP, k, m_in, first, K, EVEN, OPERAND, INPUTS, PARTS
            )
            if WHOLE:
                acc = product(codes, zeros, a, b, c, d, acc, CODE, PARTS, OPERAND, PRECISION)
            else:
                points = zero_points(zero, piece * N + n, inside, CODE, ZEROS)
                sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                sums = product(codes, points, a, b, c, d, sums, CODE, PARTS, OPERAND, PRECISION)
                if ROUNDED:
                    rows_in = m_in if EVEN else m_in & (piece < PIECES)
                    sums *= tl.load(row_scales + piece * M + m, mask=rows_in, other=0.0)[None, :]
                acc += sums * scales_at(scale, piece * N + n, inside, CODE, OPERAND)[:, None]
        w_at += EACH * _TILE * INPUTS
        x_at += EACH * GROUP
    if WHOLE:
        acc *= scales_at(scale, n, n_in, CODE, OPERAND)[:, None]
    rows, columns = m.to(tl.int64)[None, :], n[:, None]
    here = n_in[:, None] & m_in[None, :]
    if SPLITS == 1:
        acc = finish(acc, out, out, bias, residual, rows, columns, here, residual_stride, FLAGS)
    place = (part.to(tl.int64) * M + rows) * N + columns
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=here)


@triton.jit
def _round_groups(
    x, codes, scales, stride, K: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    """Round some groups of a row to FP8. Grid: (rows, blocks of groups)."""
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = at < K
    v = tl.load(x + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    finite = tl.max(not_finite(v).to(tl.int32), 1) == 0
    scale, factor = row_scale(tl.max(tl.abs(v), 1), finite, scales, False)
    tl.store(scales + group * rows + row, scale, mask=group * GROUP < K)
    v = tl.where(finite[:, None], v * factor[:, None], 0.0)
    tl.store(codes + row * K + at, to_e4m3(v).to(codes.dtype.element_ty), mask=inside)


@triton.jit
def _gather_rows(
    ids,
    w,
    scale,
    zero,
    out,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    CODE: tl.constexpr,
    PARTS: tl.constexpr,
    WHOLE: tl.constexpr,
    ZEROS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The weights of one output and some pieces of its inputs. Grid: (ids, blocks of pieces)."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.load(ids + row)
    known = (n >= 0) & (n < N)
    n = tl.where(known, n, 0)
    PIECES: tl.constexpr = (K + GROUP - 1) // GROUP
    INPUTS: tl.constexpr = GROUP // PARTS
    piece = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    k = piece[:, None] * GROUP + tl.arange(0, INPUTS)[None, :]
    inside = (piece < PIECES) & known
    w_at = ((n // _TILE) * PIECES + piece) * _TILE + n % _TILE
    w_at = w + w_at[:, None] * INPUTS + tl.arange(0, INPUTS)[None, :]
    codes = tl.load(w_at, mask=inside[:, None], other=0.0)
    at = tl.zeros([BLOCK], tl.int64) + n if WHOLE else piece * N + n
    points = zero_points(zero, at, inside, CODE, ZEROS)
    factor = scales_at(scale, at, inside, CODE, tl.float32)[:, None]
    for place in tl.static_range(PARTS):
        numbers = decoded(codes, points, CODE, place, tl.float32) * factor
        here = (piece < PIECES)[:, None] & (k + place * INPUTS < K)
        to = out + row * K + k + place * INPUTS
        tl.store(to, numbers.to(out.dtype.element_ty), mask=here)


def operand_of(matrix: CodedMatrix, device: torch.device) -> tuple[Operand, str, Tensor]:
    """Return the type in which ``tl.dot`` multiplies, the code's name, and codes as a kernel's.

    The interpreter multiplies in float32: its products of bfloat16 are those of the bit patterns.
    """
    code, codes, fp8 = matrix.form.code, matrix.codes, matrix.form.code == "e4m3"
    there = interpreted() or has_fp8(device)
    if fp8 and there:
        codes = codes.view(E4M3)
    elif fp8:
        code = "e4m3 bits"
    elif matrix.form.parts == 4:
        codes = codes.view(torch.int16)
    if interpreted():
        return tl.float32, code, codes
    if matrix.form.rounds:
        return (tl.float8e4nv if there else tl.bfloat16), code, codes
    return _TL[matrix.dtype], code, codes


def round_groups(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Round x [T, K] to FP8: codes [T, K] and scales [K / group, T] of ``float8.round_groups``."""
    rows, inputs = x.shape
    pieces = triton.cdiv(inputs, group)
    codes = torch.empty((rows, inputs), dtype=codes_dtype(x.device), device=x.device)
    scales = torch.empty((pieces, rows), dtype=torch.float32, device=x.device)
    x = last_contiguous(x)
    block = min(_PIECES, power_of_2(pieces))
    _round_groups[(rows, triton.cdiv(pieces, block))](
        x, codes, scales, x.stride(0), K=inputs, GROUP=group, BLOCK=block, num_warps=4
    )
    return codes, scales


def linear(
    x: Tensor,
    matrix: CodedMatrix,
    bias: Tensor | None,
    residual: Tensor | None,
    dtype: torch.dtype,
    *,
    whole: bool = True,
) -> Tensor | SplitProduct:
    """Return x [M, K] times the matrix [N, K], plus bias [N] and residual [M, N] -> [M, N].

    Args:
        whole: as of ``matrix.small_product``; if not, there is no residual.

    Raises:
        ValueError: shapes or dtypes do not fit.
        KernelUnavailable: the tuning has no launch for the shape.
    """
    if x.dim() != 2 or x.shape[1] != matrix.shape[-1] or x.dtype != matrix.dtype:
        raise ValueError(
            f"x {list(x.shape)} of {x.dtype} does not fit a matrix {list(matrix.shape)} of "
            f"{matrix.dtype}"
        )
    count, (outputs, inputs) = len(x), matrix.shape
    out = torch.empty((count, outputs), dtype=dtype, device=x.device)
    if count == 0:
        return out
    form, launch = matrix.form, matrix.launch(count)
    rows, row_scales = round_groups(x, form.inputs) if form.rounds else (last_contiguous(x), out)
    operand, code, codes = operand_of(matrix, x.device)
    splits = launch["SPLITS"]
    target = out
    if splits > 1:
        target = torch.empty((splits, count, outputs), dtype=torch.float32, device=x.device)
    flags = (4 if bias is not None else 0) | (8 if residual is not None else 0)
    extras = [out if part is None else part for part in (bias, residual)]
    grid = (triton.cdiv(count, launch["BLOCK_M"]) * triton.cdiv(outputs, launch["BLOCK_N"]), splits)
    coded_gemm[grid](
        rows,
        codes,
        row_scales,
        matrix.scales,
        matrix.scales if matrix.zeros is None else matrix.zeros,
        *extras,
        target,
        count,
        rows.stride(0),
        extras[1].stride(0),
        N=outputs,
        K=inputs,
        GROUP=form.inputs,
        CODE=code,
        PARTS=form.parts,
        WHOLE=form.group is None,
        ZEROS=matrix.zeros is not None,
        ROUNDED=form.rounds,
        OPERAND=operand,
        PRECISION="ieee" if matrix.dtype == torch.float32 else "tf32",
        FLAGS=flags,
        **({} if whole else pdl.options(x.device)),
        **launch,
    )
    if splits > 1 and not whole:
        assert residual is None
        return SplitProduct(target, None, None, bias, dtype)
    if splits > 1:
        add_parts[count, triton.cdiv(outputs, _ADD_BLOCK)](
            target,
            out,
            out,
            *extras,
            out,
            count,
            extras[1].stride(0),
            N=outputs,
            BLOCK=min(_ADD_BLOCK, power_of_2(outputs)),
            SPLITS=splits,
            FLAGS=flags,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out


def gather(matrix: CodedMatrix, outputs: Tensor) -> Tensor:
    """Return the weights [T, K] of some outputs [T]; of one that there is not, zeros."""
    _, inputs = matrix.shape
    out = torch.empty((len(outputs), inputs), dtype=matrix.dtype, device=outputs.device)
    if len(outputs) == 0:
        return out
    form = matrix.form
    _, code, codes = operand_of(matrix, outputs.device)
    pieces = form.pieces(inputs)
    block = min(_PIECES, power_of_2(pieces))
    _gather_rows[(len(outputs), triton.cdiv(pieces, block))](
        outputs,
        codes,
        matrix.scales,
        matrix.scales if matrix.zeros is None else matrix.zeros,
        out,
        N=matrix.shape[0],
        K=inputs,
        GROUP=form.inputs,
        CODE=code,
        PARTS=form.parts,
        WHOLE=form.group is None,
        ZEROS=matrix.zeros is not None,
        BLOCK=block,
        num_warps=1,
    )
    return out
