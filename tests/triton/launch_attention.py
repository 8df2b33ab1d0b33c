"""Launches paged attention of some shapes, for ``ahead``."""

from __future__ import annotations

import torch

from weft.kernels.interface import AttentionMetadata
from weft.kernels.kv_storage import KV_DTYPES, row_size
from weft.kernels.triton import attention, device
from weft.kernels.triton.tiles import Heads

# Bytes of a block (CUDA guide, table 30).
SHARED = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
BLOCK = 16
SIZES = ["4x64", "4x128", "4x256", "4x512", "1x80", "1x96", "7x128", "16x192", "71x64"]
# Rows of 64 numbers of keys alone and a latent: DeepSeek V2 Lite, GLM-4.7-Flash, V3, MiniCPM3.
LATENT = ["16x64+512", "20x64+512", "128x64+512", "40x32+256"]
LIMITED = ["2x128/4096/50", "2x256/4096/50"]  # a window and a soft cap, as Gemma 2 has them
EVERY = [
    *(f"bfloat16/{cache}/{size}" for cache in ("bfloat16", "fp8") for size in SIZES),
    *(f"bfloat16/{cache}/{size}" for cache in ("bfloat16", "fp8", "int8") for size in LIMITED),
    *("float16/float16/2x256/4096/50", "float32/float32/2x256/4096/50"),
    *("bfloat16/int8/4x128", "float16/float16/4x128", "float16/int8/4x128"),
    *(f"float32/float32/{size}" for size in SIZES),
    "bfloat16/bfloat16/8x64/128/0/sinks",  # as gpt-oss has them
    *(f"bfloat16/{cache}/{size}" for cache in ("bfloat16", "fp8", "int8") for size in LATENT),
    *("float16/float16/16x64+512", "float32/float32/16x64+512"),
]


def launch(capability: int, *shapes: str, e4m3_from: int = 89) -> None:
    """Launch all kernels for shapes such as ``bfloat16/fp8/4x128``: type, KV, group x head size.

    Heads ``16x64+512`` share a latent row of 512 numbers behind 64 of the key alone.

    ``bfloat16/fp8/4x128/4096/50`` has a window of 4096 tokens and scores capped at 50, too; with
    ``/sinks`` behind them there are sinks, and 0 is no cap.

    Args:
        shapes: none for every shape that has tiles of its own.
        e4m3_from: the first capability with this type.
    """
    attention.shared_bytes = lambda _: SHARED[capability]
    device.capability = attention.capability = lambda _: divmod(capability, 10)
    attention.has_fp8 = lambda _: capability >= e4m3_from
    for shape in shapes or EVERY:
        launch_shape(*shape.split("/"))


def heads_of(shape: str) -> Heads:
    """The heads of a shape."""
    dtype, cache, sizes, *_ = shape.split("/")
    group, dims = sizes.split("x")
    before, *latent = map(int, dims.split("+"))
    stored = KV_DTYPES.get(cache) or getattr(torch, cache)
    types = getattr(torch, dtype), stored
    return Heads(1 if latent else 8, int(group), sum(latent, before), *types, *latent)


def launch_as_if_with_e4m3(capability: int) -> None:
    """Launch kernels that read a type which GPUs before ``sm_89`` have not."""
    launch(capability, "bfloat16/fp8/4x64", e4m3_from=0)


def launch_shape(
    dtype_name: str,
    cache_name: str,
    sizes: str,
    window: str | None = None,
    softcap: str | None = None,
    sinks: str | None = None,
) -> None:
    heads = heads_of(f"{dtype_name}/{cache_name}/{sizes}")
    kv_heads, group, dim = heads.kv_heads, heads.group, heads.dim
    dtype, cache_dtype = heads.dtype, heads.cache_dtype
    tokens, rows = 64, 16
    fused = torch.empty(tokens, (group + 2) * kv_heads * dim, dtype=dtype)
    q, k, v = fused.view(tokens, -1, dim).split([group * kv_heads, kv_heads, kv_heads], dim=1)
    caches = [
        torch.empty(4, kv_heads, BLOCK, row_size(cache_dtype, dim), dtype=cache_dtype)
        for _ in range(2)
    ]
    batch = AttentionMetadata(
        block_tables=torch.empty(256, dtype=torch.int32),
        query_start=torch.empty(rows + 1, dtype=torch.int32),
        seq_lens=torch.empty(rows, dtype=torch.int32),
        slot_mapping=torch.empty(tokens, dtype=torch.int64),
        block_size=BLOCK,
        table_start=torch.empty(rows, dtype=torch.int32),
    )
    attention.paged_attention(
        q, k, v, *caches, batch, scale=0.1,
        window=None if window is None else int(window),
        softcap=float(softcap or 0) or None,
        sinks=None if sinks is None else torch.empty(group * kv_heads),
        value_dim=heads.value_dim,
    )  # fmt: skip
