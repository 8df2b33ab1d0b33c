"""Which pairs of token and expert a program of a grouped product has, and where it writes them.

Shared by the products of ``moe.py`` and of ``coded_moe.py``, which differ between the two.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from weft.kernels.triton.activation import gated, place_of, relu2


def activating(activation: str | None) -> dict[str, Any]:
    """Return the constants of a grouped product that say what is done to its sums.

    Args:
        activation: of the first product of an MLP; None: of the second, which is weighted.

    Raises:
        ValueError: kernels do not compute it.
    """
    gated_by = None if activation == "relu2" else activation
    return {
        "FIRST": activation is not None,
        "GATED": gated_by is not None,
        "ACTIVATION": place_of(gated_by),
    }


@triton.jit
def read_pairs(
    order,
    starts,
    firsts,
    block,
    expert,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    FIRST: tl.constexpr,
):
    """Return places, which of them are the expert's, pairs, and rows of x, each [BLOCK_M]."""
    place = tl.load(firsts + block) + tl.arange(0, BLOCK_M)
    m_in = place < tl.load(starts + expert + 1)
    pair = tl.load(order + place, mask=m_in, other=0)
    row = pair // TOP_K if FIRST else place.to(tl.int64)
    return place, m_in, pair, row


@triton.jit
def biased(acc, up, bias, expert, n, n_in, N: tl.constexpr, GATED: tl.constexpr):
    """Add an expert's biases, of all [E, N] or [E, 2 N], to sums [BLOCK_N, BLOCK_M]."""
    at = bias + expert * (2 * N if GATED else N) + n
    acc += tl.load(at, mask=n_in, other=0.0).to(tl.float32)[:, None]
    if GATED:
        up += tl.load(at + N, mask=n_in, other=0.0).to(tl.float32)[:, None]
    return acc, up


@triton.jit
def write_pairs(
    out,
    share,
    acc,
    up,
    place,
    pair,
    m_in,
    n,
    n_in,
    N: tl.constexpr,
    FIRST: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Write sums [BLOCK_N, BLOCK_M]: activated at their places, else times their share by pair."""
    if FIRST:
        acc = gated(acc, up, ACTIVATION) if GATED else relu2(acc)
        to = place.to(tl.int64)
    else:
        acc *= tl.load(share + pair, mask=m_in, other=0.0)[None, :]
        to = pair
    inside = n_in[:, None] & m_in[None, :]
    tl.store(out + to[None, :] * N + n[:, None], acc.to(out.dtype.element_ty), mask=inside)
