"""Gate and up projections in one product, whose epilogue activates, and rounds for the next one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.float8 import Rounded
from weft.kernels.triton import pdl
from weft.kernels.triton.activation import gated, place_of
from weft.kernels.triton.fp8 import codes_dtype, not_finite, row_scale, to_e4m3
from weft.kernels.triton.gemm import finish, operand
from weft.kernels.triton.matrix import TritonMatrix, arithmetic, rows_for, weight_of
from weft.kernels.tuning import GATED

GROUP = 64  # numbers of a row that share a scale: what programs of most launches compute of it


@triton.jit(do_not_specialize=["M"])
def gated_gemm(
    x,  # [M, K]
    w,  # [2 N, K], gates first
    factors,  # [M] float32
    scale,  # [2 N] float32
    bias,  # [2 N]
    static,  # [] float32
    out,  # [M, N]
    scales,  # [M, N / ROUND rounded up] float32
    M,
    x_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OPERAND: tl.constexpr,
    BITS: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
    FLAGS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROUND: tl.constexpr,
    STATIC: tl.constexpr,
    PDL: tl.constexpr,
):
    """One block of activated gates times values, of one block of rows; see ``gemm.gemm``.

    ROUND: numbers that are rounded to E4M3 with one scale; 0 if they are not.

    Grid: (blocks of rows * blocks of outputs,), as of ``gemm``.
    """
    row_blocks = tl.cdiv(M, BLOCK_M)
    m = (tl.program_id(0) % row_blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = (tl.program_id(0) // row_blocks) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    m_in, n_in = m < M, n < N
    k = tl.arange(0, BLOCK_K)
    w_at = w + n.to(tl.int64)[:, None] * K + k[None, :]
    x_at = x + m.to(tl.int64)[None, :] * x_stride + k[:, None]
    gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    pdl.wait(PDL)
    pdl.launch_dependents(PDL)
    for step in range((K + BLOCK_K - 1) // BLOCK_K):
        if K % BLOCK_K == 0:
            inside, row_inside = n_in[:, None], m_in[None, :]
        else:
            k_in = k + step * BLOCK_K < K
            inside, row_inside = n_in[:, None] & k_in[None, :], m_in[None, :] & k_in[:, None]
        rows = tl.load(x_at, mask=row_inside, other=0.0).to(OPERAND)
        weights = operand(tl.load(w_at, mask=inside, other=0.0), OPERAND, BITS)
        gate = tl.dot(weights, rows, gate, input_precision=PRECISION, max_num_imprecise_acc=EXACT)
        weights = operand(tl.load(w_at + N * K, mask=inside, other=0.0), OPERAND, BITS)
        up = tl.dot(weights, rows, up, input_precision=PRECISION, max_num_imprecise_acc=EXACT)
        w_at += BLOCK_K
        x_at += BLOCK_K
    row, column = m.to(tl.int64)[None, :], n[:, None]
    inside = n_in[:, None] & m_in[None, :]
    gate = finish(gate, factors, scale, bias, None, row, column, inside, 0, FLAGS)
    up = finish(up, factors, scale, bias, None, row, column + N, inside, 0, FLAGS)
    y = gated(gate, up, ACTIVATION)
    if ROUND:
        GROUPS: tl.constexpr = BLOCK_N // ROUND
        y = tl.reshape(tl.where(inside, y, 0.0), [GROUPS, ROUND, BLOCK_M])
        finite = tl.max(not_finite(y).to(tl.int32), 1) == 0  # [GROUPS, BLOCK_M]
        own, factor = row_scale(tl.max(tl.abs(y), 1), finite, static, STATIC)
        factor = (tl.zeros_like(own) + factor)[:, None, :]
        y = to_e4m3(tl.where(finite[:, None, :], y * factor, 0.0))
        y = tl.reshape(y, [BLOCK_N, BLOCK_M])
        group = first // ROUND + tl.arange(0, GROUPS)[:, None]
        to = scales + row * ((N + ROUND - 1) // ROUND) + group
        tl.store(to, own, mask=(group * ROUND < N) & m_in[None, :])
    tl.store(out + row * N + column, y.to(out.dtype.element_ty), mask=inside)


def gated_product(
    x: Tensor | Rounded,
    matrix: TritonMatrix,
    bias: Tensor | None,
    activation: str,
    inputs: str | Tensor = "float",
) -> Tensor | Rounded:
    """Return activation(gate) * up of x [M, K] times the matrix [2 N, K], gates first -> [M, N].

    Neither is rounded before they are multiplied.

    Args:
        x: of the matrix's dtype, or rounded already if the matrix rounds its inputs.
        bias: [2 N].
        inputs: of the matrix that multiplies the result, see ``float8.Float8``. What it rounds is
            rounded in groups: its scales are [M, N / group rounded up], see
            ``float8.round_groups``.

    Raises:
        ValueError: shapes or dtypes do not fit, or the activation is not known.
        KernelUnavailable: the tuning has no launch for the shape.
    """
    outputs, width = matrix.shape
    kind = place_of(activation)
    if outputs % 2:
        raise ValueError(f"{outputs} outputs are no pairs of gates and values")
    rows, factors = rows_for(x, matrix)
    count, size = len(rows), outputs // 2
    launch = matrix.launch(count, GATED)
    group = 0 if isinstance(inputs, str) and inputs == "float" else min(GROUP, launch["BLOCK_N"])
    dtype = codes_dtype(rows.device) if group else matrix.dtype
    out = torch.empty((count, size), dtype=dtype, device=rows.device)
    scales = None
    if group:
        shape = count, triton.cdiv(size, group)
        scales = torch.empty(shape, dtype=torch.float32, device=rows.device)
    options = arithmetic(matrix, launch, rows.device)
    parts = (factors, matrix.scales, bias)
    if count:
        blocks = triton.cdiv(count, launch["BLOCK_M"]) * triton.cdiv(size, launch["BLOCK_N"])
        gated_gemm[(blocks,)](
            rows,
            weight_of(matrix, options["BITS"]),
            *parts,
            inputs if isinstance(inputs, Tensor) else None,
            out,
            scales,
            count,
            rows.stride(0),
            N=size,
            K=width,
            FLAGS=sum(1 << place for place, part in enumerate(parts) if part is not None),
            ACTIVATION=kind,
            ROUND=group,
            STATIC=isinstance(inputs, Tensor),
            **options,
            **pdl.options(rows.device),
            **launch,
        )
    return out if scales is None else Rounded(out, scales, group)
