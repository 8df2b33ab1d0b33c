"""Cost of a streamed token in the request plane: 64 clients, an engine that computes nothing.

    python benchmarks/stream.py [--out benchmarks/results/stream.json]

Real request-plane process, real ring, real HTTP streams on loopback; behind the ring the real
scheduler and an executor that answers at once. The figure is CPU time of the request-plane process
per token, so it does not depend on how many cores the machine has or who else uses them; its
inverse is the tokens a second that one core can stream. ``ratio`` is against a bare loop that
encodes and writes such a chunk to a pipe, in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import orjson
import psutil

import report
from weft.core.config import EngineConfig
from weft.core.plan import StepPlan, StepResult
from weft.core.served import ServedModel
from weft.engine.loop import EngineLoop
from weft.kv.cache import GroupSpec, KVCache
from weft.ring.inbox import RingInbox
from weft.ring.layout import EngineInfo
from weft.ring.segment import RingFds, create_ring
from weft.sched.registry import fcfs
from weft.sched.scheduler import Limits
from weft.server.counts import create_board
from weft.server.keeper import FrontendKeeper
from weft.server.listen import listen
from weft.server.options import ServerOptions
from weft.supervise import frontend_settings

CLIENTS, TOKENS, VOCAB, MAX_LEN = 64, 1500, 4096, 2048
GOAL_TOKENS_PER_S = 60_000
STREAM = str(Path(__file__))


# -- the engine that computes nothing -----------------------------------------------------------


class Answered:
    """A step that was done before it began."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result


class NullExecutor:
    """Gives each row some ordinary token at once, at most ``rate`` steps a second."""

    depth = 0

    def __init__(self, rate: float) -> None:
        self._ids: dict[int, int] = {}
        self._pause = 1 / rate
        self._next = 0.0

    def launch(self, plan: StepPlan) -> Answered:
        time.sleep(max(0.0, self._next - time.monotonic()))
        self._next = time.monotonic() + self._pause
        for add in plan.add:
            self._ids[add.row] = add.sequence_id
        batch = plan.batches[0]
        ids = tuple(
            self._ids[row]
            for row, samples in zip(batch.rows, batch.samples, strict=True)
            if samples
        )
        tokens = tuple(300 + (plan.step_id * 7 + i) % 500 for i in ids)
        return Answered(StepResult(plan.step_id, ids, tokens))

    def close(self) -> None:
        pass


class Clock:
    def now(self) -> float:
        return time.monotonic()


def run_engine(ring: str, rate: float) -> None:
    cache = KVCache([GroupSpec("full", 16, CLIENTS * MAX_LEN // 16)], prefix_caching=False)
    scheduler = fcfs(cache, Limits(CLIENTS, 1024, MAX_LEN))
    inbox = RingInbox([RingFds.parse(ring)], vocab_size=VOCAB)
    inbox.write_info(EngineInfo(ready=1, pid=os.getpid(), max_model_len=MAX_LEN, vocab_size=VOCAB))
    loop = EngineLoop(scheduler, NullExecutor(rate), inbox, Clock())
    while not inbox.closed:
        if not loop.step():
            inbox.wait()


# -- clients ------------------------------------------------------------------------------------


async def read_stream(port: int) -> tuple[int, int]:
    """One streamed completion: (chunks, bytes)."""
    body = orjson.dumps(
        {"model": "null", "prompt": [5, 6, 7], "max_tokens": TOKENS, "stream": True}
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    chunks = size = 0
    while data := await reader.read(2**18):
        chunks += data.count(b"data: ")
        size += len(data)
    writer.close()
    return chunks - 1, size  # the last one says [DONE]


def run_clients(port: int) -> None:
    async def all_of_them() -> list[tuple[int, int]]:
        return await asyncio.gather(*(read_stream(port) for _ in range(CLIENTS)))

    results = asyncio.run(all_of_them())
    print(json.dumps({"chunks": sum(c for c, _ in results), "bytes": sum(b for _, b in results)}))


# -- measuring ----------------------------------------------------------------------------------


def cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def yardstick_us() -> float:
    """CPU time to encode one chunk and write it to a pipe, in one process."""
    prefix, suffix = b'data: {"choices":[{"index":0,"text":', b',"logprobs":null}]}\n\n'
    read_end, write_end = os.pipe()
    count = 20_000
    started = time.process_time()
    for number in range(count):
        os.write(write_end, prefix + orjson.dumps(f" token{number}") + suffix)
        os.read(read_end, 4096)
    spent = time.process_time() - started
    os.close(read_end)
    os.close(write_end)
    return spent / count * 1e6


def served() -> ServedModel:
    folder = Path(__file__).parents[1] / "src" / "weft" / "builtin"
    return ServedModel(
        name="null", folder=str(folder), family="null", parameters=0, vocab_size=VOCAB,
        hidden_size=1, max_model_len=MAX_LEN, max_num_seqs=CLIENTS, block_size=16, dtype="none",
        eos_token_ids=(), sampling_defaults={}, batch_invariant=True, kernels={}, kv_blocks={},
        weight_bytes=0, kv_memory=0,
    )  # fmt: skip


@contextlib.contextmanager
def request_plane(options: ServerOptions, rate: float) -> Iterator[tuple[int, int]]:
    """Fresh processes before an engine that computes nothing: (pid of the request plane, port)."""
    with listen(options) as listener:
        ring = create_ring()
        command = [sys.executable, STREAM, "--engine", str(ring), "--rate", str(rate)]
        engine = subprocess.Popen(command, pass_fds=ring.pass_fds)
        settings = frontend_settings(EngineConfig(), options)
        card, write_end = os.pipe()
        keeper = FrontendKeeper(0, settings, ring, listener, create_board(1), None, math.inf)
        frontend = keeper._start(card, announce=False)
        try:
            with os.fdopen(write_end, "w") as pipe:
                pipe.write(served().to_json() + "\n")
            yield frontend.pid, listener.getsockname()[1]
        finally:
            frontend.kill()
            engine.kill()


def measure(rate: float) -> dict[str, float]:
    """One round of all clients against fresh processes."""
    with request_plane(ServerOptions(port=0), rate) as (pid, port):
        warm_up(port)
        before, started = cpu_seconds(pid), time.monotonic()
        line = subprocess.run(
            [sys.executable, STREAM, "--clients", str(port)],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        seconds, spent = time.monotonic() - started, cpu_seconds(pid) - before
    tokens = CLIENTS * TOKENS
    chunks = json.loads(line)["chunks"]
    return {
        "cpu_us_per_token": spent / tokens * 1e6,
        "tokens_per_s_per_core": tokens / spent,
        "chunks_per_token": chunks / tokens,
        "wall_tokens_per_s": tokens / seconds,
    }


def warm_up(port: int) -> None:
    global TOKENS
    wanted, TOKENS = TOKENS, 20
    try:
        asyncio.run(read_stream(port))
    finally:
        TOKENS = wanted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=1000.0, help="engine steps a second at most")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--clients", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        return run_engine(options.engine, options.rate)
    if options.clients:
        return run_clients(options.clients)
    rounds = []
    for number in range(options.rounds):
        rounds.append({**measure(options.rate), "yardstick_us": yardstick_us()})
        print(f"round {number + 1}: " + ", ".join(f"{k} {v:,.2f}" for k, v in rounds[-1].items()))
    median = {k: statistics.median(r[k] for r in rounds) for k in rounds[0]}
    median["ratio"] = median["cpu_us_per_token"] / median["yardstick_us"]
    verdict = "ok" if median["tokens_per_s_per_core"] >= GOAL_TOKENS_PER_S else "MISSED"
    print("median:  " + ", ".join(f"{k} {v:,.2f}" for k, v in median.items()))
    print(f"goal: {GOAL_TOKENS_PER_S:,} tokens/s per core: {verdict}")
    if options.out:
        report.save(options.out, clients=CLIENTS, tokens=TOKENS, median=median, rounds=rounds)
    return None


if __name__ == "__main__":
    main()
