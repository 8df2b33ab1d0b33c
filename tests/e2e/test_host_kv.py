"""``weft serve --host-kv-memory`` on a CPU: sequences give way to the host and lose nothing."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from live import START_S, Server, eventually, serving
from weft.core.config import EngineConfig
from weft.cost.curves import Curve
from weft.cost.fit import FEATURES, Fitted
from weft.engine.costs import profile_key
from weft.engine.model import find_model

COMMON = ["--device", "cpu", "--max-model-len", "256"]
TIGHT = ["--kv-memory", "900KiB", "--host-kv-memory", "16MiB"]
CROWD = 12  # sequences of 200 tokens, of which the device's KV holds one and a half
GIVEN = [[9 + number, 7, 5 + number] * 25 for number in range(CROWD)]


def completions(server: Server) -> list[str]:
    """Greedy answers to all prompts at once."""

    def ask(prompt: list[int]) -> str:
        body = {"model": "builtin", "prompt": prompt, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(
            f"{server.url}/v1/completions", json={**body, "max_tokens": 120}, timeout=START_S
        )
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    with ThreadPoolExecutor(CROWD) as clients:
        return list(clients.map(ask, GIVEN))


def moved(server: Server) -> tuple[float, float]:
    """Blocks that went to the host, and that came back."""
    out, back = (server.metrics(f"weft:kv_blocks_to_{to}_total") for to in ("host", "device"))
    return out[0], back[0]


def host_blocks(server: Server) -> tuple[float, float]:
    """Blocks of the host, and those of them that are free."""
    every, free = (server.metrics(f"weft:host_kv_blocks{name}{{") for name in ("", "_free"))
    return every[0], free[0]


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> list[str]:
    """The answers of a server whose KV holds all sequences."""
    with serving(tmp_path_factory.mktemp("ample"), *COMMON) as server:
        answers = completions(server)
        assert moved(server) == (0, 0)
        assert host_blocks(server) == (0, 0)
    return answers


@pytest.fixture
def profile(tmp_path) -> Path:
    """A profile of the built-in model, measured nowhere."""
    config = EngineConfig(model="builtin", device="cpu", threads=1)
    key = profile_key(config, find_model(config))
    path = tmp_path / "profile.json"
    Fitted(key, 4, Curve((1, 1024), (0.001, 0.01)), dict.fromkeys(FEATURES, 0.0)).save(path)
    return path


@pytest.mark.parametrize("scheduler", ["fcfs", "slo"])
def test_more_sequences_than_the_device_holds_get_the_same_tokens(
    scheduler, expected, profile, tmp_path
):
    given = ["--scheduler", scheduler, "--slo-admission", "off", "--profile", str(profile)]
    with serving(tmp_path, *COMMON, *TIGHT, *given) as server:
        info = httpx.get(f"{server.url}/server_info").json()["engine"]
        assert info["host_kv_memory"] == 16 * 2**20
        assert info["host_kv_blocks"]["full"] > 10 * info["kv_blocks"]["full"]
        assert host_blocks(server) == (info["host_kv_blocks"]["full"],) * 2
        assert completions(server) == expected
        eventually(server.idle)
        out, back = moved(server)
        assert out >= back > 0
        assert out > info["kv_blocks"]["full"], "less moved than the device holds"
        every, free = host_blocks(server)
        assert free == every > 0


def test_an_engine_that_is_killed_with_kv_on_the_host_loses_no_token(expected, tmp_path):
    with serving(tmp_path, *COMMON, *TIGHT) as server, ThreadPoolExecutor(1) as others:
        answers = others.submit(completions, server)
        eventually(lambda: moved(server)[0] > 0, START_S)
        server.children()["weft-engine"].kill()
        assert answers.result() == expected
        eventually(lambda: server.metrics("weft:engine_restarts_total") == [1], START_S)
        eventually(lambda: server.idle() and len(set(host_blocks(server))) == 1)


def test_info_tells_the_memory_of_the_host(call):
    info = json.loads(call("info", "--json", *COMMON, *TIGHT).stdout)
    assert info["memory"]["fits"]
    assert 15 * 2**20 < info["memory"]["host_kv_bytes"] <= 16 * 2**20
    words = call("info", *COMMON, *TIGHT).stdout
    assert "15.98 MiB on the host, for sequences that give way" in words
    assert "on the host" not in call("info", *COMMON).stdout
