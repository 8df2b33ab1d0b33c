"""Longest gap in 16 streams while engine and standby are killed together, again and again.

    python benchmarks/storm.py [--kills 5] [--rounds 3] [--against FOLDER] [--out FILE]

Each storm kills engine and standby by SIGKILL at the same moment, five times in a row: as soon as
the next engine has brought a stream further (``serving``), or 0.3 s after the start of the next
one (``starting``), when it is not ready yet or has just begun to compute again. The third kind
(``everything``) is as the first, but every process dies except supervisor and request plane. The
streams are greedy, and must say the tokens of an undisturbed run.

Reported are the longest gap between two pieces of any stream, and where the seconds between kills
go: until the next engine is started (notice and back-off), until it serves the rings (with the
parts that its log line names), until the first stream goes on, and after the last kill until every
stream does. With ``--against``, the source tree of another version, rounds are taken in turns, so
that both have the same share of what else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
import psutil

import report
from serve import wait_until_bound

STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS = 16, 64, 1200
BEFORE_S = 1.0  # that streams run until the first kill
STARTING_S = 0.3
QUIET_S = 11.0  # before each storm: longer than the back-off remembers
POLL_S = 0.01
PORT = 8217
KINDS = ("serving", "starting", "everything")
TAKEN_OVER = re.compile(r"^(\S+Z) .*Engine \d+ has taken over after ([\d.]+) s(?:: (.*))?\.$")
PART = re.compile(r"(\w[\w ]*?) ([\d.]+) s")


class Stream:
    """One client that reads a stream and remembers when pieces came, and all tokens."""

    def __init__(self, number: int) -> None:
        draw = random.Random(number)
        self._prompt = [draw.randrange(100, 3900) for _ in range(PROMPT_TOKENS)]
        self.arrivals: list[float] = []
        self.tokens: list[int] = []
        self.problem = ""

    async def run(self) -> None:
        body = orjson.dumps(
            {"model": "builtin", "prompt": self._prompt, "max_tokens": OUTPUT_TOKENS,
             "ignore_eos": True, "temperature": 0, "stream": True, "return_token_ids": True}
        )  # fmt: skip
        reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        try:
            writer.write(head.encode() + body)
            while line := await reader.readline():
                if line.startswith(b"data: {"):
                    self._read(orjson.loads(line[6:]))
        finally:
            writer.close()

    def _read(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.problem = event["error"]["code"]
            return
        self.arrivals.append(time.time())
        for choice in event["choices"]:
            self.tokens += choice.get("token_ids") or []

    def longest_gap_s(self) -> float:
        return max(after - before for before, after in itertools.pairwise(self.arrivals))


def engines(server: psutil.Process, *, all_of_them: bool) -> dict[int, psutil.Process]:
    """Processes of engines that serve, wait or start; with all, whatever else there is for them."""
    found = {}
    for process in server.children(recursive=True):
        title = title_of(process)
        if title == "frontend" or (title == "other" and not all_of_them):
            continue
        found[process.pid] = process
    return found


def title_of(process: psutil.Process) -> str:
    try:
        command = process.cmdline()
    except psutil.Error:
        return "gone"
    if not command or process.status() == psutil.STATUS_ZOMBIE:
        return "gone"
    text = " ".join(command)
    if "--fork-for" in text:
        return "other"
    if "weft-frontend" in text or "weft.server.process" in text:
        return "frontend"
    if "weft-engine" in text:
        return "engine"
    starting = "weft-standby" in text or "weft.engine.process" in text
    return "standby" if starting else "other"


async def until(condition: Callable[[], bool], limit_s: float = 120.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            raise SystemExit("the server did not recover")
        await asyncio.sleep(POLL_S)


async def storm(server: psutil.Process, kind: str, kills: int) -> dict[str, Any]:
    """Run 16 streams to their end through one storm."""
    streams = [Stream(number) for number in range(STREAMS)]
    tasks = [asyncio.create_task(stream.run()) for stream in streams]
    await until(lambda: all(stream.arrivals for stream in streams))
    await asyncio.sleep(BEFORE_S)
    killed: list[float] = []
    went_on: list[float] = []
    dead: set[int] = set()
    for number in range(kills):
        if number:
            await next_engine(server, kind, dead, streams, went_on)
        victims = engines(server, all_of_them=kind == "everything")
        killed.append(time.time())
        for process in victims.values():
            process.kill()
        dead |= set(victims)
    await serving(server, dead)
    attached = time.time()
    await until(lambda: any(stream.arrivals[-1] > attached for stream in streams))
    went_on.append(min(s.arrivals[-1] for s in streams if s.arrivals[-1] > attached))
    await asyncio.gather(*tasks)
    last = [next(t for t in [*s.arrivals, 0.0] if t > attached or not t) for s in streams]
    return {
        "kind": kind,
        "longest_gap_s": round(max(stream.longest_gap_s() for stream in streams), 3),
        "storm_s": round(killed[-1] - killed[0], 3),
        "all_go_on_s": round(max(last) - killed[-1], 3),
        "killed": killed,
        "went_on": went_on,
        "tokens": [stream.tokens for stream in streams],
        "problems": [stream.problem for stream in streams if stream.problem],
    }


async def serving(server: psutil.Process, dead: set[int]) -> None:
    """Wait for an engine that is none of the dead."""

    def there() -> bool:
        living = engines(server, all_of_them=False)
        return any(title_of(p) == "engine" and pid not in dead for pid, p in living.items())

    await until(there)


async def next_engine(
    server: psutil.Process, kind: str, dead: set[int], streams: list[Stream], went_on: list[float]
) -> None:
    """Wait until the next engines are to be killed."""
    if kind == "starting":
        await until(lambda: bool(engines(server, all_of_them=False).keys() - dead))
        await asyncio.sleep(STARTING_S)
        return
    await serving(server, dead)
    since = time.time()
    await until(lambda: any(stream.arrivals[-1] > since for stream in streams))
    went_on.append(time.time())


def take_overs(log: str, since: float) -> list[dict[str, float]]:
    """What the server's log says of engines that took over: when, after how long, and its parts."""
    found = []
    for line in log.splitlines():
        match = TAKEN_OVER.match(line)
        if match is None:
            continue
        at = datetime.strptime(match[1], "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC).timestamp()
        if at < since:
            continue
        parts = {name.strip(): float(seconds) for name, seconds in PART.findall(match[3] or "")}
        found.append({"at": at, "start_s": float(match[2]), **parts})
    return found


def phases(row: dict[str, Any], log: str) -> dict[str, float]:
    """Means over the kills after which an engine came to serve, in seconds."""
    killed, went_on = row.pop("killed"), row.pop("went_on")
    times: dict[str, list[float]] = {}
    for over in take_overs(log, killed[0]):
        before = max((moment for moment in killed if moment < over["at"]), default=None)
        after = [moment for moment in went_on if moment >= over["at"]]
        if before is None:
            continue
        spent = {"notice and back-off": over["at"] - over["start_s"] - before}
        spent |= {name: over[name] for name in over if name != "at"}
        if after:
            spent["first stream goes on"] = after[0] - over["at"]
        for name, seconds in spent.items():
            times.setdefault(name, []).append(seconds)
    return {name: round(statistics.mean(seconds), 3) for name, seconds in times.items()}


async def measure(
    process: subprocess.Popen[bytes], log: Path, kinds: list[str], kills: int
) -> list[dict[str, Any]]:
    server = psutil.Process(process.pid)
    undisturbed = [Stream(number) for number in range(STREAMS)]
    await asyncio.gather(*(stream.run() for stream in undisturbed))
    right = [stream.tokens for stream in undisturbed]
    rows = []
    for kind in kinds:
        await asyncio.sleep(QUIET_S)
        row = await storm(server, kind, kills)
        row["intact"] = sum(a == b for a, b in zip(row.pop("tokens"), right, strict=True))
        row["phases_s"] = phases(row, log.read_text())
        rows.append(row)
    return rows


def run(kinds: list[str], kills: int, source: Path | None) -> list[dict[str, Any]]:
    """One storm of each kind on a fresh server."""
    command = [sys.executable, "-m", "weft.cli", "serve", "--port", str(PORT), "--standby"]
    command += ["--kv-memory", "256MiB", "--max-num-seqs", "64"]
    path = {} if source is None else {"PYTHONPATH": str(source)}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.txt"
        with log.open("w") as errors:
            server = subprocess.Popen(command, stderr=errors, env=os.environ | path)
        try:
            wait_until_bound(PORT)
            return asyncio.run(measure(server, log, kinds, kills))
        finally:
            server.terminate()
            server.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--against", type=Path, help="folder that holds another weft package")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    versions = {"this": None} | ({"other": options.against} if options.against else {})
    rows = []
    for _ in range(options.rounds):
        for version, source in versions.items():
            for row in run(kinds, options.kills, source):
                rows.append({"version": version, **row})
                print(rows[-1], flush=True)
    for version, kind in itertools.product(versions, kinds):
        found = [row for row in rows if row["version"] == version and row["kind"] == kind]
        gaps = [row["longest_gap_s"] for row in found]
        print(
            f"{version:5} {kind:11} longest gap: median {statistics.median(gaps):.2f} s, "
            f"maximum {max(gaps):.2f} s; "
            f"{sum(row['intact'] for row in found)} of {len(gaps) * STREAMS} streams intact"
        )
    if options.out:
        report.save(options.out, rows=rows)


if __name__ == "__main__":
    main()
