"""Interactive requests beside best effort: weft, vLLM's CPU build and llama.cpp under one traffic.

    python benchmarks/peers/coserve.py --envs FOLDER --out benchmarks/results/peers_coserve.json

Each engine serves checkpoint A (see ``models.py``) over HTTP, alone on the machine, and gets the
same requests: interactive ones by a Poisson process, and best-effort clients, more than fit, that
send their next request when the last one has ended. vLLM runs with ``--scheduling-policy priority``
and gets a priority with each request; llama.cpp knows none. weft runs twice: with default settings,
whose policy it chooses itself, and with priorities of classes only (fcfs). Ratios are of an
engine's own figures: p95 of interactive requests beside best effort over that without, and tokens
of best effort beside interactive requests over those without. Engines take turns in each round.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import install
from install import InstallError, Setup
from serving import START_S, running

import report
from coserve import (
    BE_OUTPUT_TOKENS,
    BE_PROMPT_TOKENS,
    FILLED_S,
    Timing,
    ask,
    body,
    interactive,
)

ROWS = 16  # that each engine computes at once
CONTEXT = 512  # tokens of a request


@dataclass(frozen=True)
class Engine:
    """How an engine is served.

    Attributes:
        command: without the port.
        urgent, lax: fields of the bodies of interactive requests and of best effort.
        settle: waits until the server is as it will be.
    """

    command: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    urgent: Mapping[str, Any] = field(default_factory=dict)
    lax: Mapping[str, Any] = field(default_factory=dict)
    settle: Callable[[int], None] | None = None


def weft(setup: Setup, folder: Path, scheduler: str) -> Engine:
    command = [sys.executable, "-m", "weft.cli", "serve", "--model", str(setup.model("A"))]
    command += ["--served-model-name", "model", "--threads", str(setup.threads), "--no-standby"]
    command += ["--max-num-seqs", str(ROWS), "--kv-memory", "2GiB", "--no-prefix-caching"]
    command += ["--dtype", "bfloat16", "--profile", str(folder / "profile.json")]
    command += ["--scheduler", scheduler]
    settle = until_slo if scheduler == "auto" else None
    return Engine(command, lax={"service_tier": "flex"}, settle=settle)


def until_slo(port: int) -> None:
    """Wait until the server has measured itself."""
    end = time.monotonic() + START_S
    url = f"http://127.0.0.1:{port}/server_info"
    while httpx.get(url).json()["engine"]["scheduling"]["policy"] != "slo":
        if time.monotonic() > end:
            raise SystemExit("the server has not measured itself")
        time.sleep(0.5)


def vllm(setup: Setup) -> Engine:
    prepared = install.vllm(setup, "A", "bf16")
    # The command `vllm` looks for a package of that name, and the CPU build has another one.
    command = [prepared.command[0], "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(setup.model("A")), "--served-model-name", "model"]
    command += ["--dtype", "bfloat16", "--max-model-len", str(CONTEXT * 4)]
    command += ["--max-num-seqs", str(ROWS), "--no-enable-prefix-caching"]
    command += ["--scheduling-policy", "priority"]
    threads = f"0-{setup.threads - 1}"
    environment = {
        **prepared.environment,
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": threads,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    return Engine(command, environment, {"priority": 0}, {"priority": 10})


def llamacpp(setup: Setup) -> Engine:
    prepared = install.llamacpp(setup, "A", "bf16")
    gguf, folder = prepared.command[2], prepared.command[-1]
    command = [f"{folder}/llama-server", "-m", gguf, "--alias", "model", "-t", str(setup.threads)]
    command += ["-np", str(ROWS), "-c", str(ROWS * CONTEXT), "--no-webui"]
    return Engine(command)


async def load(
    port: int, engine: Engine, clients: int, rate: float, seconds: float, seed: int
) -> tuple[list[Timing], float]:
    """Interactive requests, and tokens a second of best-effort requests that ended meanwhile."""
    ended = [0]

    async def client(number: int) -> None:
        draw = random.Random(f"best effort {seed} {number}")
        while True:
            await ask(port, body(BE_PROMPT_TOKENS, BE_OUTPUT_TOKENS, draw, **engine.lax))
            ended[0] += 1

    crowd = [asyncio.create_task(client(number)) for number in range(clients)]
    await asyncio.sleep(2 * FILLED_S if clients else 0.5)
    before, started = ended[0], time.perf_counter()
    timings = await interactive(port, rate, seconds, seed, **engine.urgent) if rate else []
    await asyncio.sleep(max(0.0, seconds - (time.perf_counter() - started)))
    done, took = ended[0] - before, time.perf_counter() - started
    for task in crowd:
        task.cancel()
    await asyncio.gather(*crowd, return_exceptions=True)
    await asyncio.sleep(1.0)  # until the server has let go of them
    return timings, done * (BE_PROMPT_TOKENS + BE_OUTPUT_TOKENS) / took


def p95(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))]


def measure(port: int, engine: Engine, options: argparse.Namespace, seed: int) -> dict[str, float]:
    """One round of an engine."""

    def go(clients: int, rate: float) -> tuple[list[Timing], float]:
        return asyncio.run(load(port, engine, clients, rate, options.seconds, seed))

    alone, _ = go(0, options.rate)
    both, beside = go(options.clients, options.rate)
    _, crowd = go(options.clients, 0.0)
    found: dict[str, float] = {"best_effort": beside, "best_effort_alone": crowd}
    for name in ("ttft_s", "tpot_s"):
        found[name] = p95([getattr(timing, name) for timing in both])
        found[f"{name}_alone"] = p95([getattr(timing, name) for timing in alone])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--envs", type=Path, required=True, help="where peers are installed")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rate", type=float, default=0.5, help="of interactive requests a second")
    parser.add_argument("--clients", type=int, default=24, help="of best effort")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each run")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    setup = Setup(options.envs.absolute(), options.threads)
    install.make_models(setup)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        makers: dict[str, Callable[[], Engine]] = {
            "weft": lambda: weft(setup, folder, "auto"),
            "weft, priorities only": lambda: weft(setup, folder, "fcfs"),
            "vllm": lambda: vllm(setup),
            "llama.cpp": lambda: llamacpp(setup),
        }
        engines, failures = {}, {}
        for name, make in makers.items():
            try:
                engines[name] = make()
            except InstallError as error:
                failures[name] = str(error)
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
        for turn in range(options.rounds):
            for name in list(engines)[:: -1 if turn % 2 else 1]:
                log = setup.envs / "logs" / f"serve {name}.log"
                try:
                    engine = engines[name]
                    with running(engine.command, log, engine.environment) as (_, port):
                        if engine.settle is not None:
                            engine.settle(port)
                        runs[name].append(measure(port, engine, options, turn))
                except InstallError as error:
                    failures[name] = str(error)
    rows = [row(name, each) for name, each in runs.items() if each]
    print("engine                 TTFT p95 alone/beside      TPOT p95 alone/beside   best effort")
    for one in rows:
        print(
            f"{one['engine']:22} {one['ttft_s_alone'] * 1e3:6.0f} {one['ttft_s'] * 1e3:7.0f} ms "
            f"({one['ttft_ratio']:5.1f})  {one['tpot_s_alone'] * 1e3:6.1f} "
            f"{one['tpot_s'] * 1e3:6.1f} ms ({one['tpot_ratio']:4.1f})  "
            f"{one['best_effort']:6.0f}/s ({one['best_effort_ratio']:.2f})"
        )
    for name, problem in failures.items():
        print(f"{name}: {problem}")
    if options.out:
        report.save(
            options.out,
            rate=options.rate,
            clients=options.clients,
            seconds=options.seconds,
            threads=options.threads,
            rows=rows,
            failures=failures,
        )


def row(name: str, runs: list[dict[str, float]]) -> dict[str, Any]:
    """Medians over rounds, and the ratios of each."""
    found = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    ratios = {
        "ttft_ratio": found["ttft_s"] / found["ttft_s_alone"],
        "tpot_ratio": found["tpot_s"] / found["tpot_s_alone"],
        "best_effort_ratio": found["best_effort"] / found["best_effort_alone"],
    }
    return {"engine": name, **found, **ratios, "runs": runs}


if __name__ == "__main__":
    main()
