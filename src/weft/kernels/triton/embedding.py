"""Embedding lookup: rows of a table by ids."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit(do_not_specialize=["size"])
def _embedding(ids, table, out, size, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + token).to(tl.int64)
    known = (row >= 0) & (row < size)
    found = tl.load(table + row * stride + column, mask=(column < WIDTH) & known, other=0.0)
    tl.store(out + token * WIDTH + column, found, mask=column < WIDTH)


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """Return the rows [T, C] of a table [V, C] by ids [T].

    An id that the table lacks gives zeros: a kernel can raise nothing.
    """
    size, width = table.shape
    table = table if table.stride(1) == 1 else table.contiguous()
    out = torch.empty((len(ids), width), dtype=table.dtype, device=table.device)
    if len(ids):
        _embedding[(len(ids), triton.cdiv(width, _BLOCK))](
            ids.contiguous(), table, out, size, table.stride(0), WIDTH=width, BLOCK=_BLOCK,
            num_warps=4, num_stages=1,
        )  # fmt: skip
    return out
