"""Tables of loads and their latencies as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

NAMES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL", "e2e_ms": "E2E"}
COLUMNS = ("mean", "p50", "p90", "p95", "p99", "p99.9", "max")


def table(runs: list[Mapping[str, Any]]) -> Iterator[str]:
    """A line of rates for each run."""
    slo = "goodput_per_s" in runs[0]
    yield (
        f"{runs[0]['unit']:>12} {'sent':>6} {'failed':>6} {'req/s':>8} {'in tok/s':>9} "
        f"{'out tok/s':>9}" + (f" {'goodput/s':>9} {'in SLO':>7}" if slo else "")
    )
    for run in runs:
        failed = run.get("failed", run["requests"] - run["completed"])
        line = (
            f"{run['load']:>12g} {run['requests']:>6} {failed:>6} "
            f"{run['requests_per_s']:>8.2f} {run['input_tokens_per_s']:>9.0f} "
            f"{run['output_tokens_per_s']:>9.0f}"
        )
        if slo:
            line += f" {run['goodput_per_s']:>9.2f} {run['attainment']:>7.1%}"
        yield line


def latencies(run: Mapping[str, Any], label: str = "") -> Iterator[str]:
    """A line of percentiles for each latency of a run, or of the part of it that a label names."""
    label = label or f"ms at {run['load']:<6g}"
    yield f"{label:>12}" + "".join(f"{name:>10}" for name in COLUMNS)
    for key, name in NAMES.items():
        values = run[key]
        if values is not None:
            yield f"{name:>12}" + "".join(f"{values[column]:>10.2f}" for column in COLUMNS)


def sweep_lines(result: Mapping[str, Any]) -> Iterator[str]:
    """Saturation and serviceable load, where there is a sweep."""
    if "saturation" in result:
        fit = result["saturation"]
        if fit is None:
            yield "saturation: not reached in this sweep"
        else:
            yield (
                f"saturation: at {fit['knee']:.2f} offered, {fit['plateau']:.2f} requests/s "
                f"(two segments, off by {fit['error']:.2f})"
            )
    if "serviceable_load" in result:
        load = result["serviceable_load"]
        yield f"serviceable load (95% within SLOs): {'none' if load is None else f'{load:g}'}"
