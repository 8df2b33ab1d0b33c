"""Decode attention on the host beside a device that is short of KV memory, and what it costs.

    python benchmarks/offload.py [--model FOLDER] [--positions N] [--rate 2] [--clients 24]
        [--prompt 256] [--memory 12MiB,256MiB] [--host-memory 256MiB] [--seconds 15] [--rounds 3]
        [--servers load-aware slo] [--out benchmarks/results/offload.json]

The device is one thread of this CPU, and the host is another one: a stand-in for a GPU beside its
CPUs, on which nothing can be won that two threads for all would not give. Servers stand side by
side and are loaded in turns, as in ``coserve.py``, with interactive requests and best-effort
clients; each once with KV memory for a few sequences and once with plenty. ``fcfs, 2 threads`` has
all cores and is what everything is compared with. *host*: the share of all tokens whose attention
the host computed; *at once*: sequences with a row, on average. With ``--positions`` the model takes
longer prompts than it was made for: its text means nothing then, and its steps cost what they cost.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import statistics
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import yaml

import coserve
import report
from coserve import Targets, be_work, both, clients, counted, idle_targets, summary
from serve import start_server
from weft.core.settings import parse_bytes
from weft.models.hub import resolve_model

DEVICE = {"threads": 1}
BOTH = {"threads": 2}
HOST = {**DEVICE, "host_kv_memory": "256MiB"}
WITH_HOST = {**HOST, "host_threads": 1}
BASE = "fcfs, 2 threads"  # has all cores; everything is compared with it
SERVERS: dict[str, tuple[str, dict[str, Any]]] = {
    BASE: ("fcfs", BOTH),
    "slo, 2 threads": ("slo", BOTH),
    "fcfs": ("fcfs", DEVICE),
    "fcfs, swapping": ("fcfs", HOST),
    "load-aware": ("load-aware", WITH_HOST),
    "slo": ("slo", DEVICE),
    "slo, swapping": ("slo", HOST),
    "slo-piggyback": ("slo-piggyback", WITH_HOST),
}
SAVED = ("model", "positions", "host_memory", "rate", "clients", "prompt", "seconds", "rounds")
RUNNING = re.compile(r"^weft:num_requests_running.* ([0-9.]+)$", re.MULTILINE)


def serve(
    folder: Path, model: str, name: str, memory: str, settings: dict[str, Any]
) -> tuple[subprocess.Popen[bytes], int]:
    scheduler, own = SERVERS[name]
    config = folder / f"{len(list(folder.iterdir()))}.yaml"
    more = {"max_num_seqs": 64, "prefix_caching": False, "device": "cpu"}
    config.write_text(yaml.safe_dump({**more, **own, **settings}))
    given = ("--scheduler", scheduler, "--config", str(config), "--kv-memory", memory)
    return start_server(model, *given)


def make_profiles(folder: Path, model: str, memory: str) -> dict[int, str]:
    """The costs of steps for each number of threads, for one with those of the host tier.

    Args:
        memory: KV memory of the device; all of it is filled before anything is measured.
    """
    paths = {}
    common = {"model": model, "device": "cpu", "kv_memory": memory}
    for settings in (WITH_HOST, BOTH):
        threads = settings["threads"]
        path, config = folder / f"{threads}.json", folder / f"profile{threads}.yaml"
        config.write_text(yaml.safe_dump({**common, **settings}))
        command = [coserve.sys.executable, "-m", "weft.cli", "profile", "--config", str(config)]
        subprocess.run(
            [*command, "--steps", "30", "--profile", str(path)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        paths[threads] = str(path)
    return paths


def lengthen(folder: Path, model: str, positions: int) -> str:
    """A copy of a checkpoint whose configuration allows for so many positions."""
    source = resolve_model(model, offline=True)
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").unlink()
    config["max_position_embeddings"] = positions
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@asynccontextmanager
async def watched(port: int, count: int, turn: int, found: list[float]) -> AsyncIterator[None]:
    """Best-effort clients, and how many requests have a row meanwhile."""

    async def watch() -> None:
        async with httpx.AsyncClient() as client:
            while True:
                page = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
                found.append(float(RUNNING.findall(page)[0]))
                await asyncio.sleep(0.5)

    async with clients(port, count, turn):
        watching = asyncio.create_task(watch())
        yield
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching


def measure(ports: dict[str, int], targets: Targets, options: Any, memory: str) -> list[Any]:
    """Load the servers in turns; one row for each."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ports}
    for turn in range(options.rounds):
        names = list(ports)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            port, running = ports[name], list[float]()
            before = counted(port, "host_attention_tokens"), counted(port, "generation_tokens")
            crowd = watched(port, options.clients, turn, running)
            run = asyncio.run(both(port, crowd, options.rate, options.seconds, turn))
            after = counted(port, "host_attention_tokens"), counted(port, "generation_tokens")
            host, made = (b - a for a, b in zip(before, after, strict=True))
            runs[name].append({**run, "host": host / made, "at_once": statistics.mean(running)})
    found = {name: summary(name, of, targets) for name, of in runs.items()}
    base = be_work(found[BASE])
    rows = []
    for name, row in found.items():
        row |= {"memory": memory, "be_of_fcfs": be_work(row) / base}
        for what in ("host", "at_once"):
            row[what] = statistics.median(run[what] for run in runs[name])
        tpot = " / ".join(f"{row['tpot_ms'][p]:.1f}" for p in ("p50", "p99"))
        print(
            f"| {memory} | {name} | {row['attainment']:.0%} | {tpot} | "
            f"{row['be_output_tokens_per_s']:.0f} | {row['be_of_fcfs']:.2f} | "
            f"{row['host']:.0%} | {row['at_once']:.0f} |",
            flush=True,
        )
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--positions", type=int, default=0, help="of the model, if not its own")
    parser.add_argument("--memory", default="12MiB,256MiB", help="KV memory of the device")
    parser.add_argument("--host-memory", default="256MiB", help="KV memory of the host")
    parser.add_argument("--rate", type=float, default=2.0, help="of interactive requests a second")
    parser.add_argument("--clients", type=int, default=24, help="of best effort")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of best effort")
    parser.add_argument("--ttft", type=float, default=10.0, help="target as a multiple of idle")
    parser.add_argument("--tpot", type=float, default=4.0, help="target as a multiple of idle")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--servers", nargs="+", default=list(SERVERS), choices=list(SERVERS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    coserve.BE_PROMPT_TOKENS = options.prompt
    memories = options.memory.split(",")
    rows: list[Any] = []
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        model = options.model
        if options.positions:
            model = lengthen(folder / "model", model, options.positions)
        profiles = make_profiles(folder, model, max(memories, key=parse_bytes))

        def started(server: str, memory: str, **settings: Any) -> int:
            if "host_kv_memory" in SERVERS[server][1]:
                settings["host_kv_memory"] = options.host_memory
            process, port = serve(folder, model, server, memory, settings)
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)
            return port

        targets = idle_targets(started("fcfs", "256MiB"), options.ttft, options.tpot)
        print(f"targets: TTFT {targets.ttft_s * 1e3:.0f} ms, TPOT {targets.tpot_s * 1e3:.1f} ms")
        print(
            "| KV | server | kept | TPOT p50 / p99 ms | best effort tok/s | of fcfs "
            "| host | at once |"
        )
        print("|---|---|---|---|---|---|---|---|")
        for memory in memories:
            ports = {}
            for server in (name for name in SERVERS if name in (BASE, *options.servers)):
                scheduler, own = SERVERS[server]
                settings: dict[str, Any] = {}
                if scheduler != "fcfs":
                    settings |= {
                        "profile": profiles[own["threads"]],
                        "classes": {"interactive": asdict(targets)},
                    }
                ports[server] = started(server, memory, **settings)
            rows += measure(ports, targets, options, memory)
            stack.pop_all().close()
    if options.out:
        report.save(
            options.out,
            targets=asdict(targets),
            **{key: getattr(options, key) for key in SAVED},
            rows=rows,
        )


if __name__ == "__main__":
    main()
