"""How keys and values are stored in 8 bits: codes and, beside them in the block, their scales.

A token's row of one head is D codes of one byte and a float32 scale; it stands for code * scale.
The tensor of a layer is ``[num_blocks, Hkv, block_size, D + 4]``, in which the bytes of one head of
one block are its ``block_size`` rows of D codes, then its ``block_size`` scales. So a scale lives
and dies with its block: whatever zeroes, moves or shares a block does the same to its scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.core.kv_types import KV_TYPES, KVType
from weft.core.kv_types import cache_dtype as dtype_of_cache
from weft.core.kv_types import row_size as size_of_row
from weft.kernels.arrays import dtype_name

__all__ = ["KV_DTYPES", "SCALED", "cache_dtype", "read_rows", "row_size", "write_rows"]

KV_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, row.dtype) for name, row in KV_TYPES.items()
}
SCALED: dict[torch.dtype, KVType] = {KV_DTYPES[name]: row for name, row in KV_TYPES.items()}
_SMALLEST = 2.0**-100  # a row of smaller numbers is stored as zeros


def cache_dtype(name: str) -> torch.dtype:
    """Return torch's type of a cache by the name of a type of KV or of weights."""
    found = getattr(torch, dtype_of_cache(name))
    assert isinstance(found, torch.dtype)
    return found


def row_size(dtype: torch.dtype, head_dim: int) -> int:
    """Return the last dimension of a cache of one of torch's types."""
    return size_of_row(dtype_name(dtype), head_dim)


def quantise(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return codes [..., D] and scales [..., 1] float32 of ``rows`` [..., D].

    A row that holds an infinity or a NaN gets the scale NaN, so that whoever reads it notices.
    """
    rows = rows.float()
    largest = rows.abs().amax(-1, keepdim=True)
    usable = (largest >= _SMALLEST) & largest.isfinite()
    # A tensor, because a number / a tensor would be a product with a reciprocal.
    most = torch.full_like(largest, SCALED[dtype].largest)
    factor = torch.where(usable, most / largest, 0.0)
    scales = torch.where(usable, largest / most, 0.0)
    scales = torch.where(rows.isfinite().all(-1, keepdim=True), scales, float("nan"))
    scaled = torch.where(usable, rows * factor, 0.0)
    return (scaled.round() if SCALED[dtype].whole else scaled).to(dtype), scales


def write_rows(cache: Tensor, blocks: Tensor, offsets: Tensor, rows: Tensor) -> None:
    """Store rows [T, Hkv, D] at offsets [T] of blocks [T]."""
    if cache.dtype not in SCALED:
        cache[blocks, :, offsets] = rows.to(cache.dtype)
        return
    if not len(rows):
        return  # scales of nothing have no bytes to be seen as
    codes, scales = quantise(rows, cache.dtype)
    code_bytes, scale_bytes = _parts(cache)
    code_bytes[blocks, :, offsets] = codes.view(torch.uint8)
    scale_bytes[blocks, :, offsets] = scales.view(torch.uint8)


def read_rows(cache: Tensor, blocks: Tensor) -> Tensor:
    """Return the rows of blocks [n] as float32 [n, Hkv, block_size, D]."""
    if cache.dtype not in SCALED:
        return cache[blocks].float()
    codes, scales = (part[blocks].contiguous() for part in _parts(cache))
    return codes.view(cache.dtype).float() * scales.view(torch.float32)


def _parts(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Views of the bytes: codes [blocks, Hkv, block_size, D] and scales [..., block_size, 4]."""
    *heads, block_size, row = cache.shape
    scale_bytes = SCALED[cache.dtype].scale_bytes
    codes = block_size * (row - scale_bytes)
    flat = cache.view(torch.uint8).flatten(2)  # [blocks, Hkv, block_size * (D + 4)]
    return (
        flat[..., :codes].view(*heads, block_size, row - scale_bytes),
        flat[..., codes:].view(*heads, block_size, scale_bytes),
    )
