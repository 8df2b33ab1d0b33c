"""Results of benchmarks as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

NAMES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL", "e2e_ms": "E2E"}
COLUMNS = ("mean", "p50", "p90", "p95", "p99", "p99.9", "max")
BUSY, LATE_MS = 0.7, 20.0  # from here on the client may be what is measured


def format_serve(result: Mapping[str, Any]) -> str:
    """Tables of a result of ``weft bench serve``."""
    lines = [f"{result['model']} at {result['server']}", ""]
    lines += _table(result["runs"])
    for run in result["runs"]:
        lines += ["", *_latencies(run)]
    lines += ["", *_sweep(result)]
    lines += [line for run in result["runs"] for line in _remarks(run)]
    return "\n".join(lines).rstrip()


def _table(runs: list[Mapping[str, Any]]) -> Iterator[str]:
    slo = "goodput_per_s" in runs[0]
    yield (
        f"{runs[0]['unit']:>12} {'sent':>6} {'failed':>6} {'req/s':>8} {'in tok/s':>9} "
        f"{'out tok/s':>9}" + (f" {'goodput/s':>9} {'in SLO':>7}" if slo else "")
    )
    for run in runs:
        line = (
            f"{run['load']:>12g} {run['requests']:>6} {run['requests'] - run['completed']:>6} "
            f"{run['requests_per_s']:>8.2f} {run['input_tokens_per_s']:>9.0f} "
            f"{run['output_tokens_per_s']:>9.0f}"
        )
        if slo:
            line += f" {run['goodput_per_s']:>9.2f} {run['attainment']:>7.1%}"
        yield line


def _latencies(run: Mapping[str, Any]) -> Iterator[str]:
    yield f"ms at {run['load']:<6g}" + "".join(f"{name:>10}" for name in COLUMNS)
    for key, name in NAMES.items():
        values = run[key]
        if values is not None:
            yield f"{name:>12}" + "".join(f"{values[column]:>10.2f}" for column in COLUMNS)


def _sweep(result: Mapping[str, Any]) -> Iterator[str]:
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


def _remarks(run: Mapping[str, Any]) -> Iterator[str]:
    for reason, count in run["failures"].items():
        detail = run["failure_examples"][reason]
        yield f"at {run['load']:g}: {count} failed: {reason}" + (f" ({detail})" if detail else "")
    if run["short_answers"]:
        yield f"at {run['load']:g}: {run['short_answers']} answers were shorter than asked for"
    share, late = run["client"]["cpu_share"], (run["client"]["late_ms"] or {}).get("p99", 0.0)
    yield (
        f"at {run['load']:g}: the client used {share:.0%} of a core; 99% of requests were sent "
        f"within {late:.1f} ms of their time"
    )
    if share > BUSY or late > LATE_MS:
        yield f"at {run['load']:g}: WARNING: the client may be the bottleneck"


def format_throughput(result: Mapping[str, Any]) -> str:
    """A table of a result of ``weft bench throughput``."""
    lines = [f"{result['model']}, {result['prompts']} prompts at once"]
    lines.append(f"{'':>24}{'median':>10}{'lowest':>10}{'highest':>10}")
    for key, name in (
        ("prefill_tokens_per_s", "prefill tokens/s"),
        ("decode_tokens_per_s", "decode tokens/s"),
        ("output_tokens_per_s", "output tokens/s"),
        ("first_token_s", "first token s"),
        ("all_first_tokens_s", "all first tokens s"),
        ("seconds", "all tokens s"),
    ):
        values = result[key]
        if values is not None:
            shown = "".join(f"{values[part]:>10.4g}" for part in ("median", "lowest", "highest"))
            lines.append(f"{name:>24}{shown}")
    return "\n".join(lines)
