"""What a remote request plane costs: time to first token, time between tokens, and CPU time.

    python benchmarks/remote_ring.py [--rounds 12] [--out benchmarks/results/remote_ring.json]

Two servers of the built-in model run at once: ``weft serve``, whose request plane shares memory
with the engine, and ``weft serve --engine-only`` with ``weft frontend`` over TCP on loopback. The
same streams go to one and to the other in turn, round by round, so that what else the machine does
meets both. Each engine has one thread. A figure is the median over all streams; a ratio is the
median over the rounds of remote to local in the same round. CPU time is that of the processes
between client and engine, and counts no matter who else uses the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

import report
from weft.engine.machine import cpu_name

WEFT = [sys.executable, "-m", "weft.cli"]
ENGINE = ["--threads", "1", "--kv-memory", "64MiB", "--max-num-seqs", "16", "--no-standby"]
ENGINE += ["--self-profile-s", "0"]
PROMPT, TOKENS = list(range(300, 364)), 200
CROWDS = (1, 8)  # streams at once
START_S = 60.0
BETWEEN = ("weft-frontend", "weft-ring-agent")  # processes between client and engine


class RunningServer:
    """A server, as one or two commands.

    Attributes:
        port: where it serves HTTP.
    """

    def __init__(self, port: int, commands: list[subprocess.Popen[bytes]]) -> None:
        self.port, self._commands = port, commands

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far of each kind of process between client and engine."""
        spent = dict.fromkeys(BETWEEN, 0.0)
        for command in self._commands:
            for child in psutil.Process(command.pid).children(recursive=True):
                title = child.cmdline()[0].split()[0] if child.cmdline() else ""
                if title in spent:
                    times = child.cpu_times()
                    spent[title] += times.user + times.system
        return spent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def command(log: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as errors:
        process = subprocess.Popen([*WEFT, *words], stderr=errors)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(START_S)


@contextmanager
def local_server(folder: Path) -> Iterator[RunningServer]:
    port = free_port()
    given = ["serve", "--port", str(port), "--frontends", "1", *ENGINE]
    with command(folder / "local.txt", *given) as process:
        wait_until_ready(port)
        yield RunningServer(port, [process])


@contextmanager
def remote_server(folder: Path) -> Iterator[RunningServer]:
    port, log = free_port(), folder / "engine.txt"
    listen = ["serve", "--engine-only", "--ring-listen", "127.0.0.1:0", *ENGINE]
    with command(log, *listen) as engine:
        end = time.monotonic() + START_S
        while not (found := re.search(r"request planes at (\S+)", log.read_text())):
            if time.monotonic() > end:
                raise SystemExit(log.read_text())
            time.sleep(0.05)
        given = ["frontend", "--ring", found[1], "--port", str(port), "--frontends", "1"]
        with command(folder / "frontend.txt", *given) as plane:
            wait_until_ready(port)
            yield RunningServer(port, [engine, plane])


def wait_until_ready(port: int) -> None:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end = time.monotonic() + START_S
    while True:
        try:
            direct.open(f"http://127.0.0.1:{port}/ready", timeout=START_S).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


async def stream(port: int, salt: int) -> tuple[float, float, str]:
    """One stream: seconds to its first token, seconds between tokens, and its text."""
    body = {"model": "builtin", "prompt": [1000 + salt % 20, *PROMPT], "max_tokens": TOKENS}
    body |= {"stream": True, "temperature": 0, "ignore_eos": True}
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    began = time.perf_counter()
    writer.write(f"{head}connection: close\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
    first = last = 0.0
    text = ""
    async for line in reader:
        if line.startswith(b"data: {"):
            last = time.perf_counter()
            first = first or last
            text += json.loads(line[6:])["choices"][0]["text"]
    writer.close()
    return first - began, (last - first) / (TOKENS - 1), text


async def crowd(port: int, streams: int, salt: int) -> list[tuple[float, float, str]]:
    return await asyncio.gather(*(stream(port, salt + i) for i in range(streams)))


def measure(servers: dict[str, RunningServer], streams: int, rounds: int) -> dict[str, Any]:
    """Rounds of streams to both servers in turn."""
    seen: dict[str, list[list[tuple[float, float, str]]]] = {name: [] for name in servers}
    spent = {name: dict.fromkeys(BETWEEN, 0.0) for name in servers}
    for number in range(-1, rounds):  # the first round warms up
        texts = []
        for name in list(servers)[:: 1 if number % 2 else -1]:
            before = servers[name].cpu_s()
            answers = asyncio.run(crowd(servers[name].port, streams, number))
            texts.append([text for *_, text in answers])
            if number < 0:
                continue
            for title, seconds in servers[name].cpu_s().items():
                spent[name][title] += seconds - before[title]
            seen[name].append(answers)
        if texts[0] != texts[1]:
            raise SystemExit("The two servers gave different answers.")
    found: dict[str, Any] = {"streams": streams}
    tokens = rounds * streams * TOKENS
    for name in servers:
        flat = [answer for answers in seen[name] for answer in answers]
        found[name] = {
            "ttft_ms": 1e3 * statistics.median(ttft for ttft, *_ in flat),
            "tpot_ms": 1e3 * statistics.median(tpot for _, tpot, _ in flat),
            "cpu_us_per_token": {
                title: 1e6 * seconds / tokens for title, seconds in spent[name].items() if seconds
            },
        }
    for which, name in enumerate(("ttft_ratio", "tpot_ratio")):
        found[name] = statistics.median(
            statistics.median(a[which] for a in there) / statistics.median(a[which] for a in here)
            for here, there in zip(seen["local"], seen["remote"], strict=True)
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {
            "local": stack.enter_context(local_server(folder)),
            "remote": stack.enter_context(remote_server(folder)),
        }
        results = [measure(servers, streams, arguments.rounds) for streams in CROWDS]
    print(json.dumps(results, indent=2))
    if arguments.out is not None:
        report.save(
            arguments.out,
            cpu=f"{cpu_name()}, {os.cpu_count()} cores",
            load=os.getloadavg()[0],
            tokens_per_stream=TOKENS,
            prompt_tokens=1 + len(PROMPT),
            runs=results,
        )


if __name__ == "__main__":
    main()
