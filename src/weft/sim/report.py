"""Results of simulations and of load on servers as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

NAMES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL", "e2e_ms": "E2E"}
COLUMNS = ("mean", "p50", "p90", "p95", "p99", "p99.9", "max")
RESOURCES = {
    "device": "device busy",
    "compute": "compute",
    "bandwidth": "memory bandwidth",
    "cpu": "CPU attention",
    "link": "PCIe",
    "device_kv": "device KV",
    "host_kv": "host KV",
}


def format_sim(result: Mapping[str, Any]) -> str:
    """Tables of a result of ``weft sim``."""
    lines = [
        f"{result['model']} on {result['devices']}, scheduler {result['scheduler']}: "
        f"KV for {result['kv_tokens']} tokens",
        "",
        *table(result["runs"]),
    ]
    for run in result["runs"]:
        lines += ["", *latencies(run)]
        if len(run["classes"]) > 1:
            for name, own in run["classes"].items():
                lines += latencies(own, f"{name}, ms")
        lines += [*_classes(run), *_targets(run), *_machine(run)]
    lines += ["", *sweep_lines(result)]
    return "\n".join(lines).rstrip()


def _classes(run: Mapping[str, Any]) -> Iterator[str]:
    for name, own in run["classes"].items():
        line = (
            f"{name:>12}: {own['completed']} of {own['requests']} requests, "
            f"{own['output_tokens_per_s']:.0f} output tok/s"
        )
        if "slo" in own:
            ttft, tpot = own["slo"]["ttft_s"], own["slo"]["tpot_s"]
            bounds = [f"TTFT {ttft * 1e3:g} ms"] if ttft is not None else []
            bounds += [f"TPOT {tpot * 1e3:g} ms"] if tpot is not None else []
            line += f", {own['attainment']:.1%} within {' and '.join(bounds)}"
        yield line


def _targets(run: Mapping[str, Any]) -> Iterator[str]:
    for target in run["targets"]:
        value = "nothing" if target["value_ms"] is None else f"{target['value_ms']:.1f} ms"
        yield (
            f"{'target':>12}: {target['metric'].upper()} p{target['percentile']:g} "
            f"{value}, at most {target['bound_ms']:g} ms: "
            f"{'kept' if target['kept'] else 'missed'}"
        )


def _machine(run: Mapping[str, Any]) -> Iterator[str]:
    use = run["use"]
    shares = [f"{words} {use[name]:.0%}" for name, words in RESOURCES.items() if use[name]]
    yield f"{'use':>12}: {', '.join(shares)}; at most {use['device_kv_most']:.0%} of device KV"
    yield f"{'steps':>12}: {run['steps']}, {run['preemptions']} preemptions"
    if run["cached_tokens"]:
        share = run["cached_tokens"] / run["input_tokens"]
        yield f"{'cached':>12}: {share:.1%} of prompt tokens"
    for code, example in run["failures"].items():
        yield f"{'failed':>12}: {example['count']} by {code}, such as: {example['message']}"


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
