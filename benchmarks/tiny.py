"""Requests of one token a second and core of the request plane; the engine computes nothing.

    python benchmarks/tiny.py [--out benchmarks/results/tiny.json]

Clients keep their connections and ask one after the other. The figure is CPU time of the
request-plane process per request; its inverse is requests a second per core. ``guarded`` is a
server with keys, deadlines, a bounded queue and a log line for each request; the two kinds take
turns, so that the noise of the machine meets both.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from pathlib import Path

import orjson

import report
from stream import cpu_seconds, request_plane
from weft.server.options import ServerOptions

CLIENTS, REQUESTS = 32, 6000
PLAIN = ServerOptions(port=0)
GUARDED = ServerOptions(
    port=0,
    api_key=("key",),
    access_log=True,
    request_timeout_s=60.0,
    max_queued_requests=1000,
    max_queued_tokens=100_000,
    max_requests_per_key=1000,
)


async def ask(port: int, count: int) -> None:
    """So many requests on one connection."""
    body = orjson.dumps({"model": "null", "prompt": [5, 6, 7], "max_tokens": 1})
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer key\r\n"
    request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(count):
        writer.write(request)
        answer = await reader.readuntil(b"\r\n\r\n")
        if not answer.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"refused: {answer.decode()}")
        length = int(answer.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
    writer.close()


def run_clients(port: int, count: int) -> None:
    async def all_of_them() -> None:
        await asyncio.gather(*(ask(port, count // CLIENTS) for _ in range(CLIENTS)))

    asyncio.run(all_of_them())


def measure(options: ServerOptions, rate: float) -> dict[str, float]:
    """One round of all clients against fresh processes."""
    with request_plane(options, rate) as (pid, port):
        asyncio.run(ask(port, 50))
        before, started = cpu_seconds(pid), time.monotonic()
        command = [sys.executable, str(Path(__file__)), "--clients", str(port)]
        subprocess.run(command, check=True)
        seconds, spent = time.monotonic() - started, cpu_seconds(pid) - before
    return {
        "cpu_us_per_request": spent / REQUESTS * 1e6,
        "requests_per_s_per_core": REQUESTS / spent,
        "wall_requests_per_s": REQUESTS / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", type=float, default=5000.0, help="engine steps a second at most")
    parser.add_argument("--clients", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.clients:
        return run_clients(options.clients, REQUESTS)
    rounds: dict[str, list[dict[str, float]]] = {"plain": [], "guarded": []}
    for number in range(options.rounds):
        for name, chosen in (("plain", PLAIN), ("guarded", GUARDED)):
            rounds[name].append(measure(chosen, options.rate))
            shown = ", ".join(f"{k} {v:,.0f}" for k, v in rounds[name][-1].items())
            print(f"round {number + 1}, {name}: {shown}")
    median = {
        name: {k: statistics.median(r[k] for r in own) for k in own[0]}
        for name, own in rounds.items()
    }
    for name, values in median.items():
        print(f"median, {name}: " + ", ".join(f"{k} {v:,.0f}" for k, v in values.items()))
    if options.out:
        report.save(options.out, clients=CLIENTS, requests=REQUESTS, median=median, rounds=rounds)
    return None


if __name__ == "__main__":
    main()
