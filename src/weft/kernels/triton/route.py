"""Routing of tokens to experts, with their weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.triton.gemm import SplitProduct, as_read, summed
from weft.kernels.triton.launch import FLOATS, last_contiguous, power_of_2, warps


@triton.jit(do_not_specialize=["tokens"])
def _route(
    scores, row_scale, scale, bias, shares, experts, tokens, stride,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr, TOP_BLOCK: tl.constexpr,
    NORMALISE: tl.constexpr, SPLITS: tl.constexpr, FLAGS: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """scores: [tokens, COUNT], or the parts of a product of TYPE; see ``gemm.summed``."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    place = tl.arange(0, TOP_BLOCK)
    there = expert < COUNT
    if SPLITS == 1:
        score = tl.load(scores + token * stride + expert, mask=there, other=0.0).to(tl.float32)
    else:
        score = summed(
            scores, row_scale, scale, bias, tokens, token + expert * 0, expert, there,
            COUNT, SPLITS, FLAGS, TYPE,
        )  # fmt: skip
    score = tl.where(there, score, float("-inf"))
    weight = tl.exp(score - tl.max(score, axis=0))
    weight = tl.where(there, weight / tl.sum(weight, axis=0), -1.0)
    best = tl.zeros([TOP_BLOCK], tl.float32)
    which = tl.zeros([TOP_BLOCK], tl.int32)
    for i in tl.static_range(TOP_K):
        most = tl.max(weight, axis=0)
        first = tl.min(tl.where(weight == most, expert, COUNT - 1), axis=0)
        best = tl.where(place == i, most, best)
        which = tl.where(place == i, first, which)
        weight = tl.where(expert == first, -1.0, weight)
    if NORMALISE:
        best /= tl.sum(best, axis=0)
    to = token * TOP_K + place
    tl.store(shares + to, best, mask=place < TOP_K)
    tl.store(experts + to, which.to(tl.int64), mask=place < TOP_K)


def route(scores: Tensor | SplitProduct, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """Return shares [T, K] float32 and ids [T, K] int64 of experts; see ``reference.route``.

    Of equal scores [T, E] the first is taken.

    Raises:
        ValueError: there are fewer experts.
    """
    tokens, count = scores.shape
    if not 0 < top_k <= count:
        raise ValueError(f"{top_k} of {count} experts cannot be chosen")
    scores = last_contiguous(scores) if isinstance(scores, Tensor) else scores
    shares = torch.empty((tokens, top_k), dtype=torch.float32, device=scores.device)
    experts = torch.empty((tokens, top_k), dtype=torch.int64, device=scores.device)
    if tokens:
        block = power_of_2(count)
        numbers, factors, constants = as_read(scores)
        _route[(tokens,)](
            numbers, *factors, shares, experts, tokens, numbers.stride(0), COUNT=count,
            BLOCK=block, TOP_K=top_k, TOP_BLOCK=power_of_2(top_k), NORMALISE=normalise,
            TYPE=FLOATS[scores.dtype], **constants, num_warps=warps(block), num_stages=1,
        )  # fmt: skip
    return shares, experts
