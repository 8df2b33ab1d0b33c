"""Routing of tokens to experts, with their weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.routing import LEAST_SUM, Routing
from weft.kernels.triton.gemm import SplitProduct, as_read, summed
from weft.kernels.triton.launch import FLOATS, last_contiguous, power_of_2, warps

_LEAST_SUM = tl.constexpr(LEAST_SUM)
_ONE = tl.constexpr(2.0**40)  # as which 1 is summed in integers


@triton.jit
def _best_groups(
    by, expert,
    GROUPS: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr, BEST: tl.constexpr,
    TOP: tl.constexpr,
):  # fmt: skip
    """Leave what chooses among experts of the best groups, of equal ones the first."""
    group = tl.arange(0, PADDED)
    ranks = tl.full([PADDED], float("-inf"), tl.float32)
    for number in tl.static_range(GROUPS):
        own = tl.where(expert // SIZE == number, by, float("-inf"))
        rank = 0.0
        for _ in tl.static_range(BEST):
            most = tl.max(own, axis=0)
            first = tl.min(tl.where(own == most, expert, GROUPS * SIZE - 1), axis=0)
            rank += most
            own = tl.where(expert == first, float("-inf"), own)
        ranks = tl.where(group == number, rank, ranks)
    kept = expert < 0
    for _ in tl.static_range(TOP):
        first = tl.min(tl.where(ranks == tl.max(ranks, axis=0), group, GROUPS - 1), axis=0)
        kept = kept | (expert // SIZE == first)
        ranks = tl.where(group == first, float("-inf"), ranks)
    return tl.where(kept, by, float("-inf"))


@triton.jit(do_not_specialize=["tokens"])
def _route(
    scores, row_scale, scale, bias, correction, shares, experts, gates, factor, tokens, stride,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr,
    TOP_BLOCK: tl.constexpr, NORMALISE: tl.constexpr, SIGMOID: tl.constexpr,
    CORRECTED: tl.constexpr, GROUPS: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    GROUP_BEST: tl.constexpr, TOP_GROUPS: tl.constexpr, SPLITS: tl.constexpr,
    FLAGS: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """scores: [tokens, WIDTH], or the parts of a product of TYPE; see ``gemm.summed``.

    Behind the scores of COUNT experts there may be one of which ``gates`` gets the sigmoid.
    """
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    place = tl.arange(0, TOP_BLOCK)
    there = expert < WIDTH
    if SPLITS == 1:
        score = tl.load(scores + token * stride + expert, mask=there, other=0.0).to(tl.float32)
    else:
        score = summed(
            scores, row_scale, scale, bias, tokens, token + expert * 0, expert, there,
            WIDTH, SPLITS, FLAGS, TYPE,
        )  # fmt: skip
    if WIDTH > COUNT:
        gate = tl.sum(tl.where(expert == COUNT, score, 0.0), axis=0)
        tl.store(gates + token, 1.0 / (1.0 + tl.exp(-gate)))
    there = expert < COUNT
    score = tl.where(there, score, float("-inf"))
    if SIGMOID:
        weight = 1.0 / (1.0 + tl.exp(-score))
    else:
        weight = tl.exp(score - tl.max(score, axis=0))
        # Exact, so that how the scores were loaded, as sums or parts, decides nothing. The other
        # sum is NaN if a score is, which integers do not show.
        whole = tl.sum((weight * _ONE).to(tl.int64), axis=0).to(tl.float32) * (1.0 / _ONE)
        weight /= whole + 0.0 * tl.sum(weight, axis=0)
    by = tl.where(there, weight, float("-inf"))
    if CORRECTED:
        by += tl.load(correction + expert, mask=there, other=0.0)
    if TOP_GROUPS < GROUPS:
        by = _best_groups(by, expert, GROUPS, GROUP_BLOCK, COUNT // GROUPS, GROUP_BEST, TOP_GROUPS)
    best = tl.zeros([TOP_BLOCK], tl.float32)
    which = tl.zeros([TOP_BLOCK], tl.int32)
    for i in tl.static_range(TOP_K):
        most = tl.max(by, axis=0)
        first = tl.min(tl.where(by == most, expert, COUNT - 1), axis=0)
        if CORRECTED:
            most = tl.sum(tl.where(expert == first, weight, 0.0), axis=0)
        best = tl.where(place == i, most, best)
        which = tl.where(place == i, first, which)
        by = tl.where(expert == first, float("-inf"), by)
    if NORMALISE:
        best /= tl.sum(best, axis=0) + _LEAST_SUM
    to = token * TOP_K + place
    tl.store(shares + to, best * factor, mask=place < TOP_K)
    tl.store(experts + to, which.to(tl.int64), mask=place < TOP_K)


def route(
    scores: Tensor | SplitProduct,
    routing: Routing,
    bias: Tensor | None = None,
    gates: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return shares [T, K] float32 and ids [T, K] int64 of experts; see ``reference.route``.

    Of equal ones the first is taken.

    Args:
        gates: [T] float32, is written: the sigmoid of a score behind those of the experts.

    Raises:
        ValueError: there are fewer experts, or the bias has another shape or type.
    """
    tokens, width = scores.shape
    count = width - (gates is not None)
    routing.check(count)
    if bias is not None and (bias.shape != (count,) or bias.dtype != torch.float32):
        raise ValueError(f"a bias {list(bias.shape)} of {bias.dtype} for {count} experts")
    scores = last_contiguous(scores) if isinstance(scores, Tensor) else scores
    shares = torch.empty((tokens, routing.top_k), dtype=torch.float32, device=scores.device)
    experts = torch.empty((tokens, routing.top_k), dtype=torch.int64, device=scores.device)
    if tokens:
        block = power_of_2(width)
        numbers, factors, constants = as_read(scores)
        _route[(tokens,)](
            numbers, *factors, bias, shares, experts, gates, routing.routed_scaling_factor, tokens,
            numbers.stride(0), COUNT=count, WIDTH=width, BLOCK=block, TOP_K=routing.top_k,
            TOP_BLOCK=power_of_2(routing.top_k), NORMALISE=routing.normalise,
            SIGMOID=routing.scoring == "sigmoid", CORRECTED=bias is not None,
            GROUPS=routing.n_group, GROUP_BLOCK=power_of_2(routing.n_group),
            GROUP_BEST=routing.group_best, TOP_GROUPS=routing.topk_group,
            TYPE=FLOATS[scores.dtype], **constants, num_warps=warps(block), num_stages=1,
            enable_fp_fusion=False,
        )  # fmt: skip
    return shares, experts
