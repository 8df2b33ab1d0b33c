"""Interactive and best-effort requests on one server: scheduler slo beside fcfs with class
priorities.

    python benchmarks/coserve.py --rates 2,4,6 --seconds 20 --out benchmarks/results/coserve.json

Two servers of the built-in model stand side by side and are loaded in turns. Interactive requests
arrive by a Poisson process; best-effort clients send their next request when the last one has
ended, more of them than the server computes at once. Targets are multiples of what the idle server
does, since machines differ and change. Attainment is the share of interactive requests that kept
both targets as their client saw it, over HTTP; "alone" is fcfs without best effort; "of fcfs" is
the best-effort work (tokens of prompts and answers) over that of fcfs at the same rate. Scheduler
slo plans with the profile that ``weft profile`` makes at the start, unless one is given.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import orjson
import yaml

import report
from serve import start_server
from weft.core.errors import ParameterError
from weft.workload.arrivals import gamma_times, parse_rates

PROMPT_TOKENS, OUTPUT_TOKENS = 64, 32
BE_PROMPT_TOKENS, BE_OUTPUT_TOKENS = 256, 128
FLEX = {"service_tier": "flex"}
FILLED_S = 3.0  # until a crowd fills the server
COUNTED = ("generation_tokens", "prefix_cache_queries", "slo_requests_demoted")
SETTINGS = {"kv_memory": "256MiB", "max_num_seqs": 64, "prefix_caching": False}


@dataclass(frozen=True)
class Targets:
    """Seconds that an interactive request may take to its first token, and for each further one."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True)
class Timing:
    """One interactive request as its client saw it; infinite if it was refused."""

    ttft_s: float
    tpot_s: float

    def kept(self, targets: Targets) -> bool:
        return self.ttft_s <= targets.ttft_s and self.tpot_s <= targets.tpot_s


def body(tokens: int, most: int, draw: random.Random, **more: Any) -> bytes:
    prompt = [draw.randrange(8, 4096) for _ in range(tokens)]
    return orjson.dumps(
        {"model": "model", "prompt": prompt, "max_tokens": most, "ignore_eos": True,
         "temperature": 0, **more}
    )  # fmt: skip


async def ask(port: int, asked: bytes) -> Timing:
    """Send one request over a connection of its own and read its answer to the end."""
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"connection: close\r\ncontent-length: {len(asked)}\r\n\r\n"
    writer.write(head.encode() + asked)
    first = last = float("inf")
    while data := await reader.read(2**16):
        if b'"text"' in data:
            last = time.perf_counter()
            first = min(first, last)
    writer.close()
    if first == float("inf"):
        return Timing(first, first)
    return Timing(first - started, (last - first) / (OUTPUT_TOKENS - 1))


async def interactive(
    port: int, rate: float, seconds: float, seed: int, burstiness: float = 1.0, **more: Any
) -> list[Timing]:
    """Arrivals for so many seconds, and what became of all of them.

    Args:
        burstiness: as of ``gamma_times``; 1 is a Poisson process.
        more: fields of each body.
    """
    draw, tasks = random.Random(f"interactive {seed}"), []
    started = time.perf_counter()
    for due in islice(gamma_times(rate, burstiness, seed), 1, None):
        if due >= seconds:
            break
        asked = body(PROMPT_TOKENS, OUTPUT_TOKENS, draw, stream=True, **more)
        await asyncio.sleep(max(0.0, started + due - time.perf_counter()))
        tasks.append(asyncio.create_task(ask(port, asked)))
    return await asyncio.gather(*tasks)


async def best_effort(port: int, number: int, more: Mapping[str, Any] = FLEX) -> None:
    """A client that always has one request open; ends by being cancelled."""
    draw = random.Random(f"best effort {number}")
    while True:
        asked = body(BE_PROMPT_TOKENS, BE_OUTPUT_TOKENS, draw, **more)
        await ask(port, asked)


def counted(port: int, name: str) -> float:
    page = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    found = re.search(rf"^weft:{name}_total.* ([0-9.e+]+)$", page, re.MULTILINE)
    return float(found[1]) if found else 0.0


@asynccontextmanager
async def clients(
    port: int, count: int, seed: int, more: Mapping[str, Any] = FLEX
) -> AsyncIterator[None]:
    """Best-effort clients while the block runs; ``more`` are fields of their bodies."""
    crowd = [
        asyncio.create_task(best_effort(port, 1000 * seed + number, more))
        for number in range(count)
    ]
    await asyncio.sleep(FILLED_S if count else 0.5)
    yield
    for task in crowd:
        task.cancel()
    await asyncio.gather(*crowd, return_exceptions=True)


async def both(
    port: int,
    crowd: AbstractAsyncContextManager[None],
    rate: float,
    seconds: float,
    seed: int,
    burstiness: float = 1.0,
) -> dict[str, Any]:
    """Load with both kinds: the times of interactive requests, and best-effort tokens a second.

    Tokens of prompts and of answers are counted by the server, as they are computed.

    Args:
        crowd: best effort while its block runs.
        rate: of interactive requests a second; 0 for none.
    """
    async with crowd:
        before = [counted(port, name) for name in COUNTED]
        started = time.perf_counter()
        timings = await interactive(port, rate, seconds, seed, burstiness) if rate else []
        await asyncio.sleep(max(0.0, seconds - (time.perf_counter() - started)))
        took = time.perf_counter() - started
        output, prompt, demoted = (
            counted(port, name) - past for name, past in zip(COUNTED, before, strict=True)
        )
    while running(port):
        await asyncio.sleep(0.1)
    answered = sum(timing.ttft_s < float("inf") for timing in timings)
    return {
        "timings": timings,
        "demoted": demoted,
        "be_output_tokens_per_s": max(0.0, output - answered * OUTPUT_TOKENS) / took,
        "be_prompt_tokens_per_s": max(0.0, prompt - answered * PROMPT_TOKENS) / took,
    }


def running(port: int) -> bool:
    page = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    return re.search(r"^weft:num_requests_running.* 0\.0$", page, re.MULTILINE) is None


def summary(name: str, runs: Sequence[dict[str, Any]], targets: Targets) -> dict[str, Any]:
    timings = [timing for run in runs for timing in run["timings"]]
    if not all(run["timings"] for run in runs):
        raise SystemExit("a run had no interactive request; raise --rates or --seconds")

    def p(values: list[float], share: float) -> float:
        return sorted(values)[min(len(values) - 1, int(share * len(values)))] * 1e3

    ttfts, tpots = [t.ttft_s for t in timings], [t.tpot_s for t in timings]
    return {
        "load": name,
        "requests": len(timings),
        "demoted": sum(run["demoted"] for run in runs),
        "attainment": sum(t.kept(targets) for t in timings) / len(timings),
        "ttft_attainment": sum(t <= targets.ttft_s for t in ttfts) / len(timings),
        "tpot_attainment": sum(t <= targets.tpot_s for t in tpots) / len(timings),
        "ttft_ms": {"p50": p(ttfts, 0.5), "p99": p(ttfts, 0.99)},
        "tpot_ms": {"p50": p(tpots, 0.5), "p99": p(tpots, 0.99)},
        "be_output_tokens_per_s": statistics.median(r["be_output_tokens_per_s"] for r in runs),
        "be_prompt_tokens_per_s": statistics.median(r["be_prompt_tokens_per_s"] for r in runs),
        "by_round": [sum(t.kept(targets) for t in r["timings"]) / len(r["timings"]) for r in runs],
    }


def make_profile(folder: Path) -> Path:
    path, config = folder / "profile.json", folder / "engine.yaml"
    config.write_text(yaml.safe_dump(SETTINGS))
    command = [sys.executable, "-m", "weft.cli", "profile", "--config", str(config)]
    subprocess.run([*command, "--profile", str(path)], check=True)
    return path


def idle_targets(port: int, ttft: float, tpot: float) -> Targets:
    """Multiples of the medians of requests that come one after the other."""
    draw = random.Random("idle")

    async def one_by_one() -> list[Timing]:
        asked = [body(PROMPT_TOKENS, OUTPUT_TOKENS, draw, stream=True) for _ in range(40)]
        return [await ask(port, each) for each in asked][10:]

    timings = asyncio.run(one_by_one())
    idle = Targets(
        statistics.median(t.ttft_s for t in timings), statistics.median(t.tpot_s for t in timings)
    )
    print(f"idle: TTFT {idle.ttft_s * 1e3:.1f} ms, TPOT {idle.tpot_s * 1e3:.2f} ms")
    return Targets(ttft * idle.ttft_s, tpot * idle.tpot_s)


def serve(folder: Path, name: str, **settings: Any) -> tuple[subprocess.Popen[bytes], int]:
    config = folder / f"{name}.yaml"
    config.write_text(yaml.safe_dump(settings))
    return start_server("builtin", "--scheduler", name, "--config", str(config))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--profile", type=Path, help="made before; unset makes one")
    parser.add_argument("--ttft", type=float, default=10.0, help="target as a multiple of idle")
    parser.add_argument("--tpot", type=float, default=4.0, help="target as a multiple of idle")
    parser.add_argument(
        "--rates", type=rates, default="2,6", help="of interactive requests a second"
    )
    parser.add_argument("--clients", type=int, default=96, help="of best effort")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        profile = options.profile or make_profile(folder)
        servers = {"fcfs": serve(folder, "fcfs")}
        try:
            targets = idle_targets(servers["fcfs"][1], options.ttft, options.tpot)
            table = {"interactive": asdict(targets)}
            servers["slo"] = serve(folder, "slo", profile=str(profile), classes=table)
            rows = measure({name: port for name, (_, port) in servers.items()}, targets, options)
        finally:
            for process, _ in servers.values():
                process.terminate()
                process.wait(30)
    if options.out:
        report.save(
            options.out,
            targets=asdict(targets),
            clients=options.clients,
            seconds=options.seconds,
            rounds=options.rounds,
            rows=rows,
        )


def rates(words: str) -> list[float]:
    try:
        return parse_rates(words)
    except ParameterError as error:
        raise argparse.ArgumentTypeError(error.message) from None


def be_work(row: dict[str, Any]) -> float:
    return row["be_output_tokens_per_s"] + row["be_prompt_tokens_per_s"]


def measure(
    ports: dict[str, int], targets: Targets, options: argparse.Namespace
) -> list[dict[str, Any]]:
    print(f"targets: TTFT {targets.ttft_s * 1e3:.0f} ms, TPOT {targets.tpot_s * 1e3:.1f} ms")
    print(
        " req/s load   both kept  TTFT kept  TPOT kept  TPOT p50/p99 ms  BE out/in tok/s  of fcfs"
    )
    loads = {
        "alone": (ports["fcfs"], 0),
        "fcfs": (ports["fcfs"], options.clients),
        "slo": (ports["slo"], options.clients),
    }
    rows = []
    for rate in options.rates:
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in loads}
        for turn in range(options.rounds):
            names = list(loads)
            for name in names[turn % 3 :] + names[: turn % 3]:
                port, count = loads[name]
                crowd = clients(port, count, turn)
                runs[name].append(asyncio.run(both(port, crowd, rate, options.seconds, turn)))
        found = {name: summary(name, runs[name], targets) for name in loads}
        for name, row in found.items():
            base = be_work(found["fcfs"])
            row["be_of_fcfs"] = be_work(row) / base if base else None
            share = "" if row["be_of_fcfs"] is None else f"{row['be_of_fcfs']:8.2f}"
            tpot = "/".join(f"{row['tpot_ms'][p]:.1f}" for p in ("p50", "p99"))
            print(
                f"{rate:6.1f} {name:<6} {row['attainment']:9.1%} {row['ttft_attainment']:10.1%} "
                f"{row['tpot_attainment']:10.1%}  {tpot:>15}   "
                f"{row['be_output_tokens_per_s']:7.0f} {row['be_prompt_tokens_per_s']:7.0f} {share}"
            )
            rows.append({"rate": rate, **row})
    return rows


if __name__ == "__main__":
    main()
