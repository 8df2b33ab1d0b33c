"""RMS norm, alone or fused with a residual sum, optionally rounded for the product that follows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.float8 import Rounded
from weft.kernels.triton import pdl
from weft.kernels.triton.fp8 import codes_dtype, not_finite, row_scale, to_e4m3
from weft.kernels.triton.gemm import SplitProduct, as_read, summed
from weft.kernels.triton.launch import last_contiguous, power_of_2, warps

_NUMBERS = 1024  # of one program: short rows, such as heads, are normalised several at once


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(
    x, weight, out, rows, stride_token, stride_head, eps,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    WEIGHTED: tl.constexpr, PER_HEAD: tl.constexpr, PLUS_ONE: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    token, head = row // HEADS, row % HEADS
    mask = (row < rows)[:, None] & (column < D)
    at = token.to(tl.int64) * stride_token + head * stride_head
    y = tl.load(x + at[:, None] + column, mask=mask, other=0.0).to(tl.float32)
    if CENTRED:
        y = tl.where(mask, y - (tl.sum(y, axis=1) / D)[:, None], 0.0)
    y *= tl.rsqrt(tl.sum(y * y, axis=1) / D + eps)[:, None]
    if WEIGHTED:
        first = (head * D)[:, None] if PER_HEAD else 0
        factor = tl.load(weight + first + column, mask=mask, other=0.0).to(tl.float32)
        y *= 1.0 + factor if PLUS_ONE else factor
    to = row.to(tl.int64)[:, None] * D + column
    tl.store(out + to, y.to(out.dtype.element_ty), mask=mask)


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, plus_one: bool, centred: bool = False
) -> Tensor:
    """Root mean square norm of x [T, D] or [T, H, D]; see ``reference.rms_norm``.

    Args:
        weight: [D], or one for each head [H, D].

    Raises:
        ValueError: shapes do not fit.
    """
    fits = weight is None or weight.shape in (x.shape[-1:], x.shape[1:])
    if x.dim() not in (2, 3) or not fits:
        shape = None if weight is None else list(weight.shape)
        raise ValueError(f"weight {shape} does not fit {list(x.shape)}")
    x = last_contiguous(x)
    size, heads = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = power_of_2(size)
    at_once = max(1, _NUMBERS // block)
    rows = x.shape[0] * heads
    if rows == 0:
        return out
    _rms_norm[(triton.cdiv(rows, at_once),)](
        x, weight if weight is None else weight.contiguous(), out, rows,
        x.stride(0), x.stride(1) if x.dim() == 3 else 0, eps,
        HEADS=heads, D=size, BLOCK=block, ROWS=at_once,
        WEIGHTED=weight is not None, PER_HEAD=weight is not None and weight.dim() == 2,
        PLUS_ONE=plus_one, CENTRED=centred, num_warps=warps(block * at_once), num_stages=1,
    )  # fmt: skip
    return out


@triton.jit
def _factor(weight, column, mask, PLUS_ONE: tl.constexpr):
    factor = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    return 1.0 + factor if PLUS_ONE else factor


@triton.jit
def normalise(
    y, weight, static, out, scales, row, column, mask, eps,
    D: tl.constexpr, ROUND: tl.constexpr, STATIC: tl.constexpr, PLUS_ONE: tl.constexpr,
    TYPE: tl.constexpr,
):  # fmt: skip
    """Store the norm of a row y [BLOCK] in float32; ROUND: of what a norm in TYPE hands on."""
    y *= tl.rsqrt(tl.sum(y * y, axis=0) / D + eps) * _factor(weight, column, mask, PLUS_ONE)
    if ROUND:
        y = y.to(TYPE).to(tl.float32)
        wrong = tl.max((mask & not_finite(y)).to(tl.int32), axis=0)
        scale, factor = row_scale(tl.max(tl.abs(y), axis=0), wrong == 0, static, STATIC)
        tl.store(scales + row, scale)
        y = to_e4m3(tl.where(wrong == 0, y * factor, 0.0))
    tl.store(out + row * D + column, y.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _add_norm(
    x, row_scale_of_x, scale_of_x, bias_of_x, residual, post, weight, static, total, out, scales,
    rows, stride, stride_residual, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, POST: tl.constexpr, ADD: tl.constexpr,
    NORM: tl.constexpr, ROUND: tl.constexpr, STATIC: tl.constexpr, PLUS_ONE: tl.constexpr,
    SPLITS: tl.constexpr, FLAGS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x: [rows, D], or the parts of a product; see ``gemm.summed``."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < D
    pdl.wait(PDL)
    pdl.launch_dependents(PDL)
    if SPLITS == 1:
        y = tl.load(x + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    else:
        y = summed(
            x, row_scale_of_x, scale_of_x, bias_of_x, rows, row + column * 0, column, mask,
            D, SPLITS, FLAGS, total.dtype.element_ty,
        )  # fmt: skip
    if POST:
        y *= tl.rsqrt(tl.sum(y * y, axis=0) / D + eps) * _factor(post, column, mask, PLUS_ONE)
    if ADD:
        y += tl.load(residual + row * stride_residual + column, mask=mask, other=0.0).to(tl.float32)
        stored = y.to(total.dtype.element_ty)
        tl.store(total + row * D + column, stored, mask=mask)
        y = stored.to(tl.float32)
    if NORM:
        normalise(
            y, weight, static, out, scales, row, column, mask, eps,
            D, ROUND, STATIC, PLUS_ONE, total.dtype.element_ty,
        )  # fmt: skip


@dataclass(frozen=True)
class NormKind:
    """Constants that the norms of a layer share."""

    eps: float
    plus_one: bool  # they multiply by 1 + weight


def norm(
    x: Tensor,
    weight: Tensor,
    kind: NormKind,
    inputs: str | Tensor = "float",
    out: Tensor | None = None,
) -> Tensor | Rounded:
    """Return the norm of x [T, D] as a product takes it.

    Args:
        inputs: how; see ``float8.Float8``.
        out: as of ``add_norm``.
    """
    return _launch(x, None, None, weight, kind, inputs, out)[0]


def add(x: Tensor | SplitProduct, residual: Tensor, post: Tensor | None, kind: NormKind) -> Tensor:
    """Return x + residual [T, D]; with ``post`` [D] of the norm of x with that weight."""
    return _launch(x, residual, post, None, kind, "float")[1]


def add_norm(
    x: Tensor | SplitProduct,
    residual: Tensor,
    post: Tensor | None,
    weight: Tensor,
    kind: NormKind,
    inputs: str | Tensor = "float",
    out: Tensor | None = None,
) -> tuple[Tensor | Rounded, Tensor]:
    """Return ``norm(total)`` and ``total = add(x, residual)``, all [T, D], in one pass.

    Args:
        out: where the norm is written, contiguous, if it is not rounded.
    """
    return _launch(x, residual, post, weight, kind, inputs, out)


def for_norm(total: Tensor, inputs: str | Tensor) -> tuple[Tensor, Tensor | None]:
    """Return what ``normalise`` writes of rows [T, D]: norms or codes, and the scales of these."""
    if isinstance(inputs, str) and inputs == "float":
        return torch.empty_like(total, memory_format=torch.contiguous_format), None
    codes = torch.empty(total.shape, dtype=codes_dtype(total.device), device=total.device)
    return codes, torch.empty(len(total), dtype=torch.float32, device=total.device)


def _launch(
    x: Tensor | SplitProduct,
    residual: Tensor | None,
    post: Tensor | None,
    weight: Tensor | None,
    kind: NormKind,
    inputs: str | Tensor,
    out: Tensor | None = None,
) -> tuple[Tensor | Rounded, Tensor]:
    rows, size = x.shape
    for name, part in (("post norm", post), ("norm", weight)):
        if part is not None and part.shape != (size,):
            raise ValueError(f"{name} {list(part.shape)} does not fit {list(x.shape)}")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(f"residual {list(residual.shape)} does not fit {list(x.shape)}")
    x = last_contiguous(x) if isinstance(x, Tensor) else x
    residual = None if residual is None else last_contiguous(residual)
    if residual is None:
        assert isinstance(x, Tensor)
        total = x
    else:
        total = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    made, scales = for_norm(total, inputs)
    out = total if weight is None else made if out is None else out
    if rows:
        block = power_of_2(size)
        numbers, factors, constants = as_read(x)
        _add_norm[(rows,)](
            numbers, *factors, residual, post, weight,
            inputs if isinstance(inputs, Tensor) else None, total, out, scales, rows,
            numbers.stride(-2), 0 if residual is None else residual.stride(0), kind.eps,
            **constants, D=size, BLOCK=block, POST=post is not None, ADD=residual is not None,
            NORM=weight is not None, ROUND=scales is not None, STATIC=isinstance(inputs, Tensor),
            PLUS_ONE=kind.plus_one, num_warps=warps(block), num_stages=1, enable_fp_fusion=False,
            **pdl.options(x.device),
        )  # fmt: skip
    return (out if scales is None else Rounded(out, scales)), total
