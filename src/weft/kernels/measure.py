"""Cases of ``weft bench kernels``: every kernel on shapes of real models, with its minimum work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from weft.kernels.arrays import Array, address, numpy_dtype
from weft.kernels.cpu import _native
from weft.kernels.cpu import attention as cpu_attention
from weft.kernels.cpu.isa import chosen_isa
from weft.kernels.cpu.matrix import FORMATS
from weft.kernels.interface import AttentionMetadata, OpTable
from weft.kernels.ops import select_ops
from weft.kernels.storage import Storage

LARGER_THAN_CACHES = 192 * 2**20  # bytes; what is read again comes from memory
YARDSTICK_S = 0.4
ROUNDS = 20_000  # of a multiply-add yardstick: some tenths of a millisecond
SHAPES = ((768, 2048), (1024, 3072))  # hidden size and MLP of models of 0.1 and 0.6 billion weights
HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 1024, 16, 8, 128
VOCAB = 32000
BLOCK = 16


@dataclass(frozen=True)
class Case:
    """One kernel on one shape.

    Attributes:
        read_bytes: what it must read from memory at least.
        flops: multiplications and additions that it must do.
        dtype: of the numbers that are multiplied, one of ``FORMATS``: says which rate of products
            bounds it.
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


def threads() -> int:
    """The threads that kernels and yardsticks use."""
    return cpu_attention.threads()


def clock() -> float:
    """Seconds: of its CPU time for one thread, which others on the machine do not stretch."""
    return time.thread_time() if threads() == 1 else time.perf_counter()


def isa() -> str:
    """The instruction set of the kernels. Raises KernelUnavailable; see ``chosen_isa``."""
    return chosen_isa()


@cache
def _memory() -> Array:
    return np.ones(LARGER_THAN_CACHES // 8, np.int64)


def release() -> None:
    """Give the memory of ``read_rate`` back; the next one takes it again."""
    _memory.cache_clear()


def read_rate(seconds: float = YARDSTICK_S) -> float:
    """The best rate in bytes a second at which memory can be read, tried for so long."""
    words = _memory()
    took = _best(lambda: _native.read_all(address(words), len(words)), seconds)
    return LARGER_THAN_CACHES / took


def mean_read_rate(seconds: float = YARDSTICK_S) -> float:
    """The mean rate in bytes a second at which memory was read for so long, once at least."""
    words, reads, start = _memory(), 0, clock()
    while (took := clock() - start) < seconds or not reads:
        _native.read_all(address(words), len(words))
        reads += 1
    return reads * LARGER_THAN_CACHES / took


def multiply_rate(dtype: str, seconds: float = YARDSTICK_S) -> float:
    """The best rate of multiply-adds in registers, in operations a second.

    Those of the instructions by which the kernels multiply numbers of this dtype, one of
    ``FORMATS``, with the chosen instruction set.
    """
    format = next(code for code, name in FORMATS.items() if name == dtype)
    operations = _native.multiply_adds(format, ROUNDS)
    return operations / _best(lambda: _native.multiply_adds(format, ROUNDS), seconds)


def _random(shape: tuple[int, ...], dtype: str) -> Array:
    """Normally distributed numbers."""
    return np.random.default_rng(0).standard_normal(shape, np.float32).astype(numpy_dtype(dtype))


def _best(run: Callable[[], object], seconds: float) -> float:
    """The best time of a run, after a first one, and after one at least."""
    run()
    best, end = float("inf"), clock() + seconds
    while (start := clock()) < end or best == float("inf"):
        run()
        best = min(best, clock() - start)
    return best


def cases() -> Iterator[Case]:
    """Every case. What it computes with is made at its first run, and takes some 200 MB."""
    for dtype in ("bfloat16", "float32"):
        ops = select_ops("cpu", dtype)
        for hidden, mlp in SHAPES:
            yield from _products(ops, dtype, hidden, 2 * mlp)
        if dtype == "bfloat16":
            for hidden, mlp in SHAPES:
                yield from _quantised_products(ops, hidden, 2 * mlp)
        yield from _attention(ops, dtype)
        yield from _head(ops, dtype)


def _products(ops: OpTable, dtype: str, inputs: int, outputs: int) -> Iterator[Case]:
    """``gate_up`` of a layer: one weight for each turn, so that all come from memory."""
    one = outputs * inputs * numpy_dtype(dtype).itemsize

    @cache
    def weights() -> list[Any]:
        return [
            ops.pack("layers.0.gate_up", _random((outputs, inputs), dtype))
            for _ in range(-(-LARGER_THAN_CACHES // one))
        ]

    for rows in (1, 4, 16, 64, 512):
        yield Case(
            f"linear {dtype} {rows} x {inputs} x {outputs}",
            one,
            2.0 * rows * outputs * inputs,
            dtype,
            _product(lambda x, w: ops.linear(x, w, None), (rows, inputs), dtype, weights),
        )


def _quantised_products(ops: OpTable, inputs: int, outputs: int) -> Iterator[Case]:
    """The same with weights of 8 bits, a scale an output, and of 4, a scale for 128 inputs."""
    for storage in (Storage(8, None), Storage(4, 128)):
        name, shape = f"int{storage.bits}", (outputs, inputs)
        one = storage.nbytes(outputs, inputs, gated=True)
        weights = cache(partial(_quantised, ops, storage, shape, -(-LARGER_THAN_CACHES // one)))
        for rows in (1, 4, 16, 64):
            yield Case(
                f"linear {name} {rows} x {inputs} x {outputs}",
                one,
                2.0 * rows * outputs * inputs,
                name,
                _product(lambda x, w: ops.linear(x, w, None), (rows, inputs), "bfloat16", weights),
            )


def _quantised(ops: OpTable, storage: Storage, shape: tuple[int, int], count: int) -> list[Any]:
    weight = _random(shape, "bfloat16")
    weights = []
    for _ in range(count):
        matrix: Any = ops.quantise("layers.0.gate_up", shape, "bfloat16", storage)
        matrix.write(0, weight)
        weights.append(matrix)
    return weights


def _product(
    multiply: Callable[[Array, Any], Array],
    shape: tuple[int, int],
    dtype: str,
    weights: Callable[[], list[Any]],
) -> Callable[[], object]:
    @cache
    def made() -> tuple[Array, Iterator[Any]]:
        return _random(shape, dtype), iter_forever(weights())

    def run() -> object:
        x, turn = made()
        return multiply(x, next(turn))

    return run


def _head(ops: OpTable, dtype: str) -> Iterator[Case]:
    """The output head: float32 logits of a whole vocabulary."""
    one = VOCAB * HIDDEN * numpy_dtype(dtype).itemsize

    @cache
    def weights() -> list[Any]:
        return [
            ops.pack("lm_head", _random((VOCAB, HIDDEN), dtype))
            for _ in range(-(-LARGER_THAN_CACHES // one))
        ]

    for rows in (1, 16):
        yield Case(
            f"logits {dtype} {rows} x {HIDDEN} x {VOCAB}",
            one,
            2.0 * rows * VOCAB * HIDDEN,
            dtype,
            _product(ops.logits, (rows, HIDDEN), dtype, weights),
        )


def _attention(ops: OpTable, dtype: str) -> Iterator[Case]:
    for rows, context, queries in ((1, 2048, 1), (4, 2048, 1), (16, 2048, 1), (4, 2048, 2048)):
        one = 2 * rows * context * KV_HEADS * HEAD_DIM * numpy_dtype(dtype).itemsize
        copies = max(1, -(-LARGER_THAN_CACHES // one)) if queries == 1 else 1
        seen = queries * (context - (queries - 1) / 2)  # causal pairs of a sequence
        kind = "decode" if queries == 1 else "prefill"
        yield Case(
            f"attention {kind} {dtype} {rows} x {context}",
            one,
            4.0 * rows * HEADS * HEAD_DIM * seen,
            dtype,
            _attend(ops, dtype, rows, context, queries, copies),
        )


def _attend(
    ops: OpTable, dtype: str, rows: int, context: int, queries: int, copies: int
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
    dtype: str, rows: int, context: int, queries: int, copies: int
) -> tuple[Array, Array, Array, Iterator[tuple[Array, Array]], AttentionMetadata]:
    """Queries, keys and values of a step; caches in turns; where the step finds and writes them."""
    blocks = rows * context // BLOCK
    shape = (copies, blocks, KV_HEADS, BLOCK, HEAD_DIM)
    caches = list(zip(_random(shape, dtype), _random(shape, dtype), strict=True))
    tables = np.arange(blocks, dtype=np.int32).reshape(rows, -1)
    tokens = rows * queries
    q = _random((tokens, HEADS, HEAD_DIM), dtype)
    k, v = (_random((tokens, KV_HEADS, HEAD_DIM), dtype) for _ in range(2))
    starts = np.arange(rows + 1, dtype=np.int32) * np.int32(queries)
    lengths = np.full(rows, context, np.int32)
    slots = np.arange(rows)[:, None] * context + context - queries + np.arange(queries)
    batch = AttentionMetadata(tables, starts, lengths, slots.ravel(), BLOCK)
    return q, k, v, iter_forever(caches), batch


def iter_forever(items: list[Any]) -> Iterator[Any]:
    """The items in turns."""
    while True:
        yield from items
