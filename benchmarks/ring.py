"""Latency of the ring, and its cost per token.

    python benchmarks/ring.py [--rounds 2000] [--out benchmarks/results/ring.json]

Native part (``tests/ring/handoff.cpp``, compiled here): 64 bytes one way between two processes,
spinning, spinning 50 us before a futex, futex alone, and eventfd; beside a pipe's round trip of the
same size in the same run, so that runs on different or busy machines can be compared. Each message
but those of ``spin`` comes 200 us after the last one, so the receiver is asleep where it may sleep.
Two processes that spin need two free cores; on fewer the tail of ``spin`` shows it.

Full ring: 4096 requests in flight; microseconds to take each of them in when they come at once,
and to find the one that is cancelled and the one that has a token.

Python part: microseconds a token costs each side (64 sequences, one token each a step), and the
round trip of a one-token request between an event loop and an engine process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import report
from weft.core.plan import StepOutputs, Update
from weft.core.types import FinishReason, Request, SamplingParams
from weft.ring.client import RingClient
from weft.ring.inbox import RingInbox
from weft.ring.layout import EngineInfo
from weft.ring.segment import RingFds, create_ring

ROOT = Path(__file__).resolve().parents[1]
MODES = ("spin", "spin_futex", "futex", "eventfd", "pipe")
SEQUENCES = 64
SLOTS = 4096


def compile_native(folder: str) -> Path | None:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        print("no C++ compiler: the native part is left out", file=sys.stderr)
        return None
    program = Path(folder) / "handoff"
    command = [compiler, "-std=c++20", "-O2", f"-I{ROOT / 'src/weft/ring'}"]
    command += [str(ROOT / "tests/ring/handoff.cpp"), "-o", str(program), "-pthread"]
    subprocess.run(command, check=True)
    return program


def measure_native(rounds: int) -> dict[str, dict[str, float]]:
    """Mode -> p50 and p99 in microseconds, and the median over the pipe's."""
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        program = compile_native(folder)
        for mode in MODES if program else ():
            done = subprocess.run(
                [str(program), mode, str(rounds)], capture_output=True, text=True, check=True
            )
            found[mode] = json.loads(done.stdout)
    for row in found.values():
        del row["mode"], row["rounds"]
        row["of_pipe"] = row["p50_us"] / found["pipe"]["p50_us"]
    return found


def measure_tokens(steps: int) -> dict[str, float]:
    """Microseconds per token of ``publish`` and of ``poll`` with the sink's updates made."""
    fds = create_ring()
    inbox, client = RingInbox([fds]), RingClient(fds)
    params = SamplingParams(max_tokens=steps + 1)
    client.submit([Request(i, (1, 2, 3), params) for i in range(SEQUENCES)], lambda _: None)
    ids = [request.id for request in inbox.receive()[0]]
    publish, poll = [], []
    for step in range(steps):
        outputs = StepOutputs([(i, step) for i in ids], [])
        start = time.perf_counter()
        inbox.publish(outputs)
        between = time.perf_counter()
        client.poll()
        publish.append(between - start)
        poll.append(time.perf_counter() - between)
    inbox.close()
    client.close()
    fds.close()
    scale = 1e6 / SEQUENCES
    return {
        "publish_us_per_token": statistics.median(publish) * scale,
        "poll_us_per_token": statistics.median(poll) * scale,
    }


def measure_full(rounds: int) -> dict[str, float]:
    """Microseconds of the native part with a ring full of requests."""
    fds = create_ring(SLOTS, 512 * 2**20)
    inbox, client = RingInbox([fds]), RingClient(fds)
    params = SamplingParams(max_tokens=1024)
    claims = []
    for burst in range(5):
        first = SLOTS * burst
        client.submit([Request(first + i, (1, 2, 3), params) for i in range(SLOTS)], lambda _: None)
        start = time.perf_counter()
        requests, _ = inbox._engine.receive()
        claims.append(time.perf_counter() - start)
        ids = [request[0] for request in requests]
        if burst < 4:
            ends = [Update(i, 1, finish=FinishReason.LENGTH) for i in ids]
            inbox.publish(StepOutputs([], ends))
            client.poll()
    cancels, polls = [], []
    for number in range(min(rounds, SLOTS // 2)):
        client.cancel(first + 2 * number)
        start = time.perf_counter()
        inbox._engine.receive()
        cancels.append(time.perf_counter() - start)
        inbox.publish(StepOutputs([(ids[2 * number + 1], 7)], []))
        start = time.perf_counter()
        client.poll()
        polls.append(time.perf_counter() - start)
    inbox.close()
    client.close()
    fds.close()
    return {
        "full_us_per_claim": statistics.median(claims) / SLOTS * 1e6,
        "full_cancel_us": statistics.median(cancels) * 1e6,
        "full_poll_us": statistics.median(polls) * 1e6,
    }


def serve(text: str) -> None:
    """The engine process of ``measure_round_trip``: answers every request with one token."""
    inbox = RingInbox([RingFds.parse(text)])
    inbox.write_info(EngineInfo(ready=1, max_model_len=1024))
    print("ready", flush=True)
    while True:
        requests, _ = inbox.receive()
        if requests:
            ends = [Update(r.id, r.prompt[0], finish=FinishReason.LENGTH) for r in requests]
            inbox.publish(StepOutputs([], ends))
        else:
            inbox.wait()


async def ask(client: RingClient, rounds: int) -> list[float]:
    client.attach(asyncio.get_running_loop())
    params = SamplingParams(max_tokens=1)
    seconds = []
    for number in range(rounds):
        await asyncio.sleep(200e-6)
        answered = asyncio.Event()
        start = time.perf_counter()
        client.submit([Request(number, (7, 8), params)], lambda _, done=answered: done.set())
        await answered.wait()
        seconds.append(time.perf_counter() - start)
    client.close()
    return seconds


def measure_round_trip(rounds: int) -> dict[str, float]:
    """Microseconds from ``submit`` on an event loop to the sink's call."""
    fds = create_ring()
    command = [sys.executable, __file__, "--serve", str(fds)]
    engine = subprocess.Popen(command, pass_fds=fds.pass_fds, stdout=subprocess.PIPE)
    assert engine.stdout is not None
    engine.stdout.readline()
    seconds = sorted(asyncio.run(ask(RingClient(fds), rounds)))
    engine.kill()
    engine.wait()
    fds.close()
    return {
        "request_p50_us": seconds[rounds // 2] * 1e6,
        "request_p99_us": seconds[rounds * 99 // 100] * 1e6,
    }


def show(result: dict[str, Any]) -> None:
    print(f"{'hand-off of 64 bytes':<22}{'p50 us':>10}{'p99 us':>10}{'/ pipe':>8}")
    for mode, row in result["native"].items():
        way = "round trip" if mode == "pipe" else "one way"
        numbers = f"{row['p50_us']:>10.2f}{row['p99_us']:>10.2f}{row['of_pipe']:>8.2f}"
        print(f"{mode + ', ' + way:<22}{numbers}")
    for name, value in (result["full"] | result["through_python"]).items():
        print(f"{name:<22}{value:>10.2f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    result = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}",
        "load": os.getloadavg()[0],
        "native": measure_native(options.rounds),
        "full": measure_full(options.rounds),
        "through_python": measure_tokens(options.rounds) | measure_round_trip(options.rounds),
    }
    show(result)
    if options.out:
        report.save(options.out, **result)


if __name__ == "__main__":
    main()
