"""Orders of a batch on a real engine: throughput, cached prompt tokens, preemptions.

    python benchmarks/orders.py --lengths FILE.csv --rounds 5 --out benchmarks/results/orders.json

One engine answers the same lines in each order, in turns, and each round begins with another one. A
run has a cache salt of its own, so it finds nothing in the prefix cache that another one has left.
The orders are told no bounds of answers; these end where the engine is told that they do. Rows are
"fcfs" (as in the file), "dfs plain" (depth first, the memory left to the engine), "dfs" (with the
forecast, which is what auto chooses here) and "blend". Ratios are to "fcfs" of the same round: of
tokens, of prompts and answers, in a second, and in a second of the engine's CPU time, which depends
less on what else the machine does.

Workloads: "chats" has the lengths of a CSV with num_prefill_tokens and num_decode_tokens, such as
ShareGPT's, divided by ``--divide``, and nothing shared but 16 tokens; in "families" 5 of 6 prompt
tokens are shared with 7 others, and the lines come in random order.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import csv
import json
import platform
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

import report
from weft.api import Builder, ModelCard
from weft.batch.engine import EngineAsker
from weft.batch.lines import InputFile
from weft.batch.order import InOrder, Planned, Prompt, plan, read_prompts
from weft.batch.ports import BatchLine, Result
from weft.batch.runner import Runner
from weft.blend.jobs import Room
from weft.blend.lengths import LengthTable
from weft.blend.sheets import sheet_rates
from weft.core.config import EngineConfig
from weft.core.served import ServedModel
from weft.cost.hardware import hardware
from weft.cost.shape import ModelShape
from weft.engine.keeper import EngineKeeper
from weft.engine.links import EngineLinks
from weft.engine.machine import cpu_name
from weft.offline import WAITING_SHARE
from weft.ring.client import RingClient
from weft.ring.segment import ring_of
from weft.text import Tokenizer

ORDERS = ("fcfs", "dfs plain", "dfs", "blend")
VOCAB = (8, 4000)  # ids of prompts
Lengths = list[tuple[int, int]]


class Kept:
    """Counts results, and keeps nothing else."""

    def __init__(self, lines: int) -> None:
        self._done = bytearray(lines)
        self.tokens = self.prompt = self.cached = self.failed = 0

    def done(self, index: int) -> bool:
        return bool(self._done[index])

    def put(self, index: int, result: Result) -> None:
        self._done[index] = 1
        self.failed += result.error is not None
        self.tokens += result.usage.input_tokens + result.usage.output_tokens
        self.prompt += result.usage.input_tokens
        self.cached += result.usage.cached_tokens

    def sync(self) -> None:
        """There is nothing to lose."""


def chats(path: Path, count: int, divide: int, longest: int, draw: random.Random) -> list[Any]:
    """(prompt, output tokens) of recorded lengths; no two prompts share more than a beginning."""
    with path.open() as file:
        rows = [
            (int(row["num_prefill_tokens"]) // divide, int(row["num_decode_tokens"]) // divide)
            for row in csv.DictReader(file)
        ]
    fitting = [(p, d) for p, d in rows if p >= 17 and d >= 1 and p + d <= longest]
    head = [draw.randrange(*VOCAB) for _ in range(16)]
    return [
        (head + [draw.randrange(*VOCAB) for _ in range(p - 16)], d)
        for p, d in draw.sample(fitting, count)
    ]


def families(count: int, draw: random.Random) -> list[Any]:
    """(prompt, output tokens): groups of 8 with 320 tokens in common, and 64 of their own."""
    made = []
    for _ in range(-(-count // 8)):
        head = [draw.randrange(*VOCAB) for _ in range(320)]
        mean = draw.choice((8, 32, 96))
        for _ in range(8):
            own = [draw.randrange(*VOCAB) for _ in range(64)]
            made.append((head + own, max(1, round(draw.expovariate(1 / mean)))))
    draw.shuffle(made)
    return made[:count]


def write(path: Path, requests: list[Any]) -> InputFile:
    with path.open("w") as file:
        for number, (prompt, output) in enumerate(requests):
            body = {"model": "builtin", "prompt": prompt, "max_tokens": output, "temperature": 0}
            line = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions"}
            file.write(json.dumps({**line, "body": {**body, "ignore_eos": True}}) + "\n")
    return InputFile(path)


def engine_cpu_s(pid: int) -> float:
    """Seconds that the engine has computed, all threads together."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def without_bound(read: Callable[[BatchLine], Prompt | None], line: BatchLine) -> Prompt | None:
    prompt = read(line)
    return None if prompt is None else replace(prompt, longest=None)


class Bench:
    """An engine, and runs on it."""

    def __init__(self, served: ServedModel, client: RingClient) -> None:
        self.served, self._client = served, client
        card = ModelCard.of(served, ("builtin",), None)
        self._builder = Builder(Tokenizer.load(Path(served.folder)), None, card)
        self.kv_tokens = max(served.kv_blocks.values()) * served.block_size
        config = json.loads((Path(served.folder) / "config.json").read_bytes())
        shape = ModelShape.from_config(config)
        self._rates = sheet_rates(shape, hardware("xeon-8462y"), asdict(served))
        self._runs = 0

    async def run(self, source: InputFile, kind: str, thread: ThreadPoolExecutor) -> dict[str, Any]:
        """Have all lines answered; what came of it."""
        self._runs += 1
        salt = f"run {self._runs}".encode()
        asker = EngineAsker(
            self._client,
            self._builder,
            mark=lambda request: replace(request, service_class="batch", cache_salt=salt),
        )
        kept, before, began = Kept(len(source)), self._client.info(), time.perf_counter()
        cpu_s = engine_cpu_s(before.pid)
        order = await self._order(source, kept, kind, asker, thread)
        planned_s = time.perf_counter() - began
        runner = Runner(source, kept, asker, order)
        if isinstance(order, Planned):
            order.wake = runner.look
            order.look_on(thread)
            order.full = lambda: asker.waiting > 0
            asker.progress = lambda number, tokens: self._say(
                runner, partial(order.progress, source.index(number), tokens)
            )
            asker.started = lambda number, computing: self._say(
                runner, partial(order.started, source.index(number), computing)
            )
        await runner.run()
        seconds = time.perf_counter() - began
        while self._client.info().running:
            await asyncio.sleep(0.01)
        after = self._client.info()
        if kept.failed:
            raise SystemExit(f"{kept.failed} lines failed")
        if after.pid != before.pid:
            raise SystemExit("the engine died meanwhile")
        return {
            "tokens_per_s": kept.tokens / seconds,
            "tokens_per_cpu_s": kept.tokens / (engine_cpu_s(before.pid) - cpu_s),
            "cached": kept.cached / kept.prompt,
            "preemptions": after.preemptions - before.preemptions,
            "steps": after.steps - before.steps,
            "planned_s": planned_s,
        }

    @staticmethod
    def _say(runner: Runner, what: Callable[[], None]) -> None:
        what()
        runner.look()

    async def _order(
        self,
        source: InputFile,
        kept: Kept,
        kind: str,
        asker: EngineAsker,
        thread: ThreadPoolExecutor,
    ) -> InOrder | Planned:
        forecast = kind in ("dfs", "blend")
        rows = self.served.max_num_seqs
        at_once = rows if forecast else WAITING_SHARE * rows
        if kind == "fcfs":
            return InOrder(len(source), kept, at_once)
        prompts = await read_prompts(source, kept, {}, partial(without_bound, asker.prompt))
        room = Room(self.kv_tokens, at_once, self.served.block_size)
        lengths = LengthTable() if forecast else None
        planning = partial(plan, kind.split()[0], prompts, room, self._rates, lengths)
        return await asyncio.get_running_loop().run_in_executor(thread, planning)


@contextlib.asynccontextmanager
async def engine(settings: dict[str, Any]) -> AsyncIterator[Bench]:
    ring = ring_of(EngineConfig.from_mapping(settings))
    keeper = EngineKeeper(settings, EngineLinks([ring]), standby=False, watchdog_s=300.0)
    client = RingClient(ring)
    served = await keeper.start()
    client.attach(asyncio.get_running_loop())
    keeping = asyncio.create_task(keeper.run())
    try:
        yield Bench(served, client)
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])
        await asyncio.to_thread(keeper.stop)
        client.close()
        ring.close()


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    settings = {
        "model": "builtin",
        "kv_memory": options.kv_memory,
        "max_num_seqs": options.max_num_seqs,
    }
    found: dict[str, Any] = {}
    async with engine(settings) as bench:
        draw = random.Random(options.seed)
        loads = {"families": families(options.requests, draw)}
        if options.lengths is not None:
            most = min(bench.served.max_model_len, bench.kv_tokens // 4)
            loads["chats"] = chats(options.lengths, options.requests, options.divide, most, draw)
        found["kv_tokens"] = bench.kv_tokens
        with ThreadPoolExecutor(1) as thread:
            for name, requests in loads.items():
                source = write(folder / f"{name}.jsonl", requests)
                await bench.run(source, "fcfs", thread)  # nothing is cold from here on
                runs: dict[str, list[dict[str, Any]]] = {order: [] for order in ORDERS}
                for number in range(options.rounds):
                    for place in range(len(ORDERS)):
                        order = ORDERS[(number + place) % len(ORDERS)]
                        runs[order].append(await bench.run(source, order, thread))
                found[name] = summary(name, runs)
    return found


def summary(name: str, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians over rounds, printed; ratios to fcfs of the same round with their extremes."""
    print(f"\n{name:10} tokens/s  of fcfs (least-most)    by CPU time             ", end="")
    print("cached  preemptions  steps")
    rows = {}
    for order, mine in runs.items():
        row: dict[str, Any] = {key: statistics.median(run[key] for run in mine) for key in mine[0]}
        for key in ("tokens_per_s", "tokens_per_cpu_s"):
            row[f"{key}_ratios"] = sorted(
                run[key] / base[key] for run, base in zip(mine, runs["fcfs"], strict=True)
            )
        spans = "  ".join(
            f"{statistics.median(ratios):.3f} ({ratios[0]:.3f}-{ratios[-1]:.3f})"
            for ratios in (row["tokens_per_s_ratios"], row["tokens_per_cpu_s_ratios"])
        )
        print(
            f"{order:10} {row['tokens_per_s']:8.0f}  {spans}  {row['cached']:6.3f} "
            f"{row['preemptions']:12.0f} {row['steps']:6.0f}"
        )
        rows[order] = row | {"runs": mine}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lengths", type=Path)
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--divide", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kv-memory", default="12MiB")
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(options, Path(folder)))
    if options.out is not None:
        machine = {"machine": platform.machine(), "cpu": cpu_name()}
        report.save(options.out, **machine, settings=vars(options) | {
            "lengths": None if options.lengths is None else options.lengths.name, "out": None
        }, **found)  # fmt: skip


if __name__ == "__main__":
    main()
