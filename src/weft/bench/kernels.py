"""``weft bench kernels``: each kernel against its roofline on this machine."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any, Protocol

from tqdm import tqdm

from weft.bench.options import KernelsBench
from weft.core.errors import ConfigError


class KernelCase(Protocol):
    """See ``weft.kernels.measure.Case``."""

    @property
    def name(self) -> str: ...
    @property
    def read_bytes(self) -> float: ...
    @property
    def flops(self) -> float: ...
    @property
    def dtype(self) -> str: ...
    @property
    def run(self) -> Callable[[], object]: ...


class Kernels(Protocol):
    """Kernels to measure, and their bounds; see ``weft.kernels.measure``."""

    def set_threads(self, count: int, /) -> None: ...
    def read_rate(self) -> float: ...
    def matmul_rate(self, dtype: str, /) -> float: ...
    def cases(self) -> Iterable[KernelCase]: ...


def bench_kernels(kernels: Kernels, options: KernelsBench) -> dict[str, Any]:
    """Run every kernel whose name has ``only``; yardsticks are measured before and after.

    The roofline of a kernel is the longer of the time to read what it must read and the time to
    compute what it must compute; its share is that bound over the time that it took.

    Raises:
        ConfigError: no kernel has such a name.
    """
    part = options.only or ""
    if not any(part in case.name for case in kernels.cases()):
        raise ConfigError(f"No kernel has '{part}' in its name.", param="only")
    if options.threads is not None:
        kernels.set_threads(options.threads)
    before = _yardsticks(kernels)
    taken: list[tuple[KernelCase, float, float]] = []
    for case in tqdm(kernels.cases(), unit="kernel", disable=not sys.stderr.isatty()):
        if part in case.name:
            taken.append((case, *_time(case, options.seconds)))
    after = _yardsticks(kernels)
    rates = {name: max(before[name], after[name]) for name in before}
    # A processor without bfloat16 products widens the operands and multiplies them as float32.
    rates["bfloat16"] = max(rates["bfloat16"], rates["float32"])
    return {
        "command": "weft bench kernels",
        "options": asdict(options),
        "read_bytes_per_s": rates["read"],
        "matmul_flops_per_s": {name: rates[name] for name in rates if name != "read"},
        "yardsticks": [before, after],
        "kernels": [_row(case, median, best, rates) for case, median, best in taken],
    }


def _yardsticks(kernels: Kernels) -> dict[str, float]:
    products = {dtype: kernels.matmul_rate(dtype) for dtype in ("bfloat16", "float32")}
    return {"read": kernels.read_rate(), **products}


def _time(case: KernelCase, seconds: float) -> tuple[float, float]:
    """Median and best time of a run."""
    case.run()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end or not times:
        case.run()
        times.append(time.perf_counter() - start)
    return statistics.median(times), min(times)


def _row(
    case: KernelCase, median: float, best: float, rates: Mapping[str, float]
) -> dict[str, Any]:
    reading, computing = case.read_bytes / rates["read"], case.flops / rates[case.dtype]
    bound = max(reading, computing)
    return {
        "name": case.name,
        "median_us": median * 1e6,
        "best_us": best * 1e6,
        "read_bytes_per_s": case.read_bytes / median,
        "flops_per_s": case.flops / median,
        "bound": "memory" if reading >= computing else "compute",
        "share": bound / median,
        "best_share": bound / best,
    }


def format_kernels(result: Mapping[str, Any]) -> str:
    """The result as a table."""
    products = ", ".join(
        f"{name} {rate / 1e9:.0f} GFLOP/s" for name, rate in result["matmul_flops_per_s"].items()
    )
    lines = [f"reading {result['read_bytes_per_s'] / 1e9:.1f} GB/s; products {products}", ""]
    head = f"{'median us':>12}{'GB/s':>8}{'GFLOP/s':>9}  {'bound':<8}{'share':>6}{'best':>6}"
    lines.append(f"{'kernel':<44}{head}")
    for row in result["kernels"]:
        lines.append(
            f"{row['name']:<44}{row['median_us']:>12.1f}{row['read_bytes_per_s'] / 1e9:>8.1f}"
            f"{row['flops_per_s'] / 1e9:>9.1f}  {row['bound']:<8}{row['share']:>6.0%}"
            f"{row['best_share']:>6.0%}"
        )
    return "\n".join(lines)
