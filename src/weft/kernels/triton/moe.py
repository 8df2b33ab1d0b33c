"""Mixtures of experts in Triton: pairs of token and expert sorted by expert, two grouped products.

The grid depends on the number of pairs and experts alone. Sorting, and which block of pairs belongs
to which expert, stay on the device: nothing waits for the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.float8 import Rounded
from weft.kernels.triton.coded_matrix import CodedMatrix
from weft.kernels.triton.coded_moe import multiply
from weft.kernels.triton.expert_pairs import activating, biased, read_pairs, write_pairs
from weft.kernels.triton.fp8 import round_rows
from weft.kernels.triton.gemm import operand
from weft.kernels.triton.launch import power_of_2
from weft.kernels.triton.matrix import TritonMatrix, arithmetic, weight_of
from weft.kernels.tuning import Launch

_COMBINE_BLOCK = 1024  # outputs that a program of ``_combine`` takes


@dataclass(frozen=True)
class Groups:
    """Pairs sorted by expert, and blocks of at most BLOCK_M of them of one expert.

    Attributes:
        order: [P] int64, pairs sorted by expert: place -> pair; pair p is of token p // top_k.
        starts: [E + 1] int64, where each expert's pairs begin in ``order``.
        experts: [B] int32, the expert of each block, -1 for a block without pairs.
        firsts: [B] int32, the place of each block's first pair.
    """

    order: Tensor
    starts: Tensor
    experts: Tensor
    firsts: Tensor


@triton.jit
def _blocks(starts, experts, firsts, E: tl.constexpr, PADDED: tl.constexpr, BLOCK_M: tl.constexpr):
    """Find the expert and the first pair of one block. Grid: (blocks,)."""
    block = tl.program_id(0)
    e = tl.arange(0, PADDED)
    start = tl.load(starts + e, mask=e < E, other=0)
    count = tl.load(starts + e + 1, mask=e < E, other=0) - start
    blocks = (count + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(blocks, 0)
    mine = (block >= ends - blocks) & (block < ends)  # of one expert, or of none
    expert = tl.max(tl.where(mine, e, -1), 0)
    first = tl.max(tl.where(mine, start + (block - ends + blocks) * BLOCK_M, 0), 0)
    tl.store(experts + block, expert)
    tl.store(firsts + block, first.to(tl.int32))


@triton.jit(do_not_specialize=["count"])
def _grouped(
    x,  # [T, K] if FIRST, else [P, K] in sorted places
    w,  # [E, N, K], with gates [E, 2 N, K], those first
    row_scale,  # float32, a scale for each row of x
    scale,  # [E, N or 2 N] float32
    bias,  # [E, N or 2 N]
    share,  # [P] float32
    order,
    starts,
    experts,
    firsts,
    out,  # [P, N]: in sorted places if FIRST, else float32 by pair, times the pair's share
    count,
    x_stride,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OPERAND: tl.constexpr,
    BITS: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
    BIASED: tl.constexpr,
    FIRST: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROW_SCALED: tl.constexpr,
    SCALED: tl.constexpr,
):
    """One block of outputs of one block of pairs. Grid: (blocks of pairs * blocks of outputs,)."""
    block, outputs = tl.program_id(0) % count, tl.program_id(0) // count
    expert = tl.load(experts + block)
    if expert < 0:
        return
    place, m_in, pair, row = read_pairs(order, starts, firsts, block, expert, TOP_K, BLOCK_M, FIRST)
    n = outputs * BLOCK_N + tl.arange(0, BLOCK_N)
    n_in = n < N
    k = tl.arange(0, BLOCK_K)
    HALVES: tl.constexpr = 2 if GATED else 1
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    w_at = w + expert.to(tl.int64) * (HALVES * N * K) + n.to(tl.int64)[:, None] * K + k[None, :]
    x_at = x + row[None, :] * x_stride + k[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in range(STEPS):
        k_in = k + step * BLOCK_K < K
        rows = tl.load(x_at, mask=m_in[None, :] & k_in[:, None], other=0.0).to(OPERAND)
        inside = n_in[:, None] & k_in[None, :]
        weights = operand(tl.load(w_at, mask=inside, other=0.0), OPERAND, BITS)
        acc = tl.dot(weights, rows, acc, input_precision=PRECISION, max_num_imprecise_acc=EXACT)
        if GATED:
            weights = operand(tl.load(w_at + N * K, mask=inside, other=0.0), OPERAND, BITS)
            up = tl.dot(weights, rows, up, input_precision=PRECISION, max_num_imprecise_acc=EXACT)
        w_at += BLOCK_K
        x_at += BLOCK_K
    if SCALED:
        scales = scale + expert * (HALVES * N) + n
        acc *= tl.load(scales, mask=n_in, other=0.0)[:, None]
        if GATED:
            up *= tl.load(scales + N, mask=n_in, other=0.0)[:, None]
    if ROW_SCALED:
        factor = tl.load(row_scale + row, mask=m_in, other=0.0)[None, :]
        acc *= factor
        up *= factor
    if BIASED:
        acc, up = biased(acc, up, bias, expert, n, n_in, N, GATED)
    write_pairs(out, share, acc, up, place, pair, m_in, n, n_in, N, FIRST, GATED, ACTIVATION)


@triton.jit
def _combine(
    parts, experts, shared, gates, out,
    E: tl.constexpr, TOP_K: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
    SHARED: tl.constexpr, GATES: tl.constexpr,
):  # fmt: skip
    """Add the pairs of one token in the order of its experts, then what the shared experts give.

    Grid: (T, blocks of outputs).
    """
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for number in tl.static_range(TOP_K):
        pair = token * TOP_K + number
        expert = tl.load(experts + pair)
        known = (expert >= 0) & (expert < E)
        acc += tl.load(parts + pair * N + n, mask=(n < N) & known, other=0.0)
    if SHARED:
        more = tl.load(shared + token * N + n, mask=n < N, other=0.0).to(tl.float32)
        acc += more * tl.load(gates + token) if GATES else more
    tl.store(out + token * N + n, acc.to(out.dtype.element_ty), mask=n < N)


def moe(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: TritonMatrix | CodedMatrix,
    down: TritonMatrix | CodedMatrix,
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    shared: Tensor | None = None,
    gates: Tensor | None = None,
) -> Tensor:
    """Return the weighted sum of each token's experts [T, D]; see ``reference.moe``.

    Pairs of experts outside [0, E) are skipped: rows that pad a batch cost no weights.

    Args:
        gate_up: [E, 2 I, D], gates first; of ``relu2``, which has no gate, [E, I, D].
        down: [E, D, I].
        gate_up_bias, down_bias: of the outputs of both, [E, N].
        shared: [T, D], contiguous, is added, before sums are rounded.
        gates: [T] float32, multiplies that.

    Raises:
        ValueError: shapes or dtypes do not fit, or the activation is not known.
        KernelUnavailable: the tuning has no launch for a shape.
    """
    halves = 2 if activating(activation)["GATED"] else 1
    tokens, top_k = experts.shape
    count, inner = down.shape[0], down.shape[2]
    if gate_up.shape != (count, halves * inner, x.shape[1]) or x.dtype != gate_up.dtype:
        raise ValueError(
            f"x {list(x.shape)} of {x.dtype} does not fit experts {list(gate_up.shape)} and "
            f"{list(down.shape)} of {gate_up.dtype}"
        )
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    pairs = tokens * top_k
    if pairs == 0:
        return out
    experts, shares = experts.contiguous(), weights.float().contiguous()
    each = triton.cdiv(pairs, count)  # pairs of an expert
    launches = gate_up.launch(each), down.launch(each)
    order = experts.flatten().sort(stable=True)
    bounds = torch.arange(count + 1, device=x.device, dtype=experts.dtype)
    starts = torch.searchsorted(order.values, bounds)
    heights = {launch["BLOCK_M"] for launch in launches}
    groups = {height: _group(order.indices, starts, height) for height in heights}
    hidden = torch.empty((pairs, inner), dtype=x.dtype, device=x.device)
    biases = [None if bias is None else bias.contiguous() for bias in (gate_up_bias, down_bias)]
    _product(x, gate_up, launches[0], groups, shares, hidden, top_k, activation, biases[0])
    parts = torch.empty((pairs, x.shape[1]), dtype=torch.float32, device=x.device)
    _product(hidden, down, launches[1], groups, shares, parts, top_k, None, biases[1])
    block = min(_COMBINE_BLOCK, power_of_2(x.shape[1]))
    _combine[tokens, triton.cdiv(x.shape[1], block)](
        parts, experts, parts if shared is None else shared, parts if gates is None else gates, out,
        E=count, TOP_K=top_k, N=x.shape[1], BLOCK=block,
        SHARED=shared is not None, GATES=gates is not None, num_warps=4,
    )  # fmt: skip
    return out


def _group(order: Tensor, starts: Tensor, block_m: int) -> Groups:
    pairs, count = len(order), len(starts) - 1
    blocks = min(pairs, triton.cdiv(pairs, block_m) + count)  # each expert may fill one in part
    width = triton.cdiv(blocks, 4) * 4  # 16 bytes, else a kernel is compiled for each alignment
    both = torch.empty((2, width), dtype=torch.int32, device=order.device)
    experts, firsts = both[:, :blocks]
    padded = power_of_2(count)
    _blocks[(blocks,)](
        starts, experts, firsts, E=count, PADDED=padded, BLOCK_M=block_m, num_warps=1
    )
    return Groups(order, starts, experts, firsts)


def _product(
    x: Tensor,
    matrix: TritonMatrix | CodedMatrix,
    launch: Launch,
    grouped: Mapping[int, Groups],
    shares: Tensor,
    out: Tensor,
    top_k: int,
    activation: str | None,
    bias: Tensor | None,
) -> None:
    """Multiply pairs with experts: activated, from tokens; or weighted, from sorted places."""
    groups = grouped[launch["BLOCK_M"]]
    if isinstance(matrix, CodedMatrix):
        parts = (groups.order, groups.starts, groups.experts, groups.firsts)
        multiply(x, matrix, launch, parts, shares, out, top_k, activation, bias)
        return
    rounded: Rounded | None = None
    if matrix.rounds:
        rounded = round_rows(x, matrix.inputs if isinstance(matrix.inputs, Tensor) else None)
    rows = x if rounded is None else rounded.codes
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    options = arithmetic(matrix, launch, x.device)
    blocks, outputs = len(groups.experts), out.shape[1]
    _grouped[(blocks * triton.cdiv(outputs, launch["BLOCK_N"]),)](
        rows,
        weight_of(matrix, options["BITS"]),
        shares if rounded is None else rounded.scales,
        shares if matrix.scales is None else matrix.scales,
        shares if bias is None else bias,
        shares,
        groups.order,
        groups.starts,
        groups.experts,
        groups.firsts,
        out,
        blocks,
        rows.stride(0),
        TOP_K=top_k,
        N=outputs,
        K=matrix.shape[2],
        BIASED=bias is not None,
        **activating(activation),
        ROW_SCALED=rounded is not None,
        SCALED=matrix.scales is not None,
        **options,
        **launch,
    )
