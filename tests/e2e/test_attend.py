"""``weft serve --attend`` and ``weft attend``: best effort decodes in another process, over TCP."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from live import START_S, Server, eventually, refused, serving
from places import RunningPlace, attending, key_file
from weft.core.config import EngineConfig
from weft.cost.curves import Curve
from weft.cost.fit import FEATURES, Fitted
from weft.engine.costs import profile_key
from weft.engine.model import find_model
from weft.engine.process import INFO_EVERY_S

COMMON = ["--device", "cpu", "--max-model-len", "256"]
# The own host holds one sequence of 195 tokens, the device three and a half.
TIGHT = ["--kv-memory", "2MiB", "--host-kv-memory", "700KiB", "--attend-timeout-s", "2"]
CROWD = 10
GIVEN = [[9 + number, 7, 5 + number] * 25 for number in range(CROWD)]


def completions(server: Server, tier: str = "flex", most: int = 120) -> list[str]:
    """Greedy answers to all prompts at once."""

    def ask(prompt: list[int]) -> str:
        body = {"model": "builtin", "prompt": prompt, "temperature": 0, "ignore_eos": True}
        body |= {"service_tier": tier, "max_tokens": most}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=START_S)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    with ThreadPoolExecutor(CROWD) as clients:
        return list(clients.map(ask, GIVEN))


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> list[str]:
    """The answers of a server whose KV holds all sequences."""
    with serving(tmp_path_factory.mktemp("ample"), *COMMON) as server:
        return completions(server)


@pytest.fixture(scope="module")
def piggybacking(tmp_path_factory) -> list[str]:
    """Settings, with a profile of the built-in model that was measured nowhere."""
    config = EngineConfig(model="builtin", device="cpu", threads=1)
    model = find_model(config)
    key, layers = profile_key(config, model), model.spec.num_layers
    path = tmp_path_factory.mktemp("costs") / "profile.json"
    Fitted(key, layers, Curve((1, 1024), (0.001, 0.01)), dict.fromkeys(FEATURES, 0.0)).save(path)
    given = ["--scheduler", "slo-piggyback", "--slo-admission", "off", "--profile", str(path)]
    return [*COMMON, *TIGHT, *given]


def of_place(server: Server, name: str) -> float:
    (value,) = server.metrics(f"weft:place_{name}{{")
    return value


def lost(server: Server) -> float:
    (value,) = server.metrics("weft:host_sequences_lost_total{")
    return value


class Crowd:
    """Best effort that is served in the background, until it has tokens from a place."""

    def __init__(self, server: Server, others: ThreadPoolExecutor) -> None:
        eventually(lambda: of_place(server, "up") == 1, START_S)
        before = of_place(server, "jobs_total")
        self.answers = others.submit(completions, server)

        def begun() -> bool:
            """Whether one crowd is enough to need the place depends on how fast the machine is."""
            if self.answers.done():
                self.answers = others.submit(completions, server)
            return of_place(server, "jobs_total") > before

        eventually(begun, START_S)


def stop_in_use(server: Server, place: RunningPlace, others: ThreadPoolExecutor) -> Crowd:
    """Serve a crowd, and stop the place while KV of sequences lies there."""
    while True:
        crowd = Crowd(server, others)
        os.kill(place.pid, signal.SIGSTOP)
        time.sleep(2 * INFO_EVERY_S)  # metrics are from before
        if of_place(server, "kv_blocks_free") < of_place(server, "kv_blocks"):
            return crowd
        os.kill(place.pid, signal.SIGCONT)  # all sequences have ended just before
        crowd.answers.result()


def test_best_effort_decodes_at_a_place_to_the_same_tokens(expected, piggybacking, tmp_path):
    key = str(key_file(tmp_path))
    with attending(tmp_path, "--key-file", key) as place:
        given = ["--attend", place.address, "--attend-key-file", key]
        with serving(tmp_path, *piggybacking, *given) as server, ThreadPoolExecutor(1) as others:
            info = httpx.get(f"{server.url}/server_info").json()["engine"]
            assert info["places"] == [place.address]
            assert info["host_attention"].endswith(f"there, then {place.address}")
            crowd = Crowd(server, others)
            assert completions(server, "default") == expected
            assert crowd.answers.result() == expected
            eventually(server.idle)
            assert of_place(server, "connections_total") == 1
            assert of_place(server, "round_trip_seconds_total") > 0
            assert of_place(server, "sent_bytes_total") > 0
            assert of_place(server, "kv_blocks") > 0
            assert lost(server) == 0
            text = httpx.get(f"{server.url}/metrics").text
            assert f'place="{place.address}"' in text


def test_a_place_that_is_killed_costs_a_recompute_and_is_used_again(
    expected, piggybacking, tmp_path
):
    with (
        attending(tmp_path) as place,
        serving(tmp_path, *piggybacking, "--attend", place.address) as server,
        ThreadPoolExecutor(1) as others,
    ):
        crowd = stop_in_use(server, place, others)
        place.kill()
        assert completions(server, "default") == expected
        assert crowd.answers.result() == expected
        assert lost(server) > 0
        assert of_place(server, "up") == 0
        assert f"Place {place.address} does not attend" in server.errors.read_text()
        with attending(tmp_path, listen=place.address):
            again = Crowd(server, others)
            assert again.answers.result() == expected
            assert of_place(server, "connections_total") == 2
        assert server.metrics("weft:engine_restarts_total") == [0]


def test_a_place_that_is_stopped_holds_up_nobody_else(expected, piggybacking, tmp_path):
    with (
        attending(tmp_path) as place,
        serving(tmp_path, *piggybacking, "--attend", place.address) as server,
        ThreadPoolExecutor(1) as others,
    ):
        crowd = stop_in_use(server, place, others)
        assert completions(server, "default") == expected
        assert crowd.answers.result() == expected
        os.kill(place.pid, signal.SIGCONT)
        again = Crowd(server, others)
        assert again.answers.result() == expected


def test_an_engine_that_is_killed_finds_its_place_again(expected, piggybacking, tmp_path):
    with (
        attending(tmp_path) as place,
        serving(tmp_path, *piggybacking, "--attend", place.address) as server,
        ThreadPoolExecutor(1) as others,
    ):
        crowd = Crowd(server, others)
        server.children()["weft-engine"].kill()
        assert crowd.answers.result() == expected
        eventually(lambda: server.metrics("weft:engine_restarts_total") == [1], START_S)
        assert Crowd(server, others).answers.result() == expected


@pytest.mark.parametrize("what", ["key", "version"])
def test_a_place_that_does_not_fit_is_said_and_not_used(what, expected, piggybacking, tmp_path):
    key = ["--key-file", str(key_file(tmp_path, "another key, long enough"))]
    old = "import weft\nweft.__version__ = '0.0.1'"
    told = {"key": "The keys of engine and place differ", "version": "The place has weft 0.0.1"}
    with (
        attending(
            tmp_path, *(key if what == "key" else []), code=old if what == "version" else ""
        ) as place,
        serving(tmp_path, *piggybacking, "--attend", place.address) as server,
    ):
        eventually(lambda: told[what] in server.errors.read_text(), START_S)
        assert completions(server) == expected
        assert of_place(server, "up") == 0


def test_wrong_settings_are_refused(call, piggybacking, tmp_path):
    key = str(key_file(tmp_path))
    far = [*piggybacking, "--attend", "192.0.2.1:8700"]
    refused(call("generate", "x", *far), "192.0.2.1:8700 is on another machine", "attend_key_file")
    refused(call("info", *piggybacking, "--attend", "host"), "'host' is no address")
    twice = ["--attend", "127.0.0.1:1", "--attend", "127.0.0.1:1"]
    refused(call("info", *piggybacking, *twice), "names a place twice")
    refused(call("info", *piggybacking, "--attend-key-file", key), "there are none")
    refused(call("serve", *COMMON, "--attend", "127.0.0.1:1"), "set scheduler to slo-piggyback")
    refused(call("attend", "--listen", "0.0.0.0:0"), "must prove that they know a key")
    refused(call("attend", "--listen", "127.0.0.1:0", "--key-file", "none"), "cannot be read")
    most = ["--listen", "127.0.0.1:0", "--kv-memory", "10TiB"]
    refused(call("attend", *most), "kv_memory is 10.00 TiB, and", "are free")
    with attending(tmp_path) as place:
        refused(call("attend", "--listen", place.address), "Cannot listen on", "in use")
