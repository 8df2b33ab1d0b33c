"""Interactive requests beside clients that embed all the time, on one server of the built-in model.

    python benchmarks/embeddings_beside.py --out FILE.json

Loads come in turns: interactive requests alone, beside embeddings as they are (best effort), and
beside embeddings that ask for the class of interactive requests. Targets, arrivals and attainment
are those of coserve.py.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

import report
from coserve import FILLED_S, both, idle_targets, make_profile, serve, summary

INPUTS, INPUT_TOKENS = 16, 256  # of a request
LOADS: dict[str, Mapping[str, Any] | None] = {
    "alone": None,
    "best effort": {},
    "interactive": {"service_tier": "default"},
}


async def embed(port: int, number: int, more: Mapping[str, Any]) -> None:
    """A client that always has one request open; ends by being cancelled."""
    draw = random.Random(f"embed {number}")
    async with httpx.AsyncClient(timeout=60) as client:
        while True:
            texts = [[draw.randrange(8, 4096) for _ in range(INPUT_TOKENS)] for _ in range(INPUTS)]
            asked = {"model": "model", "input": texts, **more}
            await client.post(f"http://127.0.0.1:{port}/v1/embeddings", json=asked)


@asynccontextmanager
async def embedders(port: int, count: int, more: Mapping[str, Any] | None) -> AsyncIterator[None]:
    """Clients of embeddings while the block runs; none without fields of their bodies."""
    tasks = [
        asyncio.create_task(embed(port, number, more))
        for number in range(count)
        if more is not None
    ]
    await asyncio.sleep(FILLED_S if tasks else 0.5)
    yield
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rate", type=float, default=2.0, help="of interactive requests a second")
    parser.add_argument("--clients", type=int, default=4, help="of embeddings")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        profile = make_profile(folder)
        process, port = serve(folder, "fcfs")
        try:
            targets = idle_targets(port, 10.0, 4.0)
        finally:
            process.terminate()
            process.wait(30)
        table = {"interactive": asdict(targets)}
        process, port = serve(folder, "slo", profile=str(profile), classes=table)
        runs: dict[str, list[dict[str, Any]]] = {load: [] for load in LOADS}
        try:
            for turn in range(options.rounds):
                for load, more in LOADS.items():
                    crowd = embedders(port, options.clients, more)
                    run = both(port, crowd, options.rate, options.seconds, turn)
                    runs[load].append(asyncio.run(run))
        finally:
            process.terminate()
            process.wait(30)
    rows = [summary(load, found, targets) for load, found in runs.items()]
    for row in rows:
        print(
            f"{row['load']:12} both kept {row['attainment']:.1%}, first token "
            f"{row['ttft_ms']['p50']:.0f}/{row['ttft_ms']['p99']:.0f} ms, embedded tokens/s "
            f"{row['be_prompt_tokens_per_s']:.0f}"
        )
    if options.out:
        given = {"rate": options.rate, "clients": options.clients, "rounds": options.rounds}
        report.save(
            options.out, targets=asdict(targets), seconds=options.seconds, rows=rows, **given
        )


if __name__ == "__main__":
    main()
