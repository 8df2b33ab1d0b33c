"""Experts of a layer on the CPU, for which a device waits that keeps them on the host.

    python benchmarks/host_experts.py [--threads N] [--out benchmarks/results/host_experts.json]

One layer of the shape of Qwen3-30B-A3B: 128 experts, 8 for a row, which rows choose at random. The
time of each call is beside the rates at which this machine reads memory and multiplies, measured in
the same round: a share is what the call takes at the least by one of these rates, over what it
took. On one thread the time is that of the CPU, so that other load does not count.

The round trip is that of a call without rows through the server that answers a GPU, here asked by
another thread; the shortest of many.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np

import report
from weft import __version__
from weft.engine.machine import cpu_name
from weft.kernels import measure
from weft.kernels.arrays import Array, numpy_dtype
from weft.kernels.cpu import experts, matrix
from weft.kernels.cpu.expert_server import ExpertMemory, ExpertServer
from weft.kernels.hosted import HostedExperts
from weft.models.layout import storage_of

EXPERTS, TOP_K, HIDDEN, SIZE, GROUP = 128, 8, 2048, 768, 64
ROWS = (1, 8, 32, 256, 1024)
BF16 = numpy_dtype("bfloat16")


def matrices(name: str, shape: tuple[int, int], quantize: str) -> list[matrix.CpuMatrix]:
    """A matrix for each expert, in memory of its own; the numbers of some are the same."""
    draw, gated = np.random.default_rng(0), name == "expert_gate_up"
    some = [
        (draw.standard_normal(shape, np.float32) / shape[1] ** 0.5).astype(BF16) for _ in range(4)
    ]
    storage = storage_of(name, quantize, GROUP)
    if storage is None:
        return [matrix.CpuMatrix(some[i % 4], gated=gated) for i in range(EXPERTS)]
    found = [
        matrix.CpuMatrix.quantised(shape, "bfloat16", storage, gated=gated) for _ in range(EXPERTS)
    ]
    for number, one in enumerate(found):
        one.write(0, some[number % 4])
    return found


class Calls:
    """Calls of a layer with so many rows, each of which chooses other experts."""

    def __init__(self, layer: HostedExperts, rows: int) -> None:
        self._layer, self._draw, self._rows = layer, np.random.default_rng(rows), rows
        self._x = self._draw.standard_normal((rows, HIDDEN), np.float32).astype(BF16)
        self._shares = np.full((rows, TOP_K), 1 / TOP_K, np.float32)
        one = layer.gate_up[0].nbytes + layer.down[0].nbytes
        self._expert_bytes, self._expert_flops = one, 2 * 3 * HIDDEN * SIZE

    def take(self, count: int) -> tuple[float, float, float]:
        """Seconds of a call, bytes it must read, and its operations: the mean of so many."""
        seconds, read = 0.0, 0
        for _ in range(count):
            ids = np.argsort(self._draw.random((self._rows, EXPERTS)), 1)[:, :TOP_K]
            chosen: Array = np.ascontiguousarray(ids, np.int64)
            read += len(np.unique(chosen)) * self._expert_bytes
            start = measure.clock()
            of = self._layer
            experts.moe(self._x, self._shares, chosen, of.gate_up, of.down, of.activation)
            seconds += measure.clock() - start
        return seconds / count, read / count, self._rows * TOP_K * self._expert_flops


def round_trip_s(layer: HostedExperts, count: int = 500) -> float:
    """The least time between a ticket and its answer, for no rows: other load only adds to it."""

    def zeros(*shape: int, kind: str = "int64") -> Array:
        return np.zeros(shape, numpy_dtype(kind))

    memory = ExpertMemory(
        zeros(1), zeros(1, kind="int32"), zeros(1, HIDDEN, kind="bfloat16"),
        zeros(1, TOP_K, kind="float32"), zeros(1, TOP_K), zeros(1),
        zeros(1, HIDDEN, kind="bfloat16"),
    )  # fmt: skip
    server, times = ExpertServer(memory, [layer]), []
    for ticket in range(1, count + 1):
        start = time.perf_counter()
        memory.asked[0] = ticket
        while memory.answered[0] < ticket:
            pass
        times.append(time.perf_counter() - start)
    server.close()
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    measure.set_threads(options.threads)
    print(f"{'weights':<10}{'rows':>5}{'ms':>9}{'GB/s':>8}{'of reading':>12}{'of products':>12}")
    found = []
    for quantize, kind in (("none", "bfloat16"), ("int8", "int8"), ("int4", "int4")):
        pair = [
            matrices(name, shape, quantize)
            for name, shape in (
                ("expert_gate_up", (2 * SIZE, HIDDEN)),
                ("expert_down", (HIDDEN, SIZE)),
            )
        ]
        layer = HostedExperts(*pair, "silu")
        calls = {rows: Calls(layer, rows) for rows in ROWS}
        for one in calls.values():
            one.take(1)
        times: dict[int, list[tuple[float, float, float, float]]] = {rows: [] for rows in ROWS}
        for _ in range(options.rounds):
            for rows, one in calls.items():
                reading, products = measure.read_rate(0.1), measure.multiply_rate(kind, 0.05)
                took, read, flops = one.take(max(1, 16 // rows))
                shares = read / reading / took, flops / products / took
                times[rows].append((took, read, *shares))
        for rows, rounds in times.items():
            took, read, of_reading, of_products = map(statistics.median, zip(*rounds, strict=True))
            print(
                f"{kind:<10}{rows:>5}{1e3 * took:>9.2f}{read / took / 1e9:>8.1f}"
                f"{of_reading:>12.2f}{of_products:>12.2f}",
                flush=True,
            )
            one_row = {"weights": kind, "rows": rows, "seconds": took, "bytes": read}
            found.append({**one_row, "of_reading": of_reading, "of_products": of_products})
        if quantize == "none":
            trip = round_trip_s(layer)
            print(f"round trip of a call without rows: {1e6 * trip:.1f} us")
    if options.out:
        facts = {"weft": __version__, "cpu": cpu_name(), "isa": measure.isa()}
        more = {"threads": options.threads, "round_trip_s": trip, "rows": found}
        report.save(options.out, **facts, **more)


if __name__ == "__main__":
    main()
