"""Time to start weft, and what an idle server costs, beside llama.cpp's server and OpenVINO.

    python benchmarks/start.py [--model A] [--peers llamacpp,openvino] [--envs FOLDER]
        [--out benchmarks/results/start.json]

Medians over ``--times`` starts, with files in the page cache: ``import weft``; ``weft generate``
to its end with one token; a server from its start until it is ready, and until it has answered a
request for one token. weft's first starts have empty cache folders, its later ones a folder that a
first start left, with the packed weights. The last server of each kind is left alone until it is at
rest: memory of each process as ``smaps_rollup`` counts it, and CPU time over ``--idle`` seconds.
Last, weft's engine is killed ``--kills`` times under 16 streams, beside a standby at rest: the
longest pause of a stream. OpenVINO has no server: it is the process that ``peers/run.py`` drives.
Python finds weft's modules compiled, as it does from the second start on wherever it may keep them.
Peers are installed as there.
"""

from __future__ import annotations

import argparse
import asyncio
import compileall
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "peers"))

import httpx
import install
from driving import Work
from install import InstallError, Setup
from run import Driver, DriverError, machine
from serving import running

import recovery
import report
import weft as weft_package
from processes import cpu_seconds, memory, wait_until_at_rest

IMPORTS = ("import weft", "from weft import LLM")
CONTEXT, ROWS = 4096, 16  # tokens of a sequence, and sequences, that llama.cpp makes room for
PEERS = ("llamacpp", "openvino")


@dataclass(frozen=True)
class Server:
    """How to start a server.

    Attributes:
        ready: the path that has status 200 when requests are answered.
        standby: titles of processes that follow once it is ready.
    """

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    ready: str = "/health"
    standby: tuple[str, ...] = ()


def timed(command: list[str], times: int) -> dict[str, float]:
    """Medians of wall seconds and of CPU seconds of a process and those that it waits for."""
    walls, cpus = [], []
    for _ in range(times + 1):
        used, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        walls.append(time.perf_counter() - began)
        now = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpus.append(now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime)
    return {"wall_s": statistics.median(walls[1:]), "cpu_s": statistics.median(cpus[1:])}


def weft(setup: Setup, model: str, cache: Path) -> Server:
    command = [sys.executable, "-m", "weft.cli", "serve", "--model", str(setup.model(model))]
    command += ["--threads", str(setup.threads), "--served-model-name", "builtin", "--standby"]
    command += ["--dtype", "bfloat16"]
    return Server(command, {"XDG_CACHE_HOME": str(cache)}, "/ready", ("weft-standby",))


def llamacpp(setup: Setup, model: str) -> Server:
    prepared = install.llamacpp(setup, model, "bf16")
    gguf, folder = prepared.command[2], prepared.command[-1]
    command = [f"{folder}/llama-server", "-m", gguf, "-t", str(setup.threads), "--no-webui"]
    return Server([*command, "-np", str(ROWS), "-c", str(ROWS * CONTEXT)])


def start(server: Server, log: Path, look: Callable[[int, int], Any]) -> dict[str, Any]:
    """One start: seconds until it is ready, and until its first token; what ``look`` then finds."""
    began = time.perf_counter()
    with running(server.command, log, server.environment, server.ready) as (process, port):
        ready = time.perf_counter() - began
        body = {"model": "builtin", "prompt": [100, 200, 300], "max_tokens": 1}
        url = f"http://127.0.0.1:{port}/v1/completions"
        httpx.post(url, json=body, timeout=60).raise_for_status()
        token = time.perf_counter() - began
        return {"ready_s": ready, "token_s": token, "found": look(process.pid, port)}


def nothing(*_: int) -> None:
    """Look at nothing."""


def starts(make: Callable[[], Server], log: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Medians over several starts, and the cost of the last server at rest."""
    rows: list[dict[str, Any]] = []
    for number in range(options.times):
        server = make()

        def at_rest(pid: int, _: int, server: Server = server) -> dict[str, Any]:
            wait_until_at_rest(pid, *server.standby)
            return resting(pid, options.idle)

        last = number == options.times - 1
        rows.append(start(server, log, at_rest if last else nothing))
    return medians(rows)


def medians(rows: list[dict[str, Any]]) -> dict[str, Any]:
    times = {key: [row[key] for row in rows] for key in ("ready_s", "token_s")}
    return {
        **{key: statistics.median(values) for key, values in times.items()},
        **rows[-1]["found"],
        "samples": times,
    }


def resting(pid: int, seconds: float) -> dict[str, Any]:
    """Memory of a server's processes, and the share of a core that each takes."""
    found, before = memory(pid), cpu_seconds(pid)
    time.sleep(seconds)
    after = cpu_seconds(pid)
    if before.keys() != after.keys():
        raise SystemExit("a process has been replaced meanwhile")
    idle = {title: (after[title] - before[title]) / seconds for title in after}
    return {"memory": found, "idle": idle}


def openvino(setup: Setup, model: str, options: argparse.Namespace) -> dict[str, Any]:
    """The same of OpenVINO's pipeline, by its driver."""
    prepared = install.openvino(setup, model, "bf16")
    rows = []
    for number in range(options.times):
        began = time.perf_counter()
        driver = Driver(prepared, setup.envs / "logs" / "start openvino.log")
        ready = time.perf_counter() - began
        driver.run({**vars(Work(1, 3, 1, number))})
        row = {"ready_s": ready, "token_s": time.perf_counter() - began, "found": {}}
        if number == options.times - 1:
            wait_until_at_rest(driver.pid)
            row["found"] = resting(driver.pid, options.idle)
        driver.close()
        rows.append(row)
    return medians(rows)


def take_overs(server: Server, log: Path, kills: int) -> dict[str, Any]:
    """From SIGKILL of the engine until all of 16 streams go on."""

    async def kill(process: Any, port: int) -> list[float]:
        longest = []
        for number in range(kills):
            await asyncio.sleep(recovery.QUIET_S)
            wait_until_at_rest(process.pid, *server.standby)
            pauses, errors = await recovery.one_kill(process, port, number)
            if errors:
                raise SystemExit(f"{errors} streams broke")
            longest.append(max(pauses))
        return longest

    with running(server.command, log, server.environment, server.ready) as (process, port):
        longest = asyncio.run(kill(process, port))
    return {"median_s": statistics.median(longest), "max_s": max(longest), "samples": longest}


def measure(setup: Setup, options: argparse.Namespace, cache: Path) -> dict[str, Any]:
    log = setup.envs / "logs" / "start.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    empty = (cache / str(number) for number in range(options.times))
    kept = weft(setup, options.model, cache / "kept")
    servers: dict[str, Callable[[], dict[str, Any]]] = {
        "weft, first start": lambda: starts(
            lambda: weft(setup, options.model, next(empty)), log, options
        ),
        "weft, later starts": lambda: after_a_first(kept, log, options),
        "llamacpp": lambda: starts(lambda: llamacpp(setup, options.model), log, options),
        "openvino": lambda: openvino(setup, options.model, options),
    }
    rows, failed = {}, {}
    for name, row in servers.items():
        if name in PEERS and name not in options.peers:
            continue
        print(name, file=sys.stderr, flush=True)
        try:
            rows[name] = row()
        except (InstallError, DriverError) as error:
            failed[name] = str(error)
    rates = take_overs(kept, log, options.kills) if options.kills else None
    return {"servers": rows, "failed": failed, "take_over": rates}


def after_a_first(server: Server, log: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Starts in a cache folder that one start before them has filled."""
    start(server, log, lambda pid, _: wait_until_at_rest(pid, *server.standby))
    return starts(lambda: server, log, options)


def show(facts: dict[str, Any]) -> None:
    for name, row in facts["commands"].items():
        print(f"{name:<24} {row['wall_s']:.3f} s, {row['cpu_s']:.3f} s of CPU")
    for name, row in facts["servers"].items():
        print(
            f"{name:<24} ready {row['ready_s']:.3f} s, first token {row['token_s']:.3f} s, "
            f"idle {sum(row['idle'].values()):.2%} of a core"
        )
        for title, bytes_of in row["memory"].items():
            sizes = ", ".join(f"{key} {size / 2**20:.0f}" for key, size in bytes_of.items())
            print(f"  {title:<22} MiB: {sizes}")
    if facts["take_over"]:
        rates = facts["take_over"]
        print(f"take-over: median {rates['median_s']:.3f} s, maximum {rates['max_s']:.3f} s")
    for name, why in facts["failed"].items():
        print(f"{name}: {why}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="A", choices=["A", "B"])
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--idle", type=float, default=10.0)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--envs", type=Path, default=Path.home() / ".cache" / "weft-peers")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    compileall.compile_dir(Path(weft_package.__file__).parent, quiet=2)
    setup = Setup(options.envs.resolve(), options.threads)
    install.make_models(setup)
    with tempfile.TemporaryDirectory() as folder:
        commands = {code: timed([sys.executable, "-c", code], options.times) for code in IMPORTS}
        generate = [sys.executable, "-m", "weft.cli", "generate", "def add(", "--max-tokens", "1"]
        generate += ["--model", str(setup.model(options.model))]
        commands["weft generate"] = timed(generate, options.times)
        facts = {"commands": commands, **measure(setup, options, Path(folder))}
    show(facts)
    if options.out:
        report.save(options.out, model=options.model, machine=machine(), **facts)


if __name__ == "__main__":
    main()
