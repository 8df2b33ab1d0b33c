"""``weft bench kernels``: each kernel against its roofline on this machine."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
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
    def threads(self) -> int: ...
    def clock(self) -> float: ...
    def isa(self) -> str: ...
    def read_rate(self, seconds: float, /) -> float: ...
    def multiply_rate(self, dtype: str, seconds: float, /) -> float: ...
    def cases(self) -> Iterable[KernelCase]: ...


SLICES = 15
YARDSTICK_S = 0.001


@dataclass(frozen=True, slots=True)
class Slice:
    """Part of a kernel's runs, and the mean rates of the yardsticks just before and after."""

    median_s: float
    best_s: float
    read_rate: float
    multiply_rate: float


def bench_kernels(kernels: Kernels, options: KernelsBench, processor: str) -> dict[str, Any]:
    """Run every kernel whose name has ``only`` in slices, with its yardsticks around each of them.

    The roofline of a kernel is the longer of the time to read what it must read and the time to
    compute what it must compute; its share is the median over the slices of that bound over the
    time that it took: neighbours on a shared machine slow both down. The best share is that of the
    best time, and of the best rates.

    Args:
        processor: its name, for the result.

    Raises:
        ConfigError: no kernel has such a name.
    """
    part, isa = options.only or "", kernels.isa()
    if not any(part in case.name for case in kernels.cases()):
        raise ConfigError(f"No kernel has '{part}' in its name.", param="only")
    if options.threads is not None:
        kernels.set_threads(options.threads)
    rows, products = [], dict[str, float]()
    for case in tqdm(kernels.cases(), unit="kernel", disable=not sys.stderr.isatty()):
        if part not in case.name:
            continue
        rows.append(_row(case, list(_slices(kernels, case, options.seconds / SLICES))))
        rate = rows[-1]["multiply_rate"]
        products[case.dtype] = max(rate, products.get(case.dtype, 0.0))
    return {
        "command": "weft bench kernels",
        "options": asdict(options),
        "processor": processor,
        "isa": isa,
        "threads": kernels.threads(),
        "read_bytes_per_s": max(row["read_rate"] for row in rows),
        "multiply_flops_per_s": products,
        "kernels": rows,
    }


def _slices(kernels: Kernels, case: KernelCase, seconds: float) -> Iterator[Slice]:
    def yardsticks() -> tuple[float, float]:
        return kernels.read_rate(YARDSTICK_S), kernels.multiply_rate(case.dtype, YARDSTICK_S)

    case.run()
    before = yardsticks()
    for _ in range(SLICES):
        median, best = _time(kernels.clock, case, seconds)
        after = yardsticks()
        yield Slice(median, best, (before[0] + after[0]) / 2, (before[1] + after[1]) / 2)
        before = after


def _time(clock: Callable[[], float], case: KernelCase, seconds: float) -> tuple[float, float]:
    """Median and best time of a run; the first one finds the caches as the yardsticks left them."""
    case.run()
    times: list[float] = []
    end = clock() + seconds
    while (start := clock()) < end or not times:
        case.run()
        times.append(clock() - start)
    return statistics.median(times), min(times)


def _row(case: KernelCase, slices: Sequence[Slice]) -> dict[str, Any]:
    median = statistics.median(one.median_s for one in slices)
    reading = statistics.median(one.read_rate for one in slices)
    computing = statistics.median(one.multiply_rate for one in slices)

    def bound(read_rate: float, multiply_rate: float) -> float:
        return max(case.read_bytes / read_rate, case.flops / multiply_rate)

    best = min(one.best_s for one in slices)
    least = bound(max(s.read_rate for s in slices), max(s.multiply_rate for s in slices))
    return {
        "name": case.name,
        "median_us": median * 1e6,
        "best_us": best * 1e6,
        "read_bytes_per_s": case.read_bytes / median,
        "flops_per_s": case.flops / median,
        "read_rate": reading,
        "multiply_rate": computing,
        "bound": "memory" if case.read_bytes / reading >= case.flops / computing else "compute",
        "share": statistics.median(
            bound(one.read_rate, one.multiply_rate) / one.median_s for one in slices
        ),
        "best_share": least / best,
    }


def format_kernels(result: Mapping[str, Any]) -> str:
    """The result as a table."""
    products = ", ".join(
        f"{name} {rate / 1e9:.0f}" for name, rate in result["multiply_flops_per_s"].items()
    )
    lines = [
        f"{result['processor']}, instruction set {result['isa']}, {result['threads']} threads",
        f"reading {result['read_bytes_per_s'] / 1e9:.1f} GB/s; GFLOP/s of products: {products}",
        "",
    ]
    head = f"{'median us':>12}{'GB/s':>8}{'GFLOP/s':>9}  {'bound':<8}{'share':>6}{'best':>6}"
    lines.append(f"{'kernel':<44}{head}")
    for row in result["kernels"]:
        lines.append(
            f"{row['name']:<44}{row['median_us']:>12.1f}{row['read_bytes_per_s'] / 1e9:>8.1f}"
            f"{row['flops_per_s'] / 1e9:>9.1f}  {row['bound']:<8}{row['share']:>6.0%}"
            f"{row['best_share']:>6.0%}"
        )
    return "\n".join(lines)
