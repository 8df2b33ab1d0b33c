"""Paged attention against the bounds of memory and matrix products, on the shapes of some models.

    python benchmarks/attention.py [--isa avx2] [--out benchmarks/results/attention.json]

Decode is compared with reading the same caches, prefill with a bfloat16 product of torch,
each run next to the other in turn; the ratio is the median of the pairs. A decode case reads other
layers in turn, so that all comes from memory.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import report
from weft.core.kv_types import cache_dtype
from weft.exec.store import KVStore
from weft.kernels.arrays import address
from weft.kernels.cpu import _native
from weft.kernels.cpu import attention as cpu
from weft.kernels.interface import AttentionMetadata
from weft.kernels.kv_storage import KV_DTYPES
from weft.models.spec import KVGroup

# heads, KV heads, head size; Q: of Qwen2.5-0.5B
SHAPES = {"A": (12, 4, 64), "B": (16, 8, 128), "Q": (14, 2, 64)}
BLOCK = 16
LARGER_THAN_CACHES = 192 * 2**20
PAUSE_S = 0.05  # torch's threads spin on the cores for some milliseconds after a product
KV = {"bfloat16": torch.bfloat16, "float32": torch.float32, **KV_DTYPES}


class Inputs:
    """Rows of equal length; each call computes the next of some layers."""

    def __init__(self, shape: str, rows: int, context: int, queries: int, kv: str, shared: int = 0):
        heads, kv_heads, size = SHAPES[shape]
        blocks = rows * context // BLOCK
        dtype = torch.float32 if kv == "float32" else torch.bfloat16
        one = 2 * rows * context * kv_heads * size * KV[kv].itemsize
        layers = -(-LARGER_THAN_CACHES // one) if queries == 1 else 1
        group = KVGroup("full", tuple(range(layers)), None, kv_heads, size)
        self.store = KVStore([group], [blocks], BLOCK, cache_dtype(kv))
        tables = torch.randperm(blocks, dtype=torch.int32).view(rows, -1)
        tables[:, : shared // BLOCK] = tables[0, : shared // BLOCK].clone()
        every = torch.arange(blocks * BLOCK)
        fill = torch.randn(len(every), kv_heads, size).to(dtype)
        self.q = torch.randn(rows * queries, heads, size).to(dtype)
        starts = torch.arange(rows + 1, dtype=torch.int32)
        lengths = torch.full((rows,), context, dtype=torch.int32)
        self.scale = size**-0.5
        for caches in self.caches():
            writer = AttentionMetadata(
                every.int().div(BLOCK, rounding_mode="floor").view(-1, 1),
                torch.arange(len(every) + 1, dtype=torch.int32),
                torch.ones(len(every), dtype=torch.int32),
                every,
                BLOCK,
            )
            once = fill[:, :1].expand(-1, 1, -1) if heads == kv_heads else fill
            self.attend(once, fill, fill, *caches, writer)
        slots = torch.zeros(rows * queries, dtype=torch.int64)
        self.batch = AttentionMetadata(tables, starts * queries, lengths, slots, BLOCK)
        self.turn = itertools.cycle(self.caches())
        self.read_bytes = sum(t.nbytes for t in self.caches()[0])
        self.flops = 4 * heads * size * rows * queries * (context - (queries - 1) / 2)

    def caches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(zip(self.store.keys[0], self.store.values[0], strict=True))

    def attend(
        self, q: Any, k: Any, v: Any, keys: Any, values: Any, batch: AttentionMetadata
    ) -> None:
        cpu.paged_attention(
            q, k, v, keys, values, batch, scale=self.scale, window=None, softcap=None
        )

    def run(self) -> None:
        self.attend(self.q, None, None, *next(self.turn), self.batch)

    def read(self) -> None:
        """Read what one call reads, by the yardstick's own loop."""
        for tensor in next(self.turn):
            _native.read_all(address(tensor), tensor.nbytes // 8)


def seconds(run: Callable[[], object], pause_s: float) -> float:
    time.sleep(pause_s)
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def compare(
    run: Callable[[], object], yardstick: Callable[[], object], pairs: int, pause_s: float = 0.0
) -> list[Any]:
    """Times of both, in turn, the first pair left out."""
    both = (run, yardstick)
    return [tuple(seconds(one, pause_s) for one in both) for _ in range(pairs + 1)][1:]


def row_of(name: str, times: list[Any], work: float, yardstick_work: float) -> dict[str, Any]:
    ratios = [(work / a) / (yardstick_work / b) for a, b in times]
    row = {
        "case": name,
        "rate": work / statistics.median(a for a, _ in times),
        "yardstick": yardstick_work / statistics.median(b for _, b in times),
        "ratio": statistics.median(ratios),
        "best_ratio": work / min(a for a, _ in times) * min(b for _, b in times) / yardstick_work,
        "ratios": sorted(ratios),
    }
    print(
        f"{name:<40}{row['rate'] / 1e9:>9.1f}{row['yardstick'] / 1e9:>9.1f}{row['ratio']:>7.2f}"
        f"{row['best_ratio']:>7.2f}",
        flush=True,
    )
    return row


def decode(shape: str, kv: str, rows: int, context: int, pairs: int) -> dict[str, Any]:
    inputs = Inputs(shape, rows, context, 1, kv)
    times = compare(inputs.run, inputs.read, pairs)
    work = inputs.read_bytes
    return row_of(f"decode {shape} {kv} batch {rows} context {context}", times, work, work)


def prefill(shape: str, kv: str, tokens: int, pairs: int) -> dict[str, Any]:
    inputs = Inputs(shape, 1, tokens, tokens, kv)
    a, b = (torch.randn(2048, 2048).bfloat16() for _ in range(2))
    times = compare(inputs.run, lambda: a @ b, pairs, PAUSE_S)
    return row_of(f"prefill {shape} {kv} {tokens} tokens", times, inputs.flops, 2 * 2048**3)


def cascade(shape: str, rows: int, context: int, pairs: int) -> dict[str, Any]:
    """Rows that share all but 256 tokens, against the same rows with blocks of their own."""
    together = Inputs(shape, rows, context, 1, "bfloat16", shared=context - 256)
    apart = Inputs(shape, rows, context, 1, "bfloat16")
    times = compare(together.run, apart.run, pairs)
    return row_of(f"cascade {shape} batch {rows} context {context}", times, 1e9, 1e9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="fewer shapes")
    parser.add_argument("--isa", choices=cpu.isas(), help="instruction set; the widest")
    options = parser.parse_args()
    cpu.use_isa(options.isa or cpu.isa())
    cpu.set_threads(options.threads)
    torch.set_num_threads(options.threads)
    print(f"{'GB/s or GFLOP/s':<40}{'kernel':>9}{'bound':>9}{'ratio':>7}{'best':>7}")
    rows = []
    sizes = [(4, 2048), (16, 2048)] if options.quick else [
        (rows, context) for context in (512, 2048, 8192, 16384) for rows in (1, 4, 16)
    ]  # fmt: skip
    for shape in SHAPES:
        for kv in ("bfloat16", "float32", "int8", "fp8"):
            for count, context in sizes if kv == "bfloat16" else [(4, 2048)]:
                rows.append(decode(shape, kv, count, context, options.pairs))
        for tokens in (2048,) if options.quick else (512, 1024, 2048, 4096):
            rows.append(prefill(shape, "bfloat16", tokens, options.pairs))
        rows.append(cascade(shape, 16, 2048, options.pairs))
    if options.out:
        facts = {"torch": torch.__version__, "isa": cpu.isa(), "threads": options.threads}
        report.save(options.out, **facts, rows=rows)


if __name__ == "__main__":
    main()
