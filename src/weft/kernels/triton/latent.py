"""Latent attention around its cache in fused kernels, absorbed (DeepSeek-V2 2024, appendix C).

A layer's first product gives queries, or their latent, and behind them the latent and the rotated
numbers of the row that all heads share. One kernel finishes the row, writes it into the cache and
normalises the queries' latent; one rotates queries and absorbs the rest of them into the space of
latents. What attends gives sums of latents, which a product by head turns into outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.float8 import Rounded
from weft.kernels.parts import LatentParts
from weft.kernels.triton import pdl
from weft.kernels.triton.gemm import SplitProduct, as_read, summed
from weft.kernels.triton.kv_write import store_rows
from weft.kernels.triton.launch import FLOATS, interpreted, last_contiguous, power_of_2, warps
from weft.kernels.triton.matrix import product
from weft.kernels.triton.norm import for_norm, normalise
from weft.kernels.triton.rope import Places
from weft.kernels.triton.storage import as_bytes, is_scaled, scales_of


@triton.jit
def _columns(
    x, row_scale, scale, bias, count, row, column, inside, stride,
    N: tl.constexpr, SPLITS: tl.constexpr, FLAGS: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Numbers of rows at columns of a product [count, N], or of its parts, in float32."""
    if SPLITS == 1:
        y = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    else:
        y = summed(x, row_scale, scale, bias, count, row, column, inside, N, SPLITS, FLAGS, TYPE)
    return y


@triton.jit
def _finish_row(
    x, row_scale, scale_of_x, bias, cos, sin, row_norm, rows, cache, cache_scales, slot_mapping,
    count, token, stride, stride_rows, stride_block, eps,
    N: tl.constexpr, QUERIES: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr,
    ANGLES: tl.constexpr, BLOCK: tl.constexpr, CACHED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SCALED: tl.constexpr,
    SPLITS: tl.constexpr, FLAGS: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Rotate and normalise the row of a token, and write it where it belongs."""
    place = tl.arange(0, BLOCK)[None, :]
    early, inside = place < 2 * R, place < 2 * R + RANK
    column = QUERIES + tl.where(early, RANK + place, place - 2 * R)
    partner = QUERIES + RANK + tl.where(place < R, place + R, place - R)
    at = token + place * 0
    y = _columns(
        x, row_scale, scale_of_x, bias, count, at, column, inside, stride, N, SPLITS, FLAGS, TYPE
    )
    z = _columns(
        x, row_scale, scale_of_x, bias, count, at, partner, early, stride, N, SPLITS, FLAGS, TYPE
    )
    squares = tl.sum(tl.where(early, 0.0, y * y), axis=1)
    factor = tl.load(row_norm + place - 2 * R, mask=inside & (place >= 2 * R), other=0.0)
    normal = y * tl.rsqrt(squares / RANK + eps)[:, None] * factor.to(tl.float32)
    angle = token * ANGLES + tl.where(place < R, place, place - R)
    c = tl.load(cos + angle, mask=early, other=1.0)
    s = tl.load(sin + angle, mask=early, other=0.0)
    y = tl.where(early, y * c + z * tl.where(place < R, -s, s), normal).to(TYPE)
    if CACHED:
        slot = tl.load(slot_mapping + token + tl.arange(0, 1))
        block, offset = tl.maximum(slot, 0) // BLOCK_SIZE, tl.maximum(slot, 0) % BLOCK_SIZE
        y = tl.where((slot >= 0)[:, None], y, 0.0)
        store_rows(
            cache, cache_scales, block * stride_block, offset.to(tl.int32), y, slot >= 0,
            2 * R + RANK, BLOCK, BLOCK_SIZE, SCALED,
        )  # fmt: skip
    else:
        to = rows + token * stride_rows + place
        tl.store(to, y, mask=inside)
        tl.store(to + (2 * R + RANK), y, mask=inside)


@triton.jit
def _finish_queries(
    x, row_scale, scale_of_x, bias, norm, static, queries, query_scales, count, token, stride, eps,
    N: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr, ROUND: tl.constexpr,
    STATIC: tl.constexpr, SPLITS: tl.constexpr, FLAGS: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Normalise the latent of a token's queries."""
    place = tl.arange(0, BLOCK)
    inside = place < QUERIES
    y = _columns(
        x, row_scale, scale_of_x, bias, count, token + place * 0, place, inside, stride,
        N, SPLITS, FLAGS, TYPE,
    )  # fmt: skip
    normalise(
        y, norm, static, queries, query_scales, token, place, inside, eps,
        QUERIES, ROUND, STATIC, False, TYPE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def _latent_rows(
    x, row_scale, scale_of_x, bias, cos, sin, row_norm, query_norm, static, rows, cache,
    cache_scales, slot_mapping, queries, query_scales,
    count, stride, stride_rows, stride_block, eps,
    N: tl.constexpr, QUERIES: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr,
    ANGLES: tl.constexpr, BLOCK: tl.constexpr, BLOCK_Q: tl.constexpr,
    ROUND: tl.constexpr, STATIC: tl.constexpr,
    CACHED: tl.constexpr, BLOCK_SIZE: tl.constexpr, SCALED: tl.constexpr, SPLITS: tl.constexpr,
    FLAGS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Finish the row of a token, and in a second program normalise its queries' latent.

    Grid: (tokens, 2 with a latent of queries, else 1). Columns of x: QUERIES, RANK, 2 R.
    """
    TYPE: tl.constexpr = rows.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    pdl.wait(PDL)
    pdl.launch_dependents(PDL)
    if tl.program_id(1) == 0:
        _finish_row(
            x, row_scale, scale_of_x, bias, cos, sin, row_norm, rows, cache, cache_scales,
            slot_mapping, count, token, stride, stride_rows, stride_block, eps,
            N, QUERIES, RANK, R, ANGLES, BLOCK, CACHED, BLOCK_SIZE, SCALED, SPLITS, FLAGS, TYPE,
        )  # fmt: skip
    elif queries is not None:
        _finish_queries(
            x, row_scale, scale_of_x, bias, query_norm, static, queries, query_scales, count,
            token, stride, eps, N, QUERIES, BLOCK_Q, ROUND, STATIC, SPLITS, FLAGS, TYPE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def _heads(
    x, row_scale, scale_of_x, bias, weights, cos, sin, out,
    count, stride_token, stride_out_token, stride_out_head,
    N: tl.constexpr, HEAD: tl.constexpr, K: tl.constexpr, OUT: tl.constexpr, R: tl.constexpr,
    ANGLES: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, FLAGS: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Multiply heads of x with matrices [OUT, K] of their own; tiles are those of ``gemm``.

    Head h has the columns from h * HEAD on. With R, the 2 R numbers behind the first K of a head
    are rotated and lie in front of its product. Where there are 2 R ANGLES, the latter half is
    that of queries, which are scaled by position, and so is the product.

    Grid: (blocks of tokens * blocks of outputs, heads).
    """
    TYPE: tl.constexpr = out.dtype.element_ty
    row_blocks = tl.cdiv(count, BLOCK_M)
    m = (tl.program_id(0) % row_blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    part = tl.program_id(0) // row_blocks
    n = part * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.program_id(1)
    m_in, n_in, token = m < count, n < OUT, m.to(tl.int64)
    own = weights + head.to(tl.int64) * (OUT * K)
    to = out + token * stride_out_token + head * stride_out_head
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    pdl.wait(PDL)
    pdl.launch_dependents(PDL)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        w = tl.load(
            own + n[:, None] * K + k[None, :], mask=n_in[:, None] & (k < K)[None, :], other=0.0
        )
        inside = (k < K)[:, None] & m_in[None, :]
        rows = _columns(
            x, row_scale, scale_of_x, bias, count, token[None, :] + k[:, None] * 0,
            head * HEAD + k[:, None] + m[None, :] * 0, inside, stride_token, N, SPLITS, FLAGS, TYPE,
        )  # fmt: skip
        acc = tl.dot(w.to(OPERAND), rows.to(OPERAND), acc, input_precision=PRECISION)
    if ANGLES > R:
        at = token * ANGLES
        c = tl.load(cos + at, mask=m_in, other=1.0)
        s = tl.load(sin + at, mask=m_in, other=0.0)
        own = tl.load(cos + at + R, mask=m_in, other=1.0) * c
        own += tl.load(sin + at + R, mask=m_in, other=0.0) * s
        acc *= (own / (c * c + s * s))[None, :]
    inside = n_in[:, None] & m_in[None, :]
    tl.store(to[None, :] + 2 * R + n[:, None], acc.to(TYPE), mask=inside)
    if R:  # by the first block of outputs
        place = tl.arange(0, BLOCK_R)[None, :]
        early = m_in[:, None] & (place < 2 * R) & (part == 0)
        partner = tl.where(place < R, place + R, place - R)
        at, first = token[:, None] + place * 0, head * HEAD + K + m[:, None] * 0
        y = _columns(
            x, row_scale, scale_of_x, bias, count, at, first + place, early, stride_token,
            N, SPLITS, FLAGS, TYPE,
        )  # fmt: skip
        z = _columns(
            x, row_scale, scale_of_x, bias, count, at, first + partner, early, stride_token,
            N, SPLITS, FLAGS, TYPE,
        )  # fmt: skip
        angle = at * ANGLES + (ANGLES - R) + tl.where(place < R, place, place - R)
        c = tl.load(cos + angle, mask=early, other=1.0)
        s = tl.load(sin + angle, mask=early, other=0.0)
        y = y * c + z * tl.where(place < R, -s, s)
        tl.store(to[:, None] + place, y.to(TYPE), mask=early)


def heads(x: Tensor, weights: Tensor) -> Tensor:
    """Multiply each head of x [T, H, I] with its own matrix of [H, O, I]: [T, H, O].

    Args:
        x: heads may lie anywhere in the rows of tokens, at equal distances.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    tokens, count, inputs = x.shape
    if weights.shape[::2] != (count, inputs) or weights.dtype != x.dtype:
        raise ValueError(
            f"x {list(x.shape)} of {x.dtype} does not fit weights {list(weights.shape)} of "
            f"{weights.dtype}"
        )
    x = last_contiguous(x)
    out = torch.empty((tokens, count, weights.shape[1]), dtype=x.dtype, device=x.device)
    _multiply(x, x.stride(0), x.stride(1), weights, None, 0, out)
    return out


def _multiply(
    x: Tensor | SplitProduct,
    stride: int,
    head: int,
    weights: Tensor,
    angles: tuple[Tensor, Tensor] | None,
    half: int,
    out: Tensor,
) -> None:
    """Launch ``_heads``.

    Args:
        stride, head: numbers between tokens, unless x lies in parts, and between heads.
        angles: of what is rotated and put before products.
        half: of what is rotated, the half.
        out: [T, H, O'], of heads one after the other.
    """
    tokens, (count, outputs, inputs) = len(out), weights.shape
    if not tokens:
        return
    numbers, factors, constants = as_read(x)
    cos, sin = (None, None) if angles is None else angles
    width = 0 if cos is None else cos.shape[1]
    wide, parted = x.dtype == torch.float32, constants["SPLITS"] > 1
    block_m = 16 if tokens <= 16 else 32 if wide or parted else 64
    block_n = min(max(16, power_of_2(outputs)), 32 if wide else 64)
    block_k = min(max(16, power_of_2(inputs)), 32 if wide or parted else 64)
    operand = tl.float32 if interpreted() else FLOATS[x.dtype]
    grid = (triton.cdiv(tokens, block_m) * triton.cdiv(outputs, block_n), count)
    _heads[grid](
        numbers, *factors, weights, cos, sin, out, tokens, stride, out.stride(0), out.stride(1),
        N=x.shape[-1], HEAD=head, K=inputs, OUT=outputs,
        R=half, ANGLES=width, BLOCK_R=power_of_2(max(1, 2 * half)),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, OPERAND=operand,
        PRECISION="ieee" if wide else "tf32", **constants,
        num_warps=4, num_stages=1 if parted else 3, enable_fp_fusion=False,
        **pdl.options(out.device),
    )  # fmt: skip


class LatentHeads:
    """What a layer of latent attention does to its first product, and to what was attended."""

    def __init__(self, parts: LatentParts, heads: int) -> None:
        """Bind its weights.

        Raises:
            ValueError: shapes do not fit together.
        """
        self._parts = parts
        self._heads = heads
        self.rotated = parts.rotated
        self.value_dim, self._plain = parts.key_up.shape[1:]
        expected = {
            "key_up": (heads, self.value_dim, self._plain),
            "value_up": (heads, parts.value_up.shape[1], self.value_dim),
        }
        for name, shape in expected.items():
            given = getattr(parts, name).shape
            if tuple(given) != shape:
                raise ValueError(f"{name} {list(given)}: expected {list(shape)}")

    def queries(
        self, joint: Tensor | SplitProduct, cos: Tensor, sin: Tensor, places: Places | None
    ) -> Tensor:
        """Return absorbed queries [T, H, R]; the row of each token is written where it belongs.

        Args:
            joint: [T, Q + rank + rotated], or its parts.
            cos, sin: [T, rotated / 2] float32, or twice as many with those of queries behind.
            places: None to return the rows as well, twice, as keys and values: [T, H + 2, R].

        Raises:
            ValueError: shapes do not fit.
        """
        tokens, half = joint.shape[0], self.rotated // 2
        if sin.shape != cos.shape or tuple(cos.shape) not in ((tokens, half), (tokens, 2 * half)):
            raise ValueError(f"angles {list(cos.shape)} do not fit {list(joint.shape)}")
        more = 2 if places is None else 0
        width = self.rotated + self.value_dim
        out = torch.empty(
            (tokens, self._heads + more, width), dtype=joint.dtype, device=joint.device
        )
        if not tokens:
            return out
        angles = cos.contiguous(), sin.contiguous()
        latent = self._finish_rows(joint, angles, places, out)
        up, q = self._parts.query_up, joint
        if latent is not None and up is not None:
            q = product(latent, up, None)
        stride = q.stride(0) if isinstance(q, Tensor) else 0
        head = self._plain + self.rotated
        _multiply(q, stride, head, self._parts.key_up, angles, half, out[:, : self._heads])
        return out

    def _finish_rows(
        self,
        joint: Tensor | SplitProduct,
        angles: tuple[Tensor, Tensor],
        places: Places | None,
        out: Tensor,
    ) -> Tensor | Rounded | None:
        """Write the rows, and return the normalised latent of queries [T, Q]."""
        parts, tokens = self._parts, len(out)
        total, width = joint.shape[1], out.shape[2]
        queries = total - width
        inputs = "float" if parts.query_up is None else parts.query_up.inputs
        made, scales = None, None
        if parts.query_up is not None:
            made, scales = for_norm(out.new_empty(1, 1).expand(tokens, queries), inputs)
        numbers, factors, constants = as_read(joint)
        cache = None if places is None else places.k_cache
        rows = out[:, self._heads :] if places is None else out
        block, block_q = power_of_2(width), power_of_2(queries)
        _latent_rows[(tokens, 1 if made is None else 2)](
            numbers, *factors, *angles, parts.row_norm, parts.query_norm,
            inputs if isinstance(inputs, Tensor) else None, rows,
            None if cache is None else as_bytes(cache),
            None if cache is None else scales_of(cache),
            None if places is None else places.slot_mapping, made, scales,
            tokens, numbers.stride(-2), rows.stride(0), 0 if cache is None else cache.stride(0),
            parts.norm_eps,
            N=total, QUERIES=queries, RANK=self.value_dim, R=self.rotated // 2,
            ANGLES=angles[0].shape[1], BLOCK=block, BLOCK_Q=block_q, ROUND=scales is not None,
            STATIC=isinstance(inputs, Tensor), CACHED=places is not None,
            BLOCK_SIZE=1 if places is None else places.block_size,
            SCALED=cache is not None and is_scaled(cache), **constants,
            num_warps=warps(max(block, block_q)), num_stages=1, enable_fp_fusion=False,
            **pdl.options(out.device),
        )  # fmt: skip
        if made is None:
            return None
        return made if scales is None else Rounded(made, scales)

    def outputs(self, attended: Tensor) -> Tensor:
        """Return the heads' outputs [T, H, value] of weighted sums of rows [T, H, R]."""
        return heads(attended[..., self.rotated :], self._parts.value_up)
