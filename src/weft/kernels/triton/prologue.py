"""The prologue of the layers in one kernel: ids, their embeddings, the first sum and its norm."""

from __future__ import annotations

from typing import TypeGuard

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.float8 import E4M3, Rounded
from weft.kernels.triton.coded_matrix import CodedMatrix
from weft.kernels.triton.fp8 import from_bits
from weft.kernels.triton.launch import power_of_2, warps
from weft.kernels.triton.matrix import TritonMatrix
from weft.kernels.triton.norm import NormKind, for_norm, normalise

_FLOATS = tl.constexpr(0)  # how a table is stored
_BITS = tl.constexpr(1)  # of E4M3
_INTEGERS = tl.constexpr(2)
_STORED = {E4M3: 1, torch.int8: 2}


@triton.jit(do_not_specialize=["size"])
def _enter(
    ids, in_flight, table, table_scales, weight, static, total, out, scales,
    size, stride, factor, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, STORED: tl.constexpr, IN_FLIGHT: tl.constexpr,
    SCALED: tl.constexpr, ROUND: tl.constexpr, STATIC: tl.constexpr, PLUS_ONE: tl.constexpr,
):  # fmt: skip
    """One token. STORED: how the table is."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < D
    token = tl.load(ids + row).to(tl.int64)
    if IN_FLIGHT:
        token = tl.where(token < 0, tl.load(in_flight + tl.maximum(-1 - token, 0)), token)
    known = (token >= 0) & (token < size)
    y = tl.load(table + token * stride + column, mask=mask & known, other=0)
    if STORED == _BITS:
        y = from_bits(y)
    y = y.to(tl.float32)
    if STORED != _FLOATS:
        y *= tl.load(table_scales + token, mask=known, other=0.0)
        y = y.to(total.dtype.element_ty).to(tl.float32)
    if SCALED:
        y = (y * factor).to(total.dtype.element_ty).to(tl.float32)
    tl.store(total + row * D + column, y.to(total.dtype.element_ty), mask=mask)
    normalise(
        y, weight, static, out, scales, row, column, mask, eps,
        D, ROUND, STATIC, PLUS_ONE, total.dtype.element_ty,
    )  # fmt: skip


def enters(table: Tensor | TritonMatrix | CodedMatrix) -> TypeGuard[Tensor | TritonMatrix]:
    """Whether ``enter`` reads a table: floats, or codes with a scale a row."""
    if isinstance(table, CodedMatrix):
        return False
    if isinstance(table, Tensor) or table.scales is None:
        return True
    return table.values.dtype in _STORED and table.scales.dim() == 1


def enter(
    ids: Tensor,
    in_flight: Tensor | None,
    table: Tensor | TritonMatrix,
    factor: float,
    weight: Tensor,
    kind: NormKind,
    inputs: str | Tensor = "float",
) -> tuple[Tensor | Rounded, Tensor]:
    """Return the norm of embeddings [T, C], as a product takes it, and these times ``factor``.

    Args:
        ids: [T] int64; -1 - i stands for number i in flight. An id outside the vocabulary has an
            embedding of zeros.
        in_flight: [R] int64 tokens; None: all ids are known.
        table: [V, C], which may be the output head.
        weight: [C], of the norm.
        inputs: how the product takes it; see ``float8.Float8``.

    Raises:
        ValueError: the weight does not fit.
    """
    numbers, of_rows, dtype = table, None, weight.dtype
    if isinstance(table, TritonMatrix):
        numbers, of_rows = table.values, table.scales
    assert isinstance(numbers, Tensor)
    stored = _STORED.get(numbers.dtype, 0)
    size, width = numbers.shape
    if weight.shape != (width,):
        raise ValueError(f"norm {list(weight.shape)} does not fit a table {list(numbers.shape)}")
    numbers = numbers.view(torch.uint8) if stored == _STORED[E4M3] else numbers
    total = torch.empty((len(ids), width), dtype=dtype, device=numbers.device)
    out, scales = for_norm(total, inputs)
    if len(ids):
        block = power_of_2(width)
        _enter[(len(ids),)](
            ids, in_flight, numbers, of_rows, weight,
            inputs if isinstance(inputs, Tensor) else None, total, out, scales,
            size, numbers.stride(0), factor, kind.eps,
            D=width, BLOCK=block, STORED=stored, IN_FLIGHT=in_flight is not None,
            SCALED=factor != 1.0, ROUND=scales is not None, STATIC=isinstance(inputs, Tensor),
            PLUS_ONE=kind.plus_one, num_warps=warps(block), num_stages=1, enable_fp_fusion=False,
        )  # fmt: skip
    return (out if scales is None else Rounded(out, scales)), total
