"""Routing of tokens to experts, with their weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.triton.launch import last_contiguous, power_of_2, warps


@triton.jit
def _route(
    scores, shares, experts, stride,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr, TOP_BLOCK: tl.constexpr,
    NORMALISE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    place = tl.arange(0, TOP_BLOCK)
    there = expert < COUNT
    score = tl.load(scores + token * stride + expert, mask=there, other=float("-inf"))
    score = score.to(tl.float32)
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


def route(scores: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """Return shares [T, K] float32 and ids [T, K] int64 of experts; see ``reference.route``.

    Of equal scores the first is taken.

    Raises:
        ValueError: there are fewer experts.
    """
    tokens, count = scores.shape
    if not 0 < top_k <= count:
        raise ValueError(f"{top_k} of {count} experts cannot be chosen")
    scores = last_contiguous(scores)
    shares = torch.empty((tokens, top_k), dtype=torch.float32, device=scores.device)
    experts = torch.empty((tokens, top_k), dtype=torch.int64, device=scores.device)
    if tokens:
        block = power_of_2(count)
        _route[(tokens,)](
            scores, shares, experts, scores.stride(0), COUNT=count, BLOCK=block, TOP_K=top_k,
            TOP_BLOCK=power_of_2(top_k), NORMALISE=normalise, num_warps=warps(block), num_stages=1,
        )  # fmt: skip
    return shares, experts
