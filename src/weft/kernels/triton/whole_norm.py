"""Norms over all heads of Q, and over all of K, where ranks have some of them each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.triton.launch import power_of_2, warps


@triton.jit
def _square_sums(
    x, sums, stride,
    FIRST: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    y = tl.load(x + row * stride + column, mask=column < D, other=0.0).to(tl.float32)
    y *= y
    tl.store(sums + 2 * row, tl.sum(tl.where(column < FIRST, y, 0.0), axis=0))
    tl.store(sums + 2 * row + 1, tl.sum(tl.where(column < FIRST, 0.0, y), axis=0))


@triton.jit
def _norm_by_sums(
    x, sums, weight, out, stride, first_count, other_count, eps,
    FIRST: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, PLUS_ONE: tl.constexpr,
):  # fmt: skip
    """``first_count`` and ``other_count``: over how many numbers of all ranks the sums go."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < D
    y = tl.load(x + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    first = tl.rsqrt(tl.load(sums + 2 * row) / first_count + eps)
    other = tl.rsqrt(tl.load(sums + 2 * row + 1) / other_count + eps)
    factor = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    y *= tl.where(column < FIRST, first, other) * (1.0 + factor if PLUS_ONE else factor)
    tl.store(out + row * D + column, y.to(out.dtype.element_ty), mask=mask)


def square_sums(x: Tensor, first: int) -> Tensor:
    """Sums [T, 2] float32 of squares of heads x [T, H, D]; see ``reference.square_sums``.

    Raises:
        ValueError: there are fewer heads.
    """
    x = _whole_rows(x, first)
    tokens, heads, size = x.shape
    sums = torch.empty(tokens, 2, dtype=torch.float32, device=x.device)
    block = power_of_2(heads * size)
    if tokens:
        _square_sums[(tokens,)](
            x, sums, x.stride(0), FIRST=first * size, D=heads * size, BLOCK=block,
            num_warps=warps(block), num_stages=1,
        )  # fmt: skip
    return sums


def norm_by_sums(
    x: Tensor, first: int, sums: Tensor, weight: Tensor, eps: float, plus_one: bool, ranks: int
) -> Tensor:
    """Norms over several heads of x [T, H, D]; see ``reference.norm_by_sums``.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    x = _whole_rows(x, first)
    tokens, heads, size = x.shape
    width = heads * size
    fits = weight.shape == (width,) and sums.shape == (tokens, 2)
    if not fits or sums.dtype != torch.float32 or not sums.is_contiguous():
        raise ValueError(
            f"weight {list(weight.shape)} and sums {list(sums.shape)} of {sums.dtype} do not fit "
            f"{list(x.shape)}"
        )
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    counts = float(first * size * ranks), float((width - first * size) * ranks)
    block = power_of_2(width)
    if tokens:
        _norm_by_sums[(tokens,)](
            x, sums, weight.contiguous(), out, x.stride(0), *counts, eps,
            FIRST=first * size, D=width, BLOCK=block, PLUS_ONE=plus_one,
            num_warps=warps(block), num_stages=1,
        )  # fmt: skip
    return out


def _whole_rows(x: Tensor, first: int) -> Tensor:
    """Heads [T, H, D] of which those of a token lie one behind the other."""
    if x.dim() != 3 or not 0 <= first <= x.shape[1]:
        raise ValueError(f"the first {first} heads of {list(x.shape)} cannot be normalised")
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
