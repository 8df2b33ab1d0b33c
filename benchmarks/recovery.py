"""From SIGKILL of the engine to the next token of 16 streams, with and without a standby engine.

    python benchmarks/recovery.py [--kills 12] [--out benchmarks/results/recovery.json]

The engine is killed at a random moment of the first 4 seconds of 16 streams. The pause of a stream
is its longest silence from the signal on: what the dead engine had published may still arrive, and
the start of the next standby takes time from the streams as well. The pause of a kill is that of
the stream that waited longest.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import orjson

import report
from processes import memory, processes, wait_until_at_rest
from serve import wait_until_bound

STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS = 16, 64, 1900
QUIET_S = 11.0  # before each kill: longer than the back-off remembers
PORT = 8217


class Stream:
    """One client that reads a stream and remembers when pieces came."""

    def __init__(self, port: int, number: int) -> None:
        draw = random.Random(number)
        self._port = port
        self._prompt = [draw.randrange(100, 3900) for _ in range(PROMPT_TOKENS)]
        self.arrivals: list[float] = []
        self.errors = 0

    async def run(self) -> None:
        body = orjson.dumps(
            {"model": "builtin", "prompt": self._prompt, "max_tokens": OUTPUT_TOKENS,
             "ignore_eos": True, "temperature": 0, "stream": True}
        )  # fmt: skip
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        try:
            writer.write(head.encode() + body)
            while data := await reader.read(2**16):
                if b'"text"' in data:
                    self.arrivals.append(time.monotonic())
                self.errors += b'{"error"' in data
        finally:
            writer.close()

    def pause_s(self, killed: float) -> float:
        """The longest silence of this stream from the kill on."""
        after = [killed, *(moment for moment in self.arrivals if moment >= killed)]
        return max(later - earlier for earlier, later in itertools.pairwise(after))


async def one_kill(
    server: subprocess.Popen[bytes], port: int, number: int
) -> tuple[list[float], int]:
    """The pauses of 16 streams, and how many errors they saw."""
    streams = [Stream(port, number * STREAMS + i) for i in range(STREAMS)]
    tasks = [asyncio.create_task(stream.run()) for stream in streams]
    while not all(stream.arrivals for stream in streams):
        await asyncio.sleep(0.05)
    await asyncio.sleep(random.Random(number).uniform(0, 4))
    engine = processes(server.pid)["weft-engine"]
    killed = time.monotonic()
    engine.kill()
    while not all(sum(t > killed for t in stream.arrivals) > 20 for stream in streams):
        await asyncio.sleep(0.1)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return [stream.pause_s(killed) for stream in streams], sum(s.errors for s in streams)


async def measure(server: subprocess.Popen[bytes], kills: int, waiting: bool) -> dict[str, Any]:
    pauses: list[float] = []
    longest: list[float] = []
    private = errors = 0
    for number in range(kills):
        await asyncio.sleep(QUIET_S)
        if waiting:
            wait_until_at_rest(server.pid, "weft-standby")
            private = memory(server.pid)["weft-standby"]["private"]
        of_this, seen = await one_kill(server, PORT, number)
        print(f"kill {number}: {min(of_this):.2f} to {max(of_this):.2f} s", flush=True)
        pauses += of_this
        longest.append(max(of_this))
        errors += seen
    return {
        "standby": waiting,
        "kills": kills,
        "streams": STREAMS,
        "errors": errors,
        "median_s": round(statistics.median(pauses), 3),
        "median_of_kills_s": round(statistics.median(longest), 3),
        "max_s": round(max(pauses), 3),
        "standby_private_bytes": private,
        "pauses_s": [round(pause, 3) for pause in pauses],
    }


def run(kills: int, waiting: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "weft.cli", "serve", "--port", str(PORT)]
    command += ["--kv-memory", "256MiB", "--max-num-seqs", "64"]
    command += ["--standby" if waiting else "--no-standby"]
    server = subprocess.Popen(command)
    try:
        wait_until_bound(PORT)
        return asyncio.run(measure(server, kills, waiting))
    finally:
        server.terminate()
        server.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = [run(options.kills, waiting) for waiting in (True, False)]
    for row in rows:
        print(
            f"{'with' if row['standby'] else 'without'} a standby: median {row['median_s']:.2f} s "
            f"of streams, {row['median_of_kills_s']:.2f} s of kills, maximum {row['max_s']:.2f} s, "
            f"{row['errors']} errors"
        )
    if options.out:
        report.save(options.out, rows=rows)


if __name__ == "__main__":
    main()
