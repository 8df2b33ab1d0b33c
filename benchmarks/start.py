"""Time to start weft, and the cost of an idle server.

    python benchmarks/start.py [--model FOLDER] [--out benchmarks/results/start.json]

Wall time and CPU time of all processes, medians: ``import weft``; ``weft generate`` to its end with
one token; an engine process from its start until it is ready; and a server with its standby engine
over ``--idle`` seconds without a request. On a machine that does other work the CPU times are what
can be compared.
"""

from __future__ import annotations

import argparse
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

import report
from weft.engine.links import EngineLinks
from weft.engine.remote import EngineProcess
from weft.ring.segment import create_ring

IMPORTS = ("import weft", "from weft import LLM", "import torch")


def timed(work: Callable[[], Any], times: int) -> dict[str, float]:
    """Medians of wall seconds and of CPU seconds of the processes that ``work`` waits for."""
    walls, cpus = [], []
    for _ in range(times + 1):
        used, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        work()
        walls.append(time.perf_counter() - began)
        now = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpus.append(now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime)
    return {"wall_s": statistics.median(walls[1:]), "cpu_s": statistics.median(cpus[1:])}


def run(*command: str) -> None:
    subprocess.run([sys.executable, *command], check=True, capture_output=True)


def engine_ready_s(model: str) -> float:
    """Seconds from the start of an engine process until it serves its ring."""
    ring = create_ring()
    began = time.perf_counter()
    engine = EngineProcess.start({"model": model}, EngineLinks([ring]))
    engine.wait_until_ready()
    seconds = time.perf_counter() - began
    engine.stop()
    ring.close()
    return seconds


def idle(model: str, seconds: float) -> dict[str, float]:
    """CPU seconds a second of each process of a server without requests, by its title."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "weft.cli", "serve", "--model", model, "--port", str(port),
         "--kv-memory", "256MiB", "--standby"]
    )  # fmt: skip
    try:
        wait_until_quiet(server, port)
        before = cpu_seconds(server.pid)
        time.sleep(seconds)
        after = cpu_seconds(server.pid)
    finally:
        server.terminate()
        server.wait(30)
    assert before.keys() == after.keys(), "a process has been replaced meanwhile"
    return {name: (after[name] - before[name]) / seconds for name in after}


def wait_until_quiet(server: subprocess.Popen[bytes], port: int) -> None:
    """Until it has answered a request, the standby engine is there, and nothing works any more."""
    while True:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=60).is_success:
                break
        except httpx.HTTPError:
            time.sleep(0.05)
    body = {"prompt": "x", "max_tokens": 1}
    httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)
    used, quiet = -1.0, 0
    while quiet < 3:
        time.sleep(1.0)
        now = cpu_seconds(server.pid)
        there = any("standby" in name for name in now)
        quiet = quiet + 1 if there and sum(now.values()) - used < 0.1 else 0
        used = sum(now.values())


def cpu_seconds(pid: int) -> dict[str, float]:
    """CPU seconds of a process and all below it, by title and number."""
    parent = psutil.Process(pid)
    found = {}
    for process in (parent, *parent.children(recursive=True)):
        times = process.cpu_times()
        title = " ".join(process.cmdline())[:40]
        found[f"{title} {process.pid}"] = times.user + times.system
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--idle", type=float, default=20.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.chdir(Path(__file__).parent)
    rows = {code: timed(lambda code=code: run("-c", code), options.times) for code in IMPORTS}
    command = ("-m", "weft.cli", "generate", "def add(", "--max-tokens", "1")
    rows["weft generate"] = timed(lambda: run(*command, "--model", options.model), options.times)
    rows["engine ready"] = {
        "wall_s": statistics.median(engine_ready_s(options.model) for _ in range(options.times))
    }
    for name, row in rows.items():
        print(f"{name:<24}" + "".join(f" {key} {value:.3f}" for key, value in row.items()))
    shares = idle(options.model, options.idle)
    for name, share in shares.items():
        print(f"idle {name:<40} {share:.2%} of a core")
    print(f"idle {'all':<40} {sum(shares.values()):.2%} of a core")
    if options.out:
        report.save(options.out, model=options.model, rows=rows, idle=shares)


if __name__ == "__main__":
    main()
