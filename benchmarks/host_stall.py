"""Interactive requests while the process that attends on the host is stopped, and while it runs.

    python benchmarks/host_stall.py [--model FOLDER] [--rate 8] [--clients 24] [--seconds 30]
        [--rounds 2] [--out benchmarks/results/host_stall.json]

One server under ``slo-piggyback`` with a process for the host, short of KV memory, with best-effort
clients throughout. In turns of so many seconds, ``weft-host`` runs, or is stopped by SIGSTOP. *of
running*: p99 of the time between tokens of interactive requests, over that of the turns in which
the process runs. *host*: tokens a second whose attention it computed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

import offload
import report
from coserve import Targets, both, clients, counted, idle_targets, summary

SERVER = "slo-piggyback"


def worker_of(server: psutil.Process) -> psutil.Process:
    """The process that attends on the host."""
    return next(
        child
        for child in server.children(recursive=True)
        if "".join(child.cmdline()[:1]) == "weft-host"
    )


@asynccontextmanager
async def crowd(
    server: psutil.Process, port: int, count: int, turn: int, found: dict[str, Any]
) -> AsyncIterator[None]:
    """Best-effort clients; whether the worker is stopped meanwhile is ``found["stopped"]``."""
    async with clients(port, count, turn):
        worker, before = worker_of(server), counted(port, "host_attention_tokens")
        if found["stopped"]:
            worker.suspend()
        try:
            yield
        finally:
            found["host_tokens"] = counted(port, "host_attention_tokens") - before
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.resume()
            found["replaced"] = not worker.is_running()


def measure(
    server: psutil.Process, port: int, targets: Targets, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Turns in which the worker runs and is stopped, by the kind of turn."""
    runs: dict[str, list[dict[str, Any]]] = {"running": [], "stopped": []}
    for turn in range(options.rounds):
        for name in list(runs)[:: 1 if turn % 2 == 0 else -1]:
            found: dict[str, Any] = {"stopped": name == "stopped"}
            beside = crowd(server, port, options.clients, turn, found)
            run = asyncio.run(both(port, beside, options.rate, options.seconds, turn))
            runs[name].append({**run, **found})
    rows = []
    for name, of in runs.items():
        row = summary(name, of, targets)
        row["host_tokens_per_s"] = sum(run["host_tokens"] for run in of) / (
            options.seconds * len(of)
        )
        row["replaced"] = sum(run["replaced"] for run in of)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--profile", help="of `weft profile`, for 1 thread; unset makes one")
    parser.add_argument("--memory", default="12MiB", help="KV memory of the device")
    parser.add_argument("--rate", type=float, default=8.0, help="of interactive requests a second")
    parser.add_argument("--clients", type=int, default=24, help="of best effort")
    parser.add_argument("--ttft", type=float, default=10.0, help="target as a multiple of idle")
    parser.add_argument("--tpot", type=float, default=4.0, help="target as a multiple of idle")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each turn")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        profile = options.profile or offload.make_profiles(folder, options.model)[1]

        def started(server: str, **settings: Any) -> tuple[psutil.Process, int]:
            process, port = offload.serve(folder, options.model, server, options.memory, settings)
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)
            return psutil.Process(process.pid), port

        _, idle_port = started("fcfs")
        targets = idle_targets(idle_port, options.ttft, options.tpot)
        server, port = started(
            SERVER,
            host_process=True,
            profile=str(profile),
            classes={"interactive": asdict(targets)},
        )
        rows = measure(server, port, targets, options)
    print(
        "| host | requests | kept | TPOT p50 / p99 ms | of running | best effort tok/s | host |\n"
        "|---|---|---|---|---|---|---|"
    )
    base = rows[0]["tpot_ms"]["p99"]
    for row in rows:
        row["of_running"] = row["tpot_ms"]["p99"] / base
        tpot = " / ".join(f"{row['tpot_ms'][p]:.2f}" for p in ("p50", "p99"))
        print(
            f"| {row['load']} | {row['requests']} | {row['attainment']:.1%} | {tpot} | "
            f"{row['of_running']:.2f} | {row['be_output_tokens_per_s']:.0f} | "
            f"{row['host_tokens_per_s']:.0f} |"
        )
    if options.out:
        report.save(
            options.out,
            targets=asdict(targets),
            **{k: getattr(options, k) for k in ("model", "memory", "rate", "clients", "seconds")},
            rounds=options.rounds,
            rows=rows,
        )


if __name__ == "__main__":
    main()
