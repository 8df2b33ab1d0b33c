"""Grouped products of mixtures of experts with codes that have a scale for each group of inputs.

``moe.py``'s product over the arithmetic of ``coded.py``: see both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.triton.coded import (
    activations,
    operand_of,
    product,
    round_groups,
    scales_at,
    zero_points,
)
from weft.kernels.triton.coded_matrix import TILE, CodedMatrix
from weft.kernels.triton.expert_pairs import activating, biased, read_pairs, write_pairs
from weft.kernels.triton.launch import last_contiguous
from weft.kernels.tuning import Launch

_TILE = tl.constexpr(TILE)


@triton.jit
def _at(w, n, k, PIECES: tl.constexpr, INPUTS: tl.constexpr):
    """Return where the codes [N, k] of the first piece of some outputs of an expert lie."""
    tile = (n // _TILE).to(tl.int64) * PIECES
    return w + (tile * _TILE + n % _TILE)[:, None] * INPUTS + k[None, :]


@triton.jit(do_not_specialize=["count", "rows"])
def grouped_codes(
    x,  # [T, K] if FIRST, else [P, K] in sorted places
    w,  # of each expert [tiles, PIECES, TILE, units]; with gates of 2 N outputs, those first
    row_scales,  # [PIECES, rows of x] float32, of rounded activations
    scale,  # [E, PIECES or 1, N or 2 N]
    zero,  # the same of uint8
    bias,  # [E, N or 2 N]
    share,  # [P] float32
    order,
    starts,
    experts,
    firsts,
    out,  # [P, N]: in sorted places if FIRST, else float32 by pair, times the pair's share
    count,
    rows,
    x_stride,
    TOP_K: tl.constexpr,
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
    BIASED: tl.constexpr,
    FIRST: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One block of outputs of one block of pairs. Grid: (blocks of pairs * blocks of outputs,)."""
    block, outputs = tl.program_id(0) % count, tl.program_id(0) // count
    expert = tl.load(experts + block)
    if expert < 0:
        return
    place, m_in, pair, row = read_pairs(order, starts, firsts, block, expert, TOP_K, BLOCK_M, FIRST)
    n = outputs * BLOCK_N + tl.arange(0, BLOCK_N)
    n_in = n < N
    ALL: tl.constexpr = 2 * N if GATED else N
    EACH: tl.constexpr = BLOCK_K // GROUP if BLOCK_K > GROUP else 1
    PIECES: tl.constexpr = (K + GROUP - 1) // GROUP
    STEPS: tl.constexpr = (PIECES + EACH - 1) // EACH
    EVEN: tl.constexpr = STEPS * EACH * GROUP == K
    INPUTS: tl.constexpr = GROUP // PARTS
    SCALES: tl.constexpr = 1 if WHOLE else PIECES
    TILES: tl.constexpr = (ALL + _TILE - 1) // _TILE
    k = tl.arange(0, INPUTS)
    wide = expert.to(tl.int64)
    w += wide * (TILES * PIECES * _TILE * INPUTS)
    scale += wide * (SCALES * ALL)
    zero += wide * (SCALES * ALL)
    w_at = _at(w, n, k, PIECES, INPUTS)
    up_at = _at(w, n + N if GATED else n, k, PIECES, INPUTS)
    x_at = x + row[None, :] * x_stride + k[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in range(STEPS):
        for number in tl.static_range(EACH):
            piece = step * EACH + number
            inside = n_in if EVEN else n_in & (piece < PIECES)
            first = piece * GROUP
            a, b, c, d = activations(
                x_at + number * GROUP, k, m_in, first, K, EVEN, OPERAND, INPUTS, PARTS
            )
            factor = tl.full([BLOCK_M], 1.0, tl.float32)
            if ROUNDED:
                rows_in = m_in if EVEN else m_in & (piece < PIECES)
                factor = tl.load(row_scales + piece * rows + row, mask=rows_in, other=0.0)
            for half in tl.static_range(2 if GATED else 1):
                codes_at = (up_at if half == 1 else w_at) + number * (_TILE * INPUTS)
                codes = tl.load(codes_at, mask=inside[:, None], other=0.0)
                at = n + half * N if WHOLE else piece * ALL + n + half * N
                points = zero_points(zero, at, inside, CODE, ZEROS)
                sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                sums = product(codes, points, a, b, c, d, sums, CODE, PARTS, OPERAND, PRECISION)
                sums *= scales_at(scale, at, inside, CODE, OPERAND)[:, None] * factor[None, :]
                if half == 1:
                    up += sums
                else:
                    acc += sums
        w_at += EACH * _TILE * INPUTS
        up_at += EACH * _TILE * INPUTS
        x_at += EACH * GROUP
    if BIASED:
        acc, up = biased(acc, up, bias, expert, n, n_in, N, GATED)
    write_pairs(out, share, acc, up, place, pair, m_in, n, n_in, N, FIRST, GATED, ACTIVATION)


def multiply(
    x: Tensor,
    matrix: CodedMatrix,
    launch: Launch,
    groups: tuple[Tensor, Tensor, Tensor, Tensor],
    shares: Tensor,
    out: Tensor,
    top_k: int,
    activation: str | None,
    bias: Tensor | None,
) -> None:
    """Multiply pairs with their experts: activated, from tokens; or weighted, from sorted places.

    Args:
        groups: the four parts of ``moe.Groups``.
        activation: that of the gates; None: the product is weighted.
        bias: [E, outputs of the matrix], contiguous.
    """
    form = matrix.form
    rows, row_scales = round_groups(x, form.inputs) if form.rounds else (last_contiguous(x), shares)
    operand, code, codes = operand_of(matrix, x.device)
    blocks, outputs = len(groups[2]), out.shape[1]
    grouped_codes[(blocks * triton.cdiv(outputs, launch["BLOCK_N"]),)](
        rows,
        codes,
        row_scales,
        matrix.scales,
        matrix.scales if matrix.zeros is None else matrix.zeros,
        matrix.scales if bias is None else bias,
        shares,
        *groups,
        out,
        blocks,
        len(rows),
        rows.stride(0),
        TOP_K=top_k,
        N=outputs,
        K=matrix.shape[2],
        GROUP=form.inputs,
        CODE=code,
        PARTS=form.parts,
        WHOLE=form.group is None,
        ZEROS=matrix.zeros is not None,
        ROUNDED=form.rounds,
        OPERAND=operand,
        PRECISION="ieee" if matrix.dtype == torch.float32 else "tf32",
        BIASED=bias is not None,
        **activating(activation),
        **launch,
    )
