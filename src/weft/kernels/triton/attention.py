"""Paged attention on GPUs: KV writes, split decode of short rows, prefill of longer rows.

Grids, workspace and the number of splits depend on shapes only; what differs from step to step is
read from device memory. So one captured graph serves every step of its shapes. A token's result
depends on its own context, and on whether its row has few tokens or more, but on no other row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from weft.kernels.interface import AttentionMetadata
from weft.kernels.kv_storage import row_size
from weft.kernels.triton import attend, kv_write, pdl
from weft.kernels.triton.device import capability, has_fp8, processors, shared_bytes
from weft.kernels.triton.launch import interpreted
from weft.kernels.triton.storage import as_bytes, scales_of
from weft.kernels.triton.tiles import Heads, Plan, padded, plan
from weft.kernels.triton.work_list import work_list
from weft.kernels.tuning import Tuning
from weft.kernels.unavailable import KernelUnavailable

__all__ = ["paged_attention", "plan_for", "plan_on"]

_MERGED = 16 * 512  # numbers of each of four splits that a program merges at once
_FLOATS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def paged_attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionMetadata,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None = None,
    value_dim: int | None = None,
    causal: bool = True,
    tuning: Tuning | None = None,
) -> Tensor:
    """Write K and V, then attend; see ``reference.paged_attention``.

    The factors of products are of the type of q, their sums float32. Slots, tables and lengths are
    not checked, since they are in device memory.

    Args:
        q: like ``k`` and ``v``, it may be a view into a fused matrix: only the last dimension must
            be contiguous.
        k_cache, v_cache: heads and blocks may lie anywhere, the bytes of one head of one block must
            lie together.
        value_dim: of latent attention, one KV head whose values are the ends of its keys; ``v`` and
            ``v_cache`` are those, and passed over.
        causal: there is no kernel for attention in both directions.
        tuning: where tiles and splits come from; without one by rule.

    Raises:
        ValueError: shapes or types do not fit; nothing has been written then.
        KernelUnavailable: the tuning is a file that has no launch for the shape, or attention is
            not causal; as above.
    """
    if not causal:
        raise KernelUnavailable("no kernel attends in both directions on a GPU")
    _check(q, k, v, k_cache, v_cache, batch)
    _check_latent(q, k_cache, value_dim)
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; it must be at least 1, or None")
    if batch.programs is not None and batch.programs < 1:
        raise ValueError(f"programs is {batch.programs}; it must be at least 1, or None")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}; it must be positive, or None")
    if sinks is not None and (sinks.shape != q.shape[1:2] or sinks.dtype != torch.float32):
        raise ValueError(
            f"sinks has shape {list(sinks.shape)} of {sinks.dtype}, expected [{q.shape[1]}] of "
            "float32"
        )
    chosen = plan_for(q, k_cache, batch.max_query_len, tuning, value_dim)
    tokens, heads, dim = q.shape
    rows, out = len(batch.seq_lens), torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if rows == 0 or tokens == 0:
        return out.zero_()
    if k is not None and v is not None:
        fresh = v if value_dim is None else None
        kv_write.write(k_cache, v_cache, k, fresh, batch.slot_mapping)
    value = dim if value_dim is None else value_dim
    shared = chosen.group < heads // k_cache.shape[1]  # tiles of heads read the same rows
    common = {
        "q": q,
        "keys": _numbers(k_cache),
        "values": _numbers(v_cache),
        "key_scales": scales_of(k_cache),
        "value_scales": scales_of(v_cache),
        "tables": batch.block_tables,
        "table_start": batch.table_start,
        "query_start": batch.query_start,
        "seq_lens": batch.seq_lens,
        "out": out,
        "rows": rows,
        "stride_qt": q.stride(0),
        "stride_qh": q.stride(1),
        "stride_kb": k_cache.stride(0),
        "stride_kh": 0 if shared else k_cache.stride(1),
        "stride_vb": v_cache.stride(0),
        "stride_vh": 0 if shared else v_cache.stride(1),
        "stride_table": batch.block_tables.stride(0),
        "scale": scale,
        "softcap": softcap or 1.0,
        "sinks": sinks,
        "HEADS": heads,
        "GROUP": chosen.group,
        "DIM": dim,
        "VALUE": value,
        "PADDED": padded(value),
        "EARLY": padded(dim - value),
        "BLOCK_SIZE": batch.block_size,
        "WINDOW": window or 0,
        "SOFTCAP": softcap is not None,
        "TYPE": _factor_type(q.dtype),
    }
    _few(chosen, batch, tokens, common)
    if min(batch.max_query_len or tokens, tokens) > chosen.few:
        _more(chosen, tokens, common)
    return out


def plan_for(
    q: Tensor,
    k_cache: Tensor,
    max_query_len: int | None,
    tuning: Tuning | None = None,
    value_dim: int | None = None,
) -> Plan:
    """Return how queries q [T, H, D] over a cache are computed. Raises as ``tiles.plan``."""
    heads, kv_heads = q.shape[1], k_cache.shape[1]
    if heads == 0 or kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"{heads} query heads are no multiple of the {kv_heads} heads of the cache"
        )
    found = Heads(kv_heads, heads // kv_heads, q.shape[2], q.dtype, k_cache.dtype, value_dim)
    return plan_on(found, q.device, max_query_len, tuning)


def plan_on(
    heads: Heads,
    device: torch.device,
    max_query_len: int | None = None,
    tuning: Tuning | None = None,
) -> Plan:
    """Return how attention is computed on a device. Raises as ``tiles.plan``."""
    major, _ = capability(device)
    return plan(heads, max_query_len, shared_bytes(device), tuning, major=major)


def _few(chosen: Plan, batch: AttentionMetadata, tokens: int, common: dict[str, Any]) -> None:
    """Compute rows of at most ``chosen.few`` tokens: their splits, which are listed once a step."""
    rows, heads, value = common["rows"], common["HEADS"], common["VALUE"]
    head_tiles, device = heads // chosen.group, common["q"].device
    work = work_list(batch, chosen, head_tiles, common["WINDOW"])
    programs = batch.programs or chosen.programs * processors(device)
    places = min(tokens, rows * chosen.few)
    sums = torch.empty(places, heads, chosen.splits, value, dtype=torch.float32, device=device)
    stats = torch.empty(places, heads, chosen.splits, 2, dtype=torch.float32, device=device)
    attend.decode_kernel[(min(programs, rows * head_tiles * chosen.splits),)](
        **{name: x for name, x in common.items() if name != "seq_lens"},
        items=work.items, arrived=work.arrived, partial_sums=sums, partial_stats=stats,
        tokens=tokens, SPLITS=chosen.splits,
        SLICE=min(common["PADDED"], _MERGED // chosen.decode.block_m),
        BLOCK_M=chosen.decode.block_m, BLOCK_N=chosen.decode.block_n,
        num_warps=chosen.decode.warps, num_stages=chosen.decode.stages, **pdl.options(device),
    )  # fmt: skip


def _more(chosen: Plan, tokens: int, common: dict[str, Any]) -> None:
    """Compute rows of more than ``chosen.few`` tokens."""
    rows, group, tile = common["rows"], common["GROUP"], chosen.prefill
    attend.prefill_kernel[(tokens // (tile.block_m // group) + rows, common["HEADS"] // group)](
        **common, FEW=chosen.few, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _numbers(cache: Tensor) -> Tensor:
    """Return what the kernels read codes from: E4M3 as bytes where the GPU has no such type."""
    return cache if has_fp8(cache.device) else as_bytes(cache)


def _factor_type(dtype: torch.dtype) -> tl.dtype:
    """The type of products' factors; the interpreter cannot multiply bfloat16."""
    return tl.float32 if interpreted() and dtype == torch.bfloat16 else _FLOATS[dtype]


def _check(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionMetadata,
) -> None:
    """Raise ValueError unless shapes, types and strides fit."""
    if (k is None) != (v is None):
        raise ValueError("k and v must both be given, or neither")
    if q.dtype not in _FLOATS:
        raise ValueError(f"q of shape {list(q.shape)} has type {q.dtype}; it must be a float")
    tokens, _, dim = q.shape
    for name, fresh in (("q", q), ("k", k), ("v", v)):
        if fresh is not None and fresh.stride(2) != 1:
            raise ValueError(f"{name} must be contiguous in its last dimension")
    row = row_size(k_cache.dtype, dim)
    for name, cache_ in (("k_cache", k_cache), ("v_cache", v_cache)):
        shape = (*k_cache.shape[:2], batch.block_size, row)
        if cache_.shape != shape or cache_.dtype != k_cache.dtype:
            raise ValueError(
                f"{name} has shape {list(cache_.shape)} of {cache_.dtype}, expected {list(shape)} "
                f"of {k_cache.dtype}"
            )
        if cache_.stride()[2:] != (row, 1):
            raise ValueError(f"{name} must hold the rows of a head of a block one after another")
    for name, fresh in (("k", k), ("v", v)):
        if fresh is not None and fresh.shape != (tokens, k_cache.shape[1], dim):
            raise ValueError(
                f"{name} has shape {list(fresh.shape)}, expected {[tokens, k_cache.shape[1], dim]}"
            )
    _check_batch(batch, tokens)


def _check_latent(q: Tensor, k_cache: Tensor, value_dim: int | None) -> None:
    """Raise ValueError unless values may be the last ``value_dim`` numbers of keys."""
    if value_dim is None:
        return
    if not 0 < value_dim < q.shape[2]:
        raise ValueError(f"value_dim is {value_dim}; it must be in 1 to {q.shape[2] - 1}, or None")
    if k_cache.shape[1] != 1:
        raise ValueError(f"with value_dim there is one KV head; k_cache has {k_cache.shape[1]}")


def _check_batch(batch: AttentionMetadata, tokens: int) -> None:
    rows = len(batch.seq_lens)
    tables, flat = batch.block_tables, batch.table_start is not None
    wanted = {
        "seq_lens": (batch.seq_lens, (rows,), torch.int32),
        "query_start": (batch.query_start, (rows + 1,), torch.int32),
        "slot_mapping": (batch.slot_mapping, (tokens,), torch.int64),
        "block_tables": (tables, tables.shape[:1] if flat else (rows, tables.shape[-1]), None),
        "table_start": (batch.table_start, (rows,), torch.int32),
    }
    for name, (tensor, shape, dtype) in wanted.items():
        if tensor is None:
            continue
        if tensor.shape != shape or tensor.dtype != (dtype or torch.int32):
            raise ValueError(
                f"{name} has shape {list(tensor.shape)} of {tensor.dtype}, expected {list(shape)} "
                f"of {dtype or torch.int32}"
            )
        if tensor.numel() and tensor.stride(-1) != 1:
            raise ValueError(f"{name} must be contiguous in its last dimension")
