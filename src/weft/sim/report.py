"""Results of simulations as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from weft.workload.tables import latencies, sweep_lines, table

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
        if "split_steps" in run:
            lines.append(f"{'halves':>12}: {run['split_steps']} steps in two that overlap")
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
