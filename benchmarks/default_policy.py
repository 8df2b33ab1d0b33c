"""What interactive requests feel beside best effort with the scheduler that a server chooses.

    python benchmarks/default_policy.py --rates 2,4 --out benchmarks/results/default_policy.json

Two servers of the built-in model stand side by side and are loaded in turns: one with default
settings, which measures its steps in its first idle minute and goes over to the SLO policy, and one
with ``--scheduler fcfs``. Rows are "alone" (interactive requests only, default server), "fcfs" and
"default" (both kinds), and "best effort" (no interactive requests, default server). Ratios are of
medians over rounds: p95 of the time to the first token and between tokens over those of "alone",
and best-effort tokens (of prompts and answers) over those of "best effort". At the end clients of
one class alone, 1, 8 and 32 of them, compare both servers: default over fcfs.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

import report
from coserve import OUTPUT_TOKENS, PROMPT_TOKENS, Timing, ask, body, both, rates, running
from serve import start_server

CLIENTS = (1, 8, 32)
MEASURED_WITHIN_S = 180.0


def policy(port: int) -> str:
    info = httpx.get(f"http://127.0.0.1:{port}/server_info").json()["engine"]
    return str(info["scheduling"]["policy"])


def wait_for_slo(port: int) -> float:
    """Seconds until the default server plans by SLO."""
    started = time.perf_counter()
    while policy(port) != "slo":
        if time.perf_counter() - started > MEASURED_WITHIN_S:
            raise SystemExit("the server has not measured itself")
        time.sleep(0.5)
    return time.perf_counter() - started


def p95(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))]


def summary(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over rounds."""
    found: dict[str, float] = {
        "best_effort_tokens_per_s": statistics.median(
            run["be_output_tokens_per_s"] + run["be_prompt_tokens_per_s"] for run in runs
        )
    }
    if runs[0]["timings"]:
        timings: list[list[Timing]] = [run["timings"] for run in runs]
        found["ttft_p95_ms"] = 1e3 * statistics.median(
            p95([one.ttft_s for one in each]) for each in timings
        )
        found["tpot_p95_ms"] = 1e3 * statistics.median(
            p95([one.tpot_s for one in each]) for each in timings
        )
    return found


async def closed_loop(port: int, clients: int, seconds: float) -> tuple[float, float]:
    """Tokens a second of clients that always have a request open, and their median first token."""
    until, timings = time.perf_counter() + seconds, list[Timing]()

    async def client(number: int) -> None:
        draw = random.Random(f"closed {number}")
        while time.perf_counter() < until:
            asked = body(PROMPT_TOKENS, OUTPUT_TOKENS, draw, stream=True)
            timings.append(await ask(port, asked))

    started = time.perf_counter()
    await asyncio.gather(*(client(number) for number in range(clients)))
    took = time.perf_counter() - started
    while running(port):
        await asyncio.sleep(0.1)
    return len(timings) * OUTPUT_TOKENS / took, statistics.median(t.ttft_s for t in timings)


def mixed(ports: dict[str, int], options: argparse.Namespace) -> list[dict[str, Any]]:
    loads = {
        "alone": ("default", 0, True),
        "fcfs": ("fcfs", options.clients, True),
        "default": ("default", options.clients, True),
        "best effort": ("default", options.clients, False),
    }
    rows = []
    print("req/s load         TTFT p95   TPOT p95  of alone    best effort   of alone")
    for rate in options.rates:
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in loads}
        for turn in range(options.rounds):
            names = list(loads)
            for name in names[turn % 4 :] + names[: turn % 4]:
                server, clients, asks = loads[name]
                arrivals = rate if asks else 1e-9
                runs[name].append(
                    asyncio.run(both(ports[server], clients, arrivals, options.seconds, turn))
                )
        found = {name: summary(runs[name]) for name in loads}
        alone, crowd = found["alone"], found["best effort"]["best_effort_tokens_per_s"]
        for name, row in found.items():
            if "ttft_p95_ms" in row:
                row["ttft_ratio"] = row["ttft_p95_ms"] / alone["ttft_p95_ms"]
                row["tpot_ratio"] = row["tpot_p95_ms"] / alone["tpot_p95_ms"]
                times = (
                    f"{row['ttft_p95_ms']:7.1f} ms {row['tpot_p95_ms']:7.2f} ms"
                    f" {row['ttft_ratio']:5.1f} {row['tpot_ratio']:5.1f}"
                )
            else:
                times = " " * 33
            row["best_effort_ratio"] = row["best_effort_tokens_per_s"] / crowd
            shares = f"{row['best_effort_tokens_per_s']:8.0f}/s {row['best_effort_ratio']:8.2f}"
            print(f"{rate:5.1f} {name:11} {times} {shares}")
            rows.append({"rate": rate, "load": name, **row})
    return rows


def single(ports: dict[str, int], options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    print("clients of one class   tokens/s and first token, default over fcfs")
    for clients in CLIENTS:
        runs: dict[str, list[tuple[float, float]]] = {name: [] for name in ports}
        for turn in range(options.rounds):
            for name in sorted(ports, reverse=bool(turn % 2)):
                runs[name].append(asyncio.run(closed_loop(ports[name], clients, options.seconds)))
        pairs = list(zip(runs["default"], runs["fcfs"], strict=True))
        throughput = statistics.median(a[0] / b[0] for a, b in pairs)
        first = statistics.median(b[1] / a[1] for a, b in pairs)
        print(f"{clients:5d} {throughput:20.3f} {first:8.3f}")
        rows.append({"clients": clients, "throughput_ratio": throughput, "ttft_ratio": first})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rates", type=rates, default="2", help="of interactive requests a second")
    parser.add_argument("--clients", type=int, default=48, help="of best effort")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--interactivity", type=float, default=0.5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        profile = str(Path(folder) / "profile.json")
        own = ("--profile", profile, "--interactivity", str(options.interactivity))
        servers = {
            "fcfs": start_server("builtin", "--scheduler", "fcfs"),
            "default": start_server("builtin", *own),
        }
        try:
            ports = {name: port for name, (_, port) in servers.items()}
            measured_s = wait_for_slo(ports["default"])
            print(f"the default server plans by slo after {measured_s:.0f} s")
            rows = {"mixed": mixed(ports, options), "single": single(ports, options)}
        finally:
            for process, _ in servers.values():
                process.terminate()
                process.wait(30)
    if options.out:
        report.save(
            options.out,
            measured_s=measured_s,
            clients=options.clients,
            seconds=options.seconds,
            rounds=options.rounds,
            interactivity=options.interactivity,
            **rows,
        )


if __name__ == "__main__":
    main()
