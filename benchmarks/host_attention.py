"""Cost of the host worker beside direct calls of paged attention, and of its bookkeeping.

    python benchmarks/host_attention.py [--process] [--out benchmarks/results/host_attention.json]

Rows wait in one layer together. Each round calls the kernel directly and then has the worker
compute the same rows, with as many threads; the ratio is the median of the rounds. Bookkeeping is
what the client's thread spends on such a batch of a layer (submit, find, take) with rows of 8
numbers, so that hardly anything is copied; copying the rows of the shape is given beside it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

import report
from weft.kernels.arrays import numpy_dtype
from weft.kernels.cpu import attention
from weft.kernels.cpu.host import HostLayer, HostMailbox, HostWorker, SharedMemory
from weft.kernels.cpu.host_process import HostProcess
from weft.kernels.interface import AttentionMetadata

BLOCK = 16
HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128
CASES = [(1, 1024), (1, 8192), (16, 256), (16, 2048), (64, 512), (400, 64)]  # rows, context
BOOKED = 400  # rows, as OmniServe counts them (section 5.3)


class Batch:
    """Rows of equal context that wait in the only layer, in bfloat16."""

    def __init__(self, rows: int, context: int, heads: int, kv_heads: int, head_dim: int) -> None:
        width, kind = context // BLOCK, numpy_dtype("bfloat16")
        cache = (rows * width, kv_heads, BLOCK, head_dim)
        each = int(np.prod(cache)) * kind.itemsize
        self.kv = SharedMemory.create("kv", 2 * each)
        keys, values = (self.kv.array(i * each, cache, "bfloat16") for i in range(2))
        numbers = np.random.default_rng(0)
        for part in (keys, values):
            part[:] = numbers.standard_normal(cache[1:], np.float32).astype(kind)
        self.layer = HostLayer(keys, values, heads, head_dim**-0.5)
        self.q, self.k, self.v = (
            numbers.standard_normal((rows, n, head_dim), np.float32).astype(kind)
            for n in (heads, kv_heads, kv_heads)
        )
        tables = numbers.permutation(rows * width).astype(np.int32).reshape(rows, width)
        last = tables[:, -1].astype(np.int64) * BLOCK + BLOCK - 1
        starts = np.arange(rows + 1, dtype=np.int32)
        lengths = np.full(rows, context, np.int32)
        self.batch = AttentionMetadata(tables, starts, lengths, last, BLOCK)
        self.slots = np.arange(rows, dtype=np.int32)
        self.out = np.empty_like(self.q)
        self.mailbox = HostMailbox.create(
            [self.layer], slots=rows, table_width=width, dtype="bfloat16"
        )
        self.mailbox.begin(self.slots, lengths, [tables])

    def attend(self) -> None:
        """Call the kernel directly."""
        attention.paged_attention(
            self.q, self.k, self.v, self.layer.k_cache, self.layer.v_cache, self.batch,
            scale=self.layer.scale, window=None, softcap=None,
        )  # fmt: skip

    def submit(self) -> None:
        self.mailbox.submit(self.slots, 0, self.q, self.k, self.v)

    def take(self) -> None:
        slots = self.mailbox.done(0, len(self.slots))
        self.mailbox.take(slots, 0, out=self.out)

    def cross(self) -> None:
        """Have the worker compute all rows, and wait for them."""
        self.submit()
        self.wait()
        self.take()

    def wait(self) -> None:
        while self.mailbox.done_counts()[0] < len(self.slots):
            self.mailbox.wait(1.0)


def timed_s(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def compare(case: Batch, rounds: int) -> dict[str, float]:
    """Median times of direct calls and of the worker, and the median of their ratios."""
    case.attend()
    case.cross()
    direct, hosted = [], []
    for _ in range(rounds):
        direct.append(timed_s(case.attend))
        hosted.append(timed_s(case.cross))
    ratios = [h / d for h, d in zip(hosted, direct, strict=True)]
    return {
        "direct_us": 1e6 * statistics.median(direct),
        "hosted_us": 1e6 * statistics.median(hosted),
        "ratio": statistics.median(ratios),
    }


def book(case: Batch, rounds: int) -> dict[str, float]:
    """Times of the client's calls for a batch; the worker computes between them."""
    submits, takes = [], []
    for _ in range(rounds):
        submits.append(timed_s(case.submit))
        case.wait()
        takes.append(timed_s(case.take))
    both = [s + t for s, t in zip(submits, takes, strict=True)]
    return {
        "submit_us": 1e6 * statistics.median(submits),
        "take_us": 1e6 * statistics.median(takes),
        "both_us": 1e6 * statistics.median(both),
        "both_at_best_us": 1e6 * statistics.quantiles(both, n=10)[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--process", action="store_true", help="the worker is a process of its own")
    parser.add_argument("--threads", type=int, default=1, help="of the kernel and of the worker")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    attention.set_threads(options.threads)

    def serving(case: Batch) -> Any:
        if options.process:
            return closing(HostProcess(case.mailbox, case.kv, threads=options.threads))
        return closing(HostWorker(case.mailbox, threads=options.threads))

    cases, bookings = [], []
    print(f"{'rows':>5} {'context':>8} {'direct':>10} {'worker':>10}  ratio")
    for rows, context in CASES:
        case = Batch(rows, context, HEADS, KV_HEADS, HEAD_DIM)
        with serving(case):
            found = compare(case, options.rounds)
        cases.append({"rows": rows, "context": context, **found})
        print(
            f"{rows:>5} {context:>8} {found['direct_us']:>7.0f} us {found['hosted_us']:>7.0f} us"
            f"  {found['ratio']:.2f}"
        )
    for name, shape in (("8 numbers", (1, 1, 8)), ("shape", (HEADS, KV_HEADS, HEAD_DIM))):
        case = Batch(BOOKED, BLOCK, *shape)
        with serving(case):
            found = book(case, 5 * options.rounds)
        counted = case.mailbox.counters()
        per_call = counted.jobs / counted.calls
        round_trip_us = counted.round_trip_ns / counted.jobs / 1e3
        bookings.append({"rows": name, **found, "jobs_per_call": per_call})
        print(
            f"{BOOKED} rows of {name}: submit {found['submit_us']:.0f} us, take "
            f"{found['take_us']:.0f} us, both {found['both_us']:.0f} us (a tenth of them within "
            f"{found['both_at_best_us']:.0f} us); {per_call:.0f} jobs a call, round trip "
            f"{round_trip_us:.0f} us"
        )
    if options.out:
        report.save(options.out, cores=os.cpu_count(), cases=cases, bookkeeping=bookings)


if __name__ == "__main__":
    main()
