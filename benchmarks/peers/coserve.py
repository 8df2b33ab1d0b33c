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
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import install
import servers
from install import InstallError, Setup
from servers import Engine
from serving import running

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
            "weft": lambda: servers.weft(setup, folder, "auto"),
            "weft, priorities only": lambda: servers.weft(setup, folder, "fcfs"),
            "vllm": lambda: servers.vllm(setup),
            "llama.cpp": lambda: servers.llamacpp(setup),
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
