"""Writes keys and values of new tokens to their slots, in every type of ``kv_storage``."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.triton.storage import SMALLEST, as_bytes, encode_e4m3, is_scaled, scales_of

BLOCK_TOKENS = 4  # tokens of one head that a program writes, a warp for all of them


def write(
    cache_k: Tensor, cache_v: Tensor, k: Tensor, v: Tensor | None, slot_mapping: Tensor
) -> None:
    """Store k and v [T, Hkv, D] at ``slot_mapping`` [T] of the caches; negative slots are left out.

    The bytes are those of ``kv_storage.write_rows``. The rows of a head of a
    block must lie one after another in the caches.

    Args:
        v: None if keys are values, too, and so are their caches.
    """
    tokens, heads, dim = k.shape
    scaled, twice = is_scaled(cache_k), v is not None
    v = k if v is None else v
    _write_kernel[(triton.cdiv(tokens, BLOCK_TOKENS), heads)](
        k, v, as_bytes(cache_k), as_bytes(cache_v), scales_of(cache_k), scales_of(cache_v),
        slot_mapping, tokens, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        cache_k.stride(0), cache_k.stride(1), cache_v.stride(0), cache_v.stride(1),
        DIM=dim, PADDED=triton.next_power_of_2(dim), BLOCK_SIZE=cache_k.shape[2],
        SCALED=scaled, TWICE=twice, BLOCK_TOKENS=BLOCK_TOKENS,
        num_warps=1, num_stages=1, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def _write_kernel(
    k, v, cache_k, cache_v, scales_k, scales_v, slot_mapping,
    tokens, stride_kt, stride_kh, stride_vt, stride_vh,
    stride_kb, stride_kc, stride_vb, stride_vc,
    DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SCALED: tl.constexpr, TWICE: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    slot = tl.load(slot_mapping + token, mask=token < tokens, other=-1)
    real = slot >= 0
    slot = tl.where(real, slot, 0)
    block, offset = slot // BLOCK_SIZE, (slot % BLOCK_SIZE).to(tl.int32)
    dim = tl.arange(0, PADDED)[None, :]
    mask = real[:, None] & (dim < DIM)
    token = token.to(tl.int64)[:, None]
    x = tl.load(k + token * stride_kt + head * stride_kh + dim, mask=mask, other=0.0)
    at = block * stride_kb + head * stride_kc
    store_rows(cache_k, scales_k, at, offset, x, real, DIM, PADDED, BLOCK_SIZE, SCALED)
    if TWICE:
        x = tl.load(v + token * stride_vt + head * stride_vh + dim, mask=mask, other=0.0)
        at = block * stride_vb + head * stride_vc
        store_rows(cache_v, scales_v, at, offset, x, real, DIM, PADDED, BLOCK_SIZE, SCALED)


@triton.jit
def store_rows(
    cache, scales, at, offset, x, real,
    DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Store rows x [N, PADDED] of one head in blocks that begin at ``at`` [N], at offsets [N].

    The caller's kernel must be launched with ``enable_fp_fusion=False``, since a product that is
    added to something before it is rounded gives other bytes.

    Args:
        scales: the same memory as ``cache``, as float32; None for a cache of floats.
        real: [N] rows to store; the others are 0.
    """
    dim = tl.arange(0, PADDED)[None, :]
    where = cache + (at + offset * DIM)[:, None] + dim
    mask = real[:, None] & (dim < DIM)
    if SCALED:
        x = x.to(tl.float32)
        size = tl.abs(x)
        finite = tl.min((size < float("inf")).to(tl.int32), 1) > 0
        largest = tl.max(size, 1)
        usable = finite & (largest >= SMALLEST)
        most = 127.0 if cache.dtype.element_ty == tl.int8 else 448.0
        most = tl.zeros_like(largest) + most
        factor = tl.div_rn(most, tl.where(usable, largest, 1.0))
        x = tl.where(usable[:, None], x * factor[:, None], 0.0)
        if cache.dtype.element_ty == tl.int8:
            x = (x + 12582912.0) - 12582912.0  # 1.5 * 2^23: rounds to the nearest, ties to even
            tl.store(where, x.to(tl.int8), mask=mask)
        else:
            tl.store(where, encode_e4m3(x), mask=mask)
        scale = tl.where(usable, tl.div_rn(largest, most), 0.0)
        scale = tl.where(finite, scale, float("nan"))
        tl.store(scales + at // 4 + BLOCK_SIZE * DIM // 4 + offset, scale, mask=real)
    else:
        tl.store(where, x.to(cache.dtype.element_ty), mask=mask)
