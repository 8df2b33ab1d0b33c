"""Rotary embeddings: angles of positions and rotation of heads, with fused neighbours."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.triton import pdl
from weft.kernels.triton.gemm import SplitProduct, as_read, summed
from weft.kernels.triton.kv_write import store_rows
from weft.kernels.triton.launch import last_contiguous, power_of_2, warps
from weft.kernels.triton.storage import as_bytes, is_scaled, scales_of

_NUMBERS = 1024  # of one program


@triton.jit(do_not_specialize=["tokens"])
def _angles(
    positions, frequencies, cos, sin, tokens, scale,
    R: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (token < tokens) & (column < R)
    position = tl.load(positions + token, mask=token < tokens, other=0).to(tl.float32)
    turns = position * tl.load(frequencies + column, mask=column < R, other=0.0)
    to = token * R + column
    tl.store(cos + to, tl.cos(turns) * scale, mask=mask)
    tl.store(sin + to, tl.sin(turns) * scale, mask=mask)


def angles(positions: Tensor, frequencies: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return cos and sin [T, R] float32 of positions [T]; see ``reference.angles``."""
    tokens, width = len(positions), len(frequencies)
    found = torch.empty((2, tokens, width), dtype=torch.float32, device=positions.device)
    cos, sin = found
    block = power_of_2(width)
    at_once = max(1, _NUMBERS // block)
    if tokens:
        _angles[(triton.cdiv(tokens, at_once),)](
            positions.contiguous(), frequencies.contiguous(), cos, sin, tokens, scale,
            R=width, BLOCK=block, TOKENS=at_once, num_warps=warps(block * at_once), num_stages=1,
        )  # fmt: skip
    return cos, sin


@triton.jit
def _store(
    y, head, k_cache, v_cache, k_scales, v_scales, slot,
    stride_kb, stride_kh, stride_vb, stride_vh,
    HEADS: tl.constexpr, QUERIES: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Write those heads of y [TILE, BLOCK] into the caches that are keys or values."""
    if (tl.program_id(1) + 1) * TILE > QUERIES:
        block, offset = tl.maximum(slot, 0) // BLOCK_SIZE, tl.maximum(slot, 0) % BLOCK_SIZE
        offset = tl.zeros([TILE], tl.int32) + offset.to(tl.int32)
        is_key = (head >= QUERIES) & (head < QUERIES + KV_HEADS) & (slot >= 0)
        is_value = (head >= QUERIES + KV_HEADS) & (head < HEADS) & (slot >= 0)
        first = block * stride_kb + tl.where(is_key, head - QUERIES, 0) * stride_kh
        store_rows(k_cache, k_scales, first, offset, y, is_key, D, BLOCK, BLOCK_SIZE, SCALED)
        first = block * stride_vb + tl.where(is_value, head - QUERIES - KV_HEADS, 0) * stride_vh
        store_rows(v_cache, v_scales, first, offset, y, is_value, D, BLOCK, BLOCK_SIZE, SCALED)


@triton.jit
def _read(
    x, row_scale, scale, bias, count, token, head, place, mask, stride_token, stride_head,
    HEADS: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, FLAGS: tl.constexpr,
    TYPE: tl.constexpr,
):  # fmt: skip
    """Numbers of a token, of heads [TILE, 1] at places [1, BLOCK], in float32."""
    if SPLITS == 1:
        at = x + token * stride_token + head * stride_head + place
        y = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    else:
        row = token + tl.zeros(mask.shape, tl.int64)
        y = summed(
            x, row_scale, scale, bias, count, row, head * D + place, mask,
            HEADS * D, SPLITS, FLAGS, TYPE,
        )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["count"])
def _rotate(
    x, row_scale, scale_of_x, bias, weight, cos, sin, out, k_cache, v_cache, k_scales, v_scales,
    slot_mapping, count, stride_token, stride_head, stride_kb, stride_kh, stride_vb, stride_vh, eps,
    HEADS: tl.constexpr, ROTATED: tl.constexpr, OUT: tl.constexpr, KV_HEADS: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    NORM: tl.constexpr, PLUS_ONE: tl.constexpr, CACHED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SCALED: tl.constexpr, SPLITS: tl.constexpr, FLAGS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x: [count, HEADS, D], or the parts of a product; see ``gemm.summed``."""
    token = tl.program_id(0).to(tl.int64)
    pdl.wait(PDL)
    pdl.launch_dependents(PDL)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, BLOCK)[None, :]
    partner = tl.where(column < R, column + R, tl.where(column < 2 * R, column - R, column))
    mask = (head < HEADS)[:, None] & (column < D)
    turned = (head < ROTATED)[:, None]
    y = _read(
        x, row_scale, scale_of_x, bias, count, token, head[:, None], column, mask,
        stride_token, stride_head, HEADS, D, SPLITS, FLAGS, out.dtype.element_ty,
    )  # fmt: skip
    z = _read(
        x, row_scale, scale_of_x, bias, count, token, head[:, None], partner, mask & turned,
        stride_token, stride_head, HEADS, D, SPLITS, FLAGS, out.dtype.element_ty,
    )  # fmt: skip
    if NORM:
        scale = tl.rsqrt(tl.sum(y * y, axis=1) / D + eps)[:, None]
        own = tl.load(weight + (head * D)[:, None] + column, mask=mask & turned, other=0.0)
        its = tl.load(weight + (head * D)[:, None] + partner, mask=mask & turned, other=0.0)
        own, its = own.to(tl.float32), its.to(tl.float32)
        y = tl.where(turned, y * scale * (1.0 + own if PLUS_ONE else own), y)
        z *= scale * (1.0 + its if PLUS_ONE else its)
    angle = token * R + tl.where(column < R, column, column - R)
    c = tl.load(cos + angle, mask=column < 2 * R, other=1.0)
    s = tl.load(sin + angle, mask=column < 2 * R, other=0.0)
    y = tl.where(turned, y * c + z * tl.where(column < R, -s, s), y)
    y = y.to(out.dtype.element_ty)
    to = out + token * OUT * D + (head * D)[:, None] + column
    tl.store(to, y, mask=mask & (head < OUT)[:, None])
    if CACHED:
        _store(
            y, head, k_cache, v_cache, k_scales, v_scales, tl.load(slot_mapping + token),
            stride_kb, stride_kh, stride_vb, stride_vh,
            HEADS, OUT, KV_HEADS, D, BLOCK, TILE, BLOCK_SIZE, SCALED,
        )  # fmt: skip


@dataclass(frozen=True)
class HeadNorm:
    """The norm of heads before their rotation.

    Attributes:
        weight: [H', D] for all heads that are rotated.
        plus_one: multiply by ``1 + weight``.
    """

    weight: Tensor
    eps: float
    plus_one: bool


@dataclass(frozen=True)
class Places:
    """Slots for keys and values of new tokens, in caches as in ``paged_attention``."""

    k_cache: Tensor
    v_cache: Tensor
    slot_mapping: Tensor  # [T] int64; negative: nowhere
    block_size: int


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2R dimensions of x [T, H, D] by cos and sin [T, R]; see ``reference.rope``.

    Raises:
        ValueError: shapes do not fit.
    """
    return rotate(x, x.shape[1], 0, cos, sin, None)


def rotate(
    x: Tensor | SplitProduct,
    heads: int,
    kv_heads: int,
    cos: Tensor,
    sin: Tensor,
    norm: HeadNorm | None,
    places: Places | None = None,
) -> Tensor:
    """Normalise and rotate queries and keys of x [T, H + 2 Hkv, D], the heads of Q, of K, of V.

    Args:
        x: or the parts of a product [T, (H + 2 Hkv) * D].
        cos, sin: [T, R] float32; the first 2R dimensions of a head are rotated.
        norm: None if heads are only rotated.
        places: None to return keys and values, too.

    Returns:
        x so changed; with ``places``, into which keys and values are written, Q [T, H, D] alone.

    Raises:
        ValueError: shapes do not fit.
    """
    if isinstance(x, SplitProduct):
        tokens, count = len(x.sums[0]), heads + 2 * kv_heads
        size = x.shape[1] // count
    else:
        tokens, count, size = x.shape
        x = last_contiguous(x)
    half = cos.shape[1]
    if cos.shape != (tokens, half) or sin.shape != cos.shape or 2 * half > size:
        raise ValueError(f"angles {list(cos.shape)} do not fit {list(x.shape)}")
    if count != heads + 2 * kv_heads:
        raise ValueError(f"{list(x.shape)} are not {heads} heads and {kv_heads} of keys and values")
    written = count if places is None else heads
    out = torch.empty((tokens, written, size), dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    block = power_of_2(size)
    tile = min(power_of_2(count), max(1, _NUMBERS // block))
    k_cache, v_cache = (None, None) if places is None else (places.k_cache, places.v_cache)
    strides = [
        0 if cache is None else cache.stride(dim) for cache in (k_cache, v_cache) for dim in (0, 1)
    ]
    numbers, factors, constants = as_read(x)
    _rotate[(tokens, triton.cdiv(count, tile))](
        numbers, *factors, None if norm is None else norm.weight.contiguous(), cos.contiguous(),
        sin.contiguous(), out,
        *(None if cache is None else as_bytes(cache) for cache in (k_cache, v_cache)),
        *(None if cache is None else scales_of(cache) for cache in (k_cache, v_cache)),
        None if places is None else places.slot_mapping,
        tokens, numbers.stride(0), numbers.stride(1), *strides, 0.0 if norm is None else norm.eps,
        HEADS=count, ROTATED=heads + kv_heads, OUT=written, KV_HEADS=kv_heads,
        D=size, R=half, BLOCK=block, TILE=tile,
        NORM=norm is not None, PLUS_ONE=norm is not None and norm.plus_one,
        CACHED=places is not None, BLOCK_SIZE=1 if places is None else places.block_size,
        SCALED=k_cache is not None and is_scaled(k_cache), **constants,
        num_warps=warps(tile * block), num_stages=1, enable_fp_fusion=False,
        **pdl.options(out.device),
    )  # fmt: skip
    return out
