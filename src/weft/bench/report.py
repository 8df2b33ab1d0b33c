"""Results of benchmarks as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from weft.bench.meters import NOT_MEASURED
from weft.workload.tables import latencies, sweep_lines, table

BUSY, LATE_MS = 0.7, 20.0  # from here on the client may be what is measured


def format_serve(result: Mapping[str, Any]) -> str:
    """Tables of a result of ``weft bench serve``."""
    lines = [f"{result['model']} at {result['server']}", ""]
    lines += table(result["runs"])
    for run in result["runs"]:
        lines += ["", *latencies(run)]
    lines += ["", *sweep_lines(result)]
    lines += [line for run in result["runs"] for line in _remarks(run)]
    return "\n".join(lines).rstrip()


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
    server = run["server"]
    if NOT_MEASURED in server:
        yield f"at {run['load']:g}: CPU time of the server not measured: {server[NOT_MEASURED]}"
    elif server["cpu_s_per_output_token"] is not None:
        yield (
            f"at {run['load']:g}: the server used {server['cores']:.2f} cores, "
            f"{1e3 * server['cpu_s_per_output_token']:.3f} ms of CPU time for each output token"
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
        ("cpu_s_per_output_token", "CPU s/output token"),
    ):
        values = result[key]
        if values is not None:
            shown = "".join(f"{values[part]:>10.4g}" for part in ("median", "lowest", "highest"))
            lines.append(f"{name:>24}{shown}")
    return "\n".join(lines)


def format_interfere(result: Mapping[str, Any]) -> str:
    """A table of a result of ``weft bench interfere``."""
    options = result["options"]
    beside = ", ".join(options["neighbours"])
    lines = [
        f"{result['model']}, {options['sequences']} sequences at once; the loop on processor "
        f"{result['control_cpu']}, beside: {beside}",
        "",
        f"{'':>36}" + "".join(f"{head:>17}" for head in ("alone", "with neighbours", "ratio")),
    ]
    for name, found in result["loops"].items():
        alone, together = found["alone"], found["with neighbours"]
        pairs = [("tokens/s", alone["tokens_per_s"], together["tokens_per_s"])]
        for key, title in (("tpot_ms", "TPOT"), ("itl_ms", "between tokens"), ("ttft_ms", "TTFT")):
            for part in ("p50", "p95", "p99", "p99.9"):
                if alone[key] is not None:  # with one token each there is none between two
                    pairs.append((f"{title} {part} ms", alone[key][part], together[key][part]))
        for title, one, other in pairs:
            lines.append(f"{name:>10}{title:>26}{one:>17.4g}{other:>17.4g}{other / one:>17.2f}")
    return "\n".join(lines)
