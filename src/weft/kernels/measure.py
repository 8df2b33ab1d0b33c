"""Cases of ``weft bench kernels``: every kernel on shapes of real models, with its minimum work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from weft.kernels.cpu import _native
from weft.kernels.cpu import attention as cpu_attention
from weft.kernels.interface import AttentionMetadata, OpTable
from weft.kernels.ops import select_ops
from weft.kernels.storage import Storage

LARGER_THAN_CACHES = 192 * 2**20  # bytes; what is read again comes from memory
YARDSTICK_S = 0.4
HIDDEN, MLP, HEADS, KV_HEADS, HEAD_DIM = 1024, 3072, 16, 8, 128
VOCAB = 32000
BLOCK = 16


@dataclass(frozen=True)
class Case:
    """One kernel on one shape.

    Attributes:
        read_bytes: what it must read from memory at least.
        flops: multiplications and additions that it must do.
        dtype: of the activations; says which rate of products it may reach.
        run: computes it once, the first time from what it makes then; calls in a row use other
            memory.
    """

    name: str
    read_bytes: float
    flops: float
    dtype: str
    run: Callable[[], object]


def set_threads(count: int) -> None:
    """Use ``count`` threads in the kernels and in the yardsticks."""
    cpu_attention.set_threads(count)
    torch.set_num_threads(count)


def read_rate() -> float:
    """The best rate in bytes a second at which memory can be read."""
    words = torch.ones(LARGER_THAN_CACHES // 8, dtype=torch.int64)
    took = _best(lambda: _native.read_all(words.data_ptr(), len(words)))
    return LARGER_THAN_CACHES / took


def matmul_rate(dtype: str) -> float:
    """The best rate of torch's large products of a dtype, in operations a second."""
    side = 2048
    a, b = (torch.randn(side, side, dtype=getattr(torch, dtype)) for _ in range(2))
    return 2 * side**3 / _best(lambda: a @ b)


def _best(run: Callable[[], object]) -> float:
    run()
    best, end = float("inf"), time.perf_counter() + YARDSTICK_S
    while (start := time.perf_counter()) < end:
        run()
        best = min(best, time.perf_counter() - start)
    return best


def cases() -> Iterator[Case]:
    """Every case. What it computes with is made at its first run, and takes some 200 MB."""
    for dtype in (torch.bfloat16, torch.float32):
        ops = select_ops(torch.device("cpu"), dtype)
        name = str(dtype).removeprefix("torch.")
        yield from _products(ops, dtype, name)
        if dtype == torch.bfloat16:
            yield from _quantised_products(ops)
        yield from _attention(ops, dtype, name)
        yield from _head(ops, dtype, name)


def _products(ops: OpTable, dtype: torch.dtype, name: str) -> Iterator[Case]:
    """``gate_up`` of a layer: one weight for each turn, so that all come from memory."""
    one = 2 * MLP * HIDDEN * dtype.itemsize

    @cache
    def weights() -> list[Any]:
        return [
            ops.pack("layers.0.gate_up", torch.randn(2 * MLP, HIDDEN, dtype=dtype))
            for _ in range(-(-LARGER_THAN_CACHES // one))
        ]

    for rows in (1, 4, 16, 64, 512):
        yield Case(
            f"linear {name} {rows} x {HIDDEN} x {2 * MLP}",
            one,
            2.0 * rows * 2 * MLP * HIDDEN,
            name,
            _product(lambda x, weight: ops.linear(x, weight, None), rows, dtype, weights),
        )


def _quantised_products(ops: OpTable) -> Iterator[Case]:
    """The same with weights of 8 bits, a scale an output, and of 4, a scale for 128 inputs."""
    for storage in (Storage(8, None), Storage(4, 128)):
        one = storage.nbytes(2 * MLP, HIDDEN, gated=True)
        weights = cache(partial(_quantised, ops, storage, -(-LARGER_THAN_CACHES // one)))
        for rows in (1, 4, 16, 64):
            yield Case(
                f"linear int{storage.bits} {rows} x {HIDDEN} x {2 * MLP}",
                one,
                2.0 * rows * 2 * MLP * HIDDEN,
                "bfloat16",
                _product(lambda x, w: ops.linear(x, w, None), rows, torch.bfloat16, weights),
            )


def _quantised(ops: OpTable, storage: Storage, count: int) -> list[Any]:
    shape = torch.Size((2 * MLP, HIDDEN))
    weight = torch.randn(shape, dtype=torch.bfloat16)
    weights = []
    for _ in range(count):
        matrix: Any = ops.quantise("layers.0.gate_up", shape, torch.bfloat16, storage)
        matrix.write(0, weight)
        weights.append(matrix)
    return weights


def _product(
    multiply: Callable[[Tensor, Any], Tensor],
    rows: int,
    dtype: torch.dtype,
    weights: Callable[[], list[Any]],
) -> Callable[[], object]:
    @cache
    def made() -> tuple[Tensor, Iterator[Any]]:
        return torch.randn(rows, HIDDEN, dtype=dtype), iter_forever(weights())

    def run() -> object:
        x, turn = made()
        return multiply(x, next(turn))

    return run


def _head(ops: OpTable, dtype: torch.dtype, name: str) -> Iterator[Case]:
    """The output head: float32 logits of a whole vocabulary."""
    one = VOCAB * HIDDEN * dtype.itemsize

    @cache
    def weights() -> list[Any]:
        return [
            ops.pack("lm_head", torch.randn(VOCAB, HIDDEN, dtype=dtype))
            for _ in range(-(-LARGER_THAN_CACHES // one))
        ]

    for rows in (1, 16):
        yield Case(
            f"logits {name} {rows} x {HIDDEN} x {VOCAB}",
            one,
            2.0 * rows * VOCAB * HIDDEN,
            name,
            _product(ops.logits, rows, dtype, weights),
        )


def _attention(ops: OpTable, dtype: torch.dtype, name: str) -> Iterator[Case]:
    for rows, context, queries in ((1, 2048, 1), (4, 2048, 1), (16, 2048, 1), (4, 2048, 2048)):
        one = 2 * rows * context * KV_HEADS * HEAD_DIM * dtype.itemsize
        copies = max(1, -(-LARGER_THAN_CACHES // one)) if queries == 1 else 1
        seen = queries * (context - (queries - 1) / 2)  # causal pairs of a sequence
        kind = "decode" if queries == 1 else "prefill"
        yield Case(
            f"attention {kind} {name} {rows} x {context}",
            one,
            4.0 * rows * HEADS * HEAD_DIM * seen,
            name,
            _attend(ops, dtype, rows, context, queries, copies),
        )


def _attend(
    ops: OpTable, dtype: torch.dtype, rows: int, context: int, queries: int, copies: int
) -> Callable[[], object]:
    scale = HEAD_DIM**-0.5
    made = cache(partial(_attention_inputs, dtype, rows, context, queries, copies))

    def run() -> object:
        q, k, v, turn, batch = made()
        k_cache, v_cache = next(turn)
        return ops.paged_attention(
            q, k, v, k_cache, v_cache, batch, scale=scale, window=None, softcap=None
        )

    return run


def _attention_inputs(
    dtype: torch.dtype, rows: int, context: int, queries: int, copies: int
) -> tuple[Tensor, Tensor, Tensor, Iterator[tuple[Tensor, Tensor]], AttentionMetadata]:
    """Queries, keys and values of a step; caches in turns; where the step finds and writes them."""
    blocks = rows * context // BLOCK
    shape = (copies, blocks, KV_HEADS, BLOCK, HEAD_DIM)
    caches = list(zip(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), strict=True))
    tables = torch.arange(blocks, dtype=torch.int32).view(rows, -1)
    tokens = rows * queries
    q = torch.randn(tokens, HEADS, HEAD_DIM, dtype=dtype)
    k, v = (torch.randn(tokens, KV_HEADS, HEAD_DIM, dtype=dtype) for _ in range(2))
    starts = torch.arange(rows + 1, dtype=torch.int32) * queries
    lengths = torch.full((rows,), context, dtype=torch.int32)
    slots = (torch.arange(rows)[:, None] * context + context - queries
             + torch.arange(queries)).flatten()  # fmt: skip
    return q, k, v, iter_forever(caches), AttentionMetadata(tables, starts, lengths, slots, BLOCK)


def iter_forever(items: list[Any]) -> Iterator[Any]:
    """The items in turns."""
    while True:
        yield from items
