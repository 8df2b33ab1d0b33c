"""A server without requests gives the memory of its KV back, and computes the same afterwards."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil

from live import START_S, Server, eventually, serving

MIB = 2**20


def engine_of(server: Server) -> psutil.Process:
    return server.children()["weft-engine"]


def taken(process: psutil.Process) -> int:
    """Bytes of a process that no file on disk backs: its own, KV and rings."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    kinds = ("RssAnon:", "RssShmem:")
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(kinds))


def complete(server: Server, first: int) -> str:
    body = {"model": "builtin", "prompt": [first + i % 50 for i in range(400)], "max_tokens": 4}
    body["temperature"] = 0
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=START_S)
    return answer.raise_for_status().json()["choices"][0]["text"]


def burst(server: Server) -> tuple[list[str], int]:
    """The texts of many requests, and the most that the engine had when one ended."""
    engine = engine_of(server)

    def one(number: int) -> tuple[str, int]:
        return complete(server, 100 + number), taken(engine)

    with ThreadPoolExecutor(16) as clients:
        texts, sizes = zip(*clients.map(one, range(48)), strict=True)
    return list(texts), max(sizes)


def test_memory_of_a_burst_is_given_back(tmp_path):
    with serving(tmp_path, "--kv-memory", "256MiB", "--kv-idle-s", "1") as server:
        complete(server, 90)
        engine = engine_of(server)
        texts, most = burst(server)
        eventually(lambda: taken(engine) < most - 32 * MIB, START_S)
        least = taken(engine)
        again, most = burst(server)
        assert again == texts
        assert most > least + 24 * MIB
        eventually(lambda: taken(engine) < least + 16 * MIB, START_S)


def switches(server: Server) -> int:
    """How often threads of the server's processes have gone to sleep since they began."""
    every = [psutil.Process(server.process.pid), *server.children().values()]
    return sum(process.num_ctx_switches().voluntary for process in every)


def test_a_server_at_rest_sleeps(tmp_path):
    """Nothing polls: its six processes wake up some three times a second in all."""
    look_s, most_a_second = 4.0, 8

    def sleeps() -> bool:
        before, began = switches(server), time.monotonic()
        time.sleep(look_s)
        return switches(server) - before < most_a_second * (time.monotonic() - began)

    with serving(tmp_path, "--standby") as server:
        complete(server, 90)
        eventually(lambda: "weft-standby" in server.children(), START_S)
        eventually(sleeps, START_S)
        complete(server, 120)
