"""Interactive requests beside best effort with the scheduler that a server chooses.

    python benchmarks/default_policy.py --rates 1,2,4 --burstiness 1,0.25 \\
        --out benchmarks/results/default_policy.json

Two servers of the built-in model stand side by side and are loaded in turns: one with default
settings, which measures its steps in its first idle minute and goes over to the SLO policy, and one
with ``--scheduler fcfs``. Rows:

    alone        interactive requests only, default server
    one class    both kinds, all asked as interactive, fcfs
    priorities   best effort asked as flex, fcfs: priorities of classes are all there is
    default      best effort asked as flex, default server
    batch        a batch of 2,000 lines instead of best-effort clients, default server
    flex alone   no interactive requests, default server
    batch alone  the same of the batch

Ratios are of medians over rounds: p95 of the time to the first token and between tokens over those
of "alone", and tokens of best effort (prompts and answers) over those of "flex alone" or "batch
alone". "kept" is the share of interactive requests that kept both targets, as their client saw it;
targets are those that the default server derives. Arrivals are gamma distributed; burstiness 1 is a
Poisson process, less comes in bursts. At the end clients of one class alone, 1, 8 and 32 of them,
compare both servers: default over fcfs.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import httpx

import report
from coserve import (
    BE_OUTPUT_TOKENS,
    BE_PROMPT_TOKENS,
    FILLED_S,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    Targets,
    Timing,
    ask,
    body,
    both,
    clients,
    rates,
    running,
)
from serve import start_server

CLIENTS = (1, 8, 32)
BATCH_LINES = 2000
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


def summary(runs: list[dict[str, Any]], targets: Targets) -> dict[str, float]:
    """Medians over rounds."""
    found: dict[str, float] = {
        "best_effort_tokens_per_s": statistics.median(
            run["be_output_tokens_per_s"] + run["be_prompt_tokens_per_s"] for run in runs
        )
    }
    if all(run["timings"] for run in runs):
        timings: list[list[Timing]] = [run["timings"] for run in runs]
        found["requests"] = sum(map(len, timings))
        found["kept"] = sum(one.kept(targets) for each in timings for one in each)
        found["kept"] /= found["requests"]
        for name in ("ttft", "tpot"):
            found[f"{name}_p95_ms"] = 1e3 * statistics.median(
                p95([getattr(one, f"{name}_s") for one in each]) for each in timings
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


@asynccontextmanager
async def batch(port: int, seed: int) -> AsyncIterator[None]:
    """A batch that the server answers while the block runs, and that is cancelled at its end."""
    draw = random.Random(f"batch {seed}")
    lines = b"".join(
        b'{"custom_id": "%d", "method": "POST", "url": "/v1/completions", "body": %b}\n'
        % (number, body(BE_PROMPT_TOKENS, BE_OUTPUT_TOKENS, draw))
        for number in range(BATCH_LINES)
    )
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}/v1", timeout=60) as http:
        form = {"file": ("batch.jsonl", lines)}
        file = await http.post("/files", files=form, data={"purpose": "batch"})
        asked = {"input_file_id": file.raise_for_status().json()["id"]}
        asked |= {"endpoint": "/v1/completions", "completion_window": "24h"}
        made = (await http.post("/batches", json=asked)).raise_for_status().json()["id"]

        async def leaves(*statuses: str) -> str:
            while (status := (await http.get(f"/batches/{made}")).json()["status"]) in statuses:
                await asyncio.sleep(0.05)
            return str(status)

        await leaves("validating")
        await asyncio.sleep(FILLED_S)
        yield
        if await leaves() != "in_progress":
            raise SystemExit("the batch has ended before the run; raise BATCH_LINES")
        (await http.post(f"/batches/{made}/cancel")).raise_for_status()
        await leaves("cancelling")


@dataclass(frozen=True)
class Load:
    """One row of the table; see the module docstring."""

    server: str
    crowd: Callable[[int, int, int], AbstractAsyncContextManager[None]]  # port, clients, seed
    asks: bool = True


def none(port: int, _: int, seed: int) -> AbstractAsyncContextManager[None]:
    return clients(port, 0, seed)


def one_class(port: int, count: int, seed: int) -> AbstractAsyncContextManager[None]:
    return clients(port, count, seed, {})


def lines(port: int, _: int, seed: int) -> AbstractAsyncContextManager[None]:
    return batch(port, seed)


LOADS = {
    "alone": Load("default", none),
    "one class": Load("fcfs", one_class),
    "priorities": Load("fcfs", clients),
    "default": Load("default", clients),
    "batch": Load("default", lines),
    "flex alone": Load("default", clients, asks=False),
    "batch alone": Load("default", lines, asks=False),
}


def targets_of(port: int) -> Targets:
    rows = httpx.get(f"http://127.0.0.1:{port}/v1/targets").json()["classes"]
    (row,) = (row for row in rows if row["name"] == "interactive")
    return Targets(row["ttft_s"], row["tpot_s"])


def mixed(ports: dict[str, int], options: argparse.Namespace) -> list[dict[str, Any]]:
    targets, rows = targets_of(ports["default"]), []
    print(f"targets: TTFT {1e3 * targets.ttft_s:.0f} ms, TPOT {1e3 * targets.tpot_s:.1f} ms")
    print(" req/s burst load         TTFT p95  TPOT p95  of alone    kept  best effort  of alone")
    for rate, burstiness in product(options.rates, options.burstiness):
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in LOADS}
        for turn in range(options.rounds):
            names = list(LOADS)
            first = turn * 3 % len(names)
            for name in names[first:] + names[:first]:
                load = LOADS[name]
                port, arrivals = ports[load.server], rate if load.asks else 0.0
                crowd = load.crowd(port, options.clients, turn)
                one = both(port, crowd, arrivals, options.seconds, turn, burstiness)
                runs[name].append(asyncio.run(one))
        found = {name: summary(runs[name], targets) for name in LOADS}
        for name, row in found.items():
            whole = found["batch alone" if name.startswith("batch") else "flex alone"]
            row["best_effort_ratio"] = (
                row["best_effort_tokens_per_s"] / whole["best_effort_tokens_per_s"]
            )
            times = " " * 38
            if "kept" in row:
                for which in ("ttft", "tpot"):
                    row[f"{which}_ratio"] = (
                        row[f"{which}_p95_ms"] / found["alone"][f"{which}_p95_ms"]
                    )
                times = (
                    f"{row['ttft_p95_ms']:6.1f} ms {row['tpot_p95_ms']:6.2f} ms"
                    f" {row['ttft_ratio']:4.1f} {row['tpot_ratio']:4.1f} {row['kept']:7.1%}"
                )
            shares = f"{row['best_effort_tokens_per_s']:9.0f}/s {row['best_effort_ratio']:9.2f}"
            print(f"{rate:6.1f} {burstiness:5.2f} {name:11} {times} {shares}", flush=True)
            rows.append({"rate": rate, "burstiness": burstiness, "load": name, **row})
    return rows


def single(ports: dict[str, int], options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    print("clients of one class   tokens/s and first token, default over fcfs")
    for count in CLIENTS:
        runs: dict[str, list[tuple[float, float]]] = {name: [] for name in ports}
        for turn in range(options.rounds):
            for name in sorted(ports, reverse=bool(turn % 2)):
                runs[name].append(asyncio.run(closed_loop(ports[name], count, options.seconds)))
        pairs = list(zip(runs["default"], runs["fcfs"], strict=True))
        throughput = statistics.median(a[0] / b[0] for a, b in pairs)
        first = statistics.median(b[1] / a[1] for a, b in pairs)
        print(f"{count:5d} {throughput:20.3f} {first:8.3f}")
        rows.append({"clients": count, "throughput_ratio": throughput, "ttft_ratio": first})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rates", type=rates, default="2", help="of interactive requests a second")
    parser.add_argument("--burstiness", type=rates, default="1", help="of their arrivals")
    parser.add_argument("--clients", type=int, default=48, help="of best effort")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--interactivity", type=float, default=0.5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        profile = str(Path(folder) / "profile.json")
        own = ("--profile", profile, "--interactivity", str(options.interactivity))
        own += ("--data-dir", folder, "--disk-reserve-bytes", "0")
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
