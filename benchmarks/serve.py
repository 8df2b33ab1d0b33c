"""A model over HTTP: requests a second, TTFT and TPOT with 1, 8, 16 and 32 clients.

    python benchmarks/serve.py [--model FOLDER] [--out benchmarks/results/serve.json]

Closed loop: every client sends its next request when the last one has ended. 64-token prompts, 64
tokens each, streamed. ``ratio`` is the output rate over HTTP divided by the rate of the same
requests through the Python API (same settings, engine in its own process, as many at once), taken
in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson

import report
from weft import LLM, SamplingParams

PROMPT_TOKENS, OUTPUT_TOKENS, VOCAB = 64, 64, 4096
SETTINGS = {"kv_memory": "256MiB", "max_num_seqs": 64, "prefix_caching": False}


@dataclass(frozen=True)
class Timing:
    """One request, in seconds from its start."""

    first: float
    last: float

    @property
    def per_token(self) -> float:
        return (self.last - self.first) / (OUTPUT_TOKENS - 1)


def prompt(draw: random.Random) -> list[int]:
    return [draw.randrange(8, VOCAB) for _ in range(PROMPT_TOKENS)]


async def one_request(port: int, ids: list[int]) -> Timing:
    """Stream one completion over a connection of its own."""
    body = orjson.dumps(
        {"model": "model", "prompt": ids, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True,
         "temperature": 0, "stream": True}
    )  # fmt: skip
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    first = last = 0.0
    while data := await reader.read(2**16):
        if b'"text"' in data:
            last = time.perf_counter() - started
            first = first or last
    writer.close()
    return Timing(first, last)


async def closed_loop(port: int, clients: int, requests: int, seed: int) -> list[Timing]:
    draw = random.Random(seed)
    work = [prompt(draw) for _ in range(requests)]

    async def client() -> list[Timing]:
        done = []
        while work:
            done.append(await one_request(port, work.pop()))
        return done

    return [t for part in await asyncio.gather(*(client() for _ in range(clients))) for t in part]


def in_process_rate(llm: LLM, clients: int, requests: int, seed: int) -> float:
    """Output tokens a second of the same closed loop through the Python API."""
    draw = random.Random(seed)
    work = [prompt(draw) for _ in range(requests)]
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)

    async def client() -> None:
        while work:
            async for _ in llm.stream_async(work.pop(), params):
                pass

    async def all_of_them() -> None:
        await asyncio.gather(*(client() for _ in range(clients)))

    started = time.perf_counter()
    asyncio.run(all_of_them())
    return requests * OUTPUT_TOKENS / (time.perf_counter() - started)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """P50, P95 and P99 in milliseconds."""
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {f"p{p}_ms": cuts[p - 1] * 1e3 for p in (50, 95, 99)}


def start_server(model: str, *more: str) -> tuple[subprocess.Popen[bytes], int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "weft.cli", "serve", "--port", str(port)]
    command += ["--model", model, "--served-model-name", "model"]
    command += ["--kv-memory", "256MiB", "--max-num-seqs", "64", "--no-prefix-caching"]
    command += [
        "--no-standby",
        *more,
    ]  # which would take time from what is measured while it starts
    started = time.perf_counter()
    process = subprocess.Popen(command)
    wait_until_bound(port)
    body = {"model": "model", "prompt": "x", "max_tokens": 1}
    httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)
    print(f"first token {time.perf_counter() - started:.2f} s after the start of the server")
    return process, port


def wait_until_bound(port: int) -> None:
    """From then on connections queue until the model is loaded."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.01)
    raise SystemExit("the server did not start")


def measure(port: int, llm: LLM, clients: int, rounds: int) -> dict[str, Any]:
    requests = max(16, 3 * clients)
    timings: list[Timing] = []
    rates, ratios = [], []
    for number in range(rounds + 1):
        started = time.perf_counter()
        taken = asyncio.run(closed_loop(port, clients, requests, number))
        rate = requests * OUTPUT_TOKENS / (time.perf_counter() - started)
        own = in_process_rate(llm, clients, requests, number)
        if number:  # the first round warms up
            timings += taken
            rates.append(rate)
            ratios.append(rate / own)
    return {
        "clients": clients,
        "requests_per_s": statistics.median(rates) / OUTPUT_TOKENS,
        "output_tokens_per_s": statistics.median(rates),
        "ratio": statistics.median(ratios),
        "ttft": percentiles([t.first for t in timings]),
        "tpot": percentiles([t.per_token for t in timings]),
        "ratios": ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    server, port = start_server(options.model)
    rows = []
    try:
        with LLM(options.model, **SETTINGS) as llm:
            print(f"{'clients':>7} {'req/s':>7} {'tok/s':>7} {'ratio':>6}   TTFT p50/p95/p99 ms"
                  "      TPOT p50/p95/p99 ms")  # fmt: skip
            for clients in options.clients:
                row = measure(port, llm, clients, options.rounds)
                ttft, tpot = (
                    "/".join(f"{v:.1f}" for v in row[name].values()) for name in ("ttft", "tpot")
                )
                print(
                    f"{clients:>7} {row['requests_per_s']:>7.1f} "
                    f"{row['output_tokens_per_s']:>7.0f} {row['ratio']:>6.2f}   {ttft:<24} {tpot}"
                )
                rows.append(row)
    finally:
        server.terminate()
        server.wait(30)
    if options.out:
        report.save(options.out, rows=rows)


if __name__ == "__main__":
    main()
