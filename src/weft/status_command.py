"""``weft status``: asks a running server what it serves, and how busy it is."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from weft.core.class_table import target_words
from weft.core.errors import ConfigError
from weft.core.flags import add_server
from weft.core.inert import inert, inert_line
from weft.core.settings import format_bytes
from weft.running_server import Metrics, RunningServer

MOST_INTERVAL_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.set_defaults(run=run_status, parser=parser)
    add_server(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--ready",
        action="store_true",
        help="only say whether the server is ready, which needs no key; for health checks",
    )
    parser.add_argument(
        "--interval-s",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="time over which rates are measured; 0 leaves them out (default 1)",
    )


def run_status(options: Mapping[str, Any]) -> int:
    """Print what the server says; the exit status: 0 where it is ready, else 1.

    Raises:
        ConfigError: the address or the interval is not one.
        WeftError: nobody answers, or somebody else than weft, or the key is wrong.
    """
    interval_s = options["interval_s"]
    if not 0 <= interval_s <= MOST_INTERVAL_S:
        raise ConfigError(f"--interval-s must be from 0 to {MOST_INTERVAL_S:g}, not {interval_s}.")
    server = RunningServer(options["url"], options["api_key"])
    if options["ready"]:
        state = server.state()
        print(json.dumps({"state": state}) if options["json"] else inert_line(state))
        return 0 if state == "ready" else 1
    status = collect_status(server, interval_s)
    print(json.dumps(status, indent=2) if options["json"] else inert(format_status(status)))
    return 0 if status["state"] == "ready" else 1


def collect_status(server: RunningServer, interval_s: float) -> dict[str, Any]:
    """Ask for everything; rates come from two looks at the counters."""
    state, info = server.state(), server.info()
    names = info["model"]["names"]
    first, began = server.metrics(names[0]), time.monotonic()
    last, seconds = first, 0.0
    if first is not None and interval_s:
        time.sleep(interval_s)
        last, seconds = server.metrics(names[0]), time.monotonic() - began
    engine = info["engine"]
    status: dict[str, Any] = {
        "url": server.url,
        "state": state,
        "version": info["version"],
        "models": names,
        "engine": {name: engine.get(name) for name in SHOWN},
        "policy": engine.get("scheduling", {}).get("policy"),
        "classes": _classes(engine, last or {}),
    }
    if "models" in info:
        status["several"] = info["models"]
    if first is not None and last is not None:
        status |= {
            "running": int(last[("num_requests_running",)]),
            "waiting": int(last[("num_requests_waiting",)]),
            "kv_used": last[("kv_cache_usage_perc",)],
            "prefix_hits": _share(last, "prefix_cache_hits_total", "prefix_cache_queries_total"),
            "engine_restarts": int(last.get(("engine_restarts_total",), 0)),
            "requests": {
                reason: int(count)
                for (name, *labels), count in last.items()
                if name == "request_success_total"
                for reason in labels
            },
        }
        if seconds:
            status["rates"] = {
                name: (last[(counter,)] - first[(counter,)]) / seconds
                for name, counter in RATES.items()
            }
    return status


SHOWN = (
    "name", "family", "parameters", "weights", "device", "isa", "max_model_len", "max_num_seqs",
    "kv_memory", "kv_dtype", "threads",
)  # fmt: skip
"""Facts of the engine that a status has."""
RATES = {
    "prompt_tokens_per_s": "prompt_tokens_total",
    "output_tokens_per_s": "generation_tokens_total",
    "steps_per_s": "engine_steps_total",
}


def _share(values: Metrics, part: str, whole: str) -> float | None:
    """The share of a counter in another one; None as long as that is 0."""
    total = values.get((whole,), 0)
    return values.get((part,), 0) / total if total else None


def _classes(engine: Mapping[str, Any], values: Metrics) -> list[dict[str, Any]]:
    """Each class with its targets and how many of its requests kept them."""
    targets = engine.get("scheduling", {}).get("targets", {})
    return [
        {
            "name": row["name"],
            "priority": row["priority"],
            "ttft_s": targets.get(row["name"], {}).get("ttft_s"),
            "tpot_s": targets.get(row["name"], {}).get("tpot_s"),
            **{
                outcome: int(
                    values.get(("slo_targets_total", *sorted((row["name"], "all", outcome))), 0)
                )
                for outcome in ("kept", "missed")
            },
        }
        for row in sorted(engine.get("classes", ()), key=lambda row: row["priority"])
    ]


def format_status(status: Mapping[str, Any]) -> str:
    """Lay a status out for a terminal."""
    engine = status["engine"]
    on = ", ".join(part for part in (engine["device"], engine["isa"]) if part)
    several = status.get("several", ())
    size = f"{engine['parameters'] / 1e6:.1f} M weights in {engine['weights']}"
    rows = [
        ("server", f"{status['url']}, weft {status['version']}: {status['state']}"),
        *(("models" if not at else "", _model_words(row)) for at, row in enumerate(several)),
        ("model", f"{', '.join(status['models'])} ({engine['family']}, {size}) on {on}"),
        ("", f"sequences of up to {engine['max_model_len']} tokens"),
        *_load_rows(status),
        ("scheduling", str(status["policy"])),
        *(
            ("classes" if not at else "", _class_words(row))
            for at, row in enumerate(status["classes"])
        ),
    ]
    return "\n".join(f"{label:10} {text}" for label, text in rows)


def _model_words(row: Mapping[str, Any]) -> str:
    """One of several models with its state."""
    words = f"{', '.join(row['names'])}: {row['state']}, {format_bytes(row['memory_bytes'])} awake"
    words += f", woken in {row['wake_s']:.1f} s" if "wake_s" in row else ""
    return f"{words}; {row['error']}" if "error" in row else words


def _load_rows(status: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    engine = status["engine"]
    if "running" not in status:
        yield "load", "the server's metrics are for other keys; see --metrics-key"
        return
    most = engine["max_num_seqs"]
    yield "queue", f"{status['running']} running of {most} at most, {status['waiting']} waiting"
    hits = status["prefix_hits"]
    cached = "" if hits is None else f"; {hits:.0%} of prompt tokens came from the prefix cache"
    size = format_bytes(engine["kv_memory"])
    yield "KV cache", f"{status['kv_used']:.0%} of {size} ({engine['kv_dtype']}) in use{cached}"
    if "rates" in status:
        prompt, output, steps = (status["rates"][name] for name in RATES)
        yield (
            "rates",
            f"{output:.0f} output and {prompt:.0f} prompt tokens/s, {steps:.0f} steps/s",
        )
    done = ", ".join(f"{count} {reason}" for reason, count in status["requests"].items() if count)
    yield "requests", done or "none yet"
    if status["engine_restarts"]:
        yield "restarts", f"{status['engine_restarts']} of the engine"


def _class_words(row: Mapping[str, Any]) -> str:
    """A class with its targets, and the share of requests that kept them."""
    words = target_words(row["ttft_s"], row["tpot_s"]) or "best effort"
    counted = row["kept"] + row["missed"]
    kept = f"; kept for {row['kept'] / counted:.0%} of {counted}" if counted else ""
    return f"{row['name']}: {words}{kept}"
