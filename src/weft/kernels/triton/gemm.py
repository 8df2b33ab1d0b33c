"""Products of a few rows with a weight in Triton, split along the inputs in a fixed order.

Weights are the left operand, tokens the right one: the tensor cores of Hopper want at least 64 rows
on the left, and a decode step has fewer tokens than that. Sums are float32. A call splits the
inputs into SPLITS parts, each summed in ascending order by one program. Who reads the product adds
the parts in ascending order, or a kernel that does nothing else: the same bits every time, without
atomics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.triton import pdl
from weft.kernels.triton.fp8 import from_bits, not_finite, row_scale, to_e4m3

# How rows of a product come that are rounded in groups of BLOCK_K inputs.
GIVEN = 1  # rounded, with a scale for each group
MADE = 2  # as floats, which the product rounds
_GIVEN = tl.constexpr(GIVEN)


@triton.jit
def operand(values, OPERAND: tl.constexpr, BITS: tl.constexpr):
    """Turn loaded numbers into what ``tl.dot`` takes; BITS: they are the bits of E4M3."""
    if BITS:
        return from_bits(values).to(OPERAND)
    return values.to(OPERAND)


@triton.jit
def rounded(rows, static, STATIC: tl.constexpr, OPERAND: tl.constexpr):
    """Round floats [K, M] to E4M3 for ``tl.dot``, with one scale [M]; see ``fp8.row_scale``."""
    v = rows.to(tl.float32)
    finite = tl.max(not_finite(v).to(tl.int32), 0) == 0
    scale, factor = row_scale(tl.max(tl.abs(v), 0), finite, static, STATIC)
    v = tl.where(finite[None, :], v * (tl.zeros_like(scale) + factor)[None, :], 0.0)
    if tl.float8e4nv == OPERAND and not STATIC:
        codes = v.to(tl.float8e4nv)  # the hardware rounds alike, and nothing is too large
    else:
        codes = to_e4m3(v).to(OPERAND)
    return codes, scale


@triton.jit
def finish(
    acc, row_scale, scale, bias, residual, rows, columns, inside, stride, FLAGS: tl.constexpr
):
    """Return scales times sums, plus bias and residual, in float32.

    Args:
        acc: sums of any shape to which ``rows`` and ``columns`` broadcast.
        FLAGS: 1: a scale for each row, 2: one for each output, 4: bias, 8: residual.
    """
    if FLAGS & 1:
        acc *= tl.load(row_scale + rows, mask=inside, other=0.0)
    if FLAGS & 2:
        acc *= tl.load(scale + columns, mask=inside, other=0.0)
    if FLAGS & 4:
        acc += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    if FLAGS & 8:
        acc += tl.load(residual + rows * stride + columns, mask=inside, other=0.0).to(tl.float32)
    return acc


@triton.jit(do_not_specialize=["M"])
def gemm(
    x,  # [M, K]
    w,  # [N, K]
    factors,  # [M] float32, or [M, groups] if GIVEN; a static scale [] if MADE
    scale,  # [N] float32
    bias,  # [N]
    residual,  # [M, N]
    out,  # [M, N], or parts [SPLITS, M, N] float32
    M,
    x_stride,
    residual_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    OPERAND: tl.constexpr,
    BITS: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
    FLAGS: tl.constexpr,
    GROUPS: tl.constexpr = 0,
    STATIC: tl.constexpr = False,
    PDL: tl.constexpr = False,
):
    """One block of outputs of one block of rows, summed over one part of the inputs.

    GROUPS: rows are rounded in groups of BLOCK_K: ``GIVEN`` or ``MADE``.

    EXACT: with FP8, inputs after which sums go on in float32 proper: the tensor cores of Hopper add
    FP8 products with 14 bits of mantissa (DeepSeek-V3 2024, section 3.3.2). None: not FP8.

    Grid: (blocks of rows * blocks of outputs, SPLITS); the blocks of rows that share a block of
    weights are neighbours, so that it is read from memory once.
    """
    row_blocks = tl.cdiv(M, BLOCK_M)
    block, part = tl.program_id(0), tl.program_id(1)
    m = (block % row_blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (block // row_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_in, n_in = m < M, n < N
    STEPS: tl.constexpr = (K + BLOCK_K * SPLITS - 1) // (BLOCK_K * SPLITS)
    EVEN: tl.constexpr = K % (BLOCK_K * SPLITS) == 0
    first = part * (STEPS * BLOCK_K)
    k = first + tl.arange(0, BLOCK_K)
    w_at = w + n.to(tl.int64)[:, None] * K + k[None, :]
    x_at = x + m.to(tl.int64)[None, :] * x_stride + k[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    pdl.wait(PDL)
    pdl.launch_dependents(PDL)
    for step in range(STEPS):
        if EVEN:
            weights = tl.load(w_at, mask=n_in[:, None], other=0.0)
            rows = tl.load(x_at, mask=m_in[None, :], other=0.0)
        else:
            k_in = k + step * BLOCK_K < K
            weights = tl.load(w_at, mask=n_in[:, None] & k_in[None, :], other=0.0)
            rows = tl.load(x_at, mask=m_in[None, :] & k_in[:, None], other=0.0)
        weights = operand(weights, OPERAND, BITS)
        if GROUPS == 0:
            acc = tl.dot(
                weights,
                rows.to(OPERAND),
                acc,
                input_precision=PRECISION,
                max_num_imprecise_acc=EXACT,
            )
        else:
            if GROUPS == _GIVEN:
                codes = rows.to(OPERAND)
                group = part * STEPS + step
                own = factors + m.to(tl.int64) * ((K + BLOCK_K - 1) // BLOCK_K) + group
                factor = tl.load(own, mask=m_in & (group * BLOCK_K < K), other=0.0)
            else:
                codes, factor = rounded(rows, factors, STATIC, OPERAND)
            acc += tl.dot(weights, codes, input_precision=PRECISION) * factor[None, :]
        w_at += BLOCK_K
        x_at += BLOCK_K
    rows, columns = m.to(tl.int64)[None, :], n[:, None]
    inside = n_in[:, None] & m_in[None, :]
    if SPLITS == 1:
        acc = finish(
            acc, factors, scale, bias, residual, rows, columns, inside, residual_stride, FLAGS
        )
    place = (part.to(tl.int64) * M + rows) * N + columns
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def summed(
    parts, row_scale, scale, bias, count, row, column, inside,
    N: tl.constexpr, SPLITS: tl.constexpr, FLAGS: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Add the parts [SPLITS, count, N] of a product and finish: what it would have stored as TYPE.

    Kernels that call this, and ``add_parts``, are launched with ``enable_fp_fusion=False``: what is
    fused depends on what follows, and bits must not depend on who adds the parts.

    Args:
        row, column: int64 and any integers, of the shape of the mask ``inside``.
    """
    acc = tl.zeros(inside.shape, tl.float32)
    for part in tl.static_range(SPLITS):
        acc += tl.load(parts + (part * count + row) * N + column, mask=inside, other=0.0)
    acc = finish(acc, row_scale, scale, bias, None, row, column, inside, 0, FLAGS)
    return acc.to(TYPE).to(tl.float32)


@triton.jit(do_not_specialize=["M"])
def add_parts(
    parts,  # [SPLITS, M, N] float32
    row_scale,
    scale,
    bias,
    residual,
    out,  # [M, N]
    M,
    residual_stride,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    FLAGS: tl.constexpr,
):
    """Add the parts of ``gemm`` in ascending order and finish. Grid: (M, blocks of outputs)."""
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64) + tl.zeros([BLOCK], tl.int64)
    inside = n < N
    acc = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(SPLITS):
        acc += tl.load(parts + (part * M + row) * N + n, mask=inside, other=0.0)
    acc = finish(acc, row_scale, scale, bias, residual, row, n, inside, residual_stride, FLAGS)
    tl.store(out + row * N + n, acc.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class SplitProduct:
    """A product whose inputs were split, for a kernel that reads it by ``summed``.

    Attributes:
        sums: [SPLITS, M, N] float32, of parts of the inputs.
        row_scale: [M] float32; None if rows were not rounded.
        scale: [N] float32; None for weights in floats.
        bias: [N], or None.
        dtype: of the product.
    """

    sums: Tensor
    row_scale: Tensor | None
    scale: Tensor | None
    bias: Tensor | None
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """That of the product."""
        return self.sums.shape[1:]

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.sums.device


def as_read(x: Tensor | SplitProduct) -> tuple[Tensor, tuple[Any, ...], dict[str, int]]:
    """Return what a kernel takes to read a product: its numbers or parts, factors, constants."""
    if isinstance(x, Tensor):
        return x, (None, None, None), {"SPLITS": 1, "FLAGS": 0}
    factors = x.row_scale, x.scale, x.bias
    flags = sum(1 << place for place, part in enumerate(factors) if part is not None)
    return x.sums, factors, {"SPLITS": len(x.sums), "FLAGS": flags}
