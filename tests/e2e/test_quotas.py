"""Keys with classes and limits before real processes: two request planes, one of which dies."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from live import SMALL, START_S, Server, command_of, eventually, refused, run, serving

KEYS = """keys:
  - {name: boss, key: key-boss}
  - {name: nightly, key: key-nightly, classes: [gold, batch], default_class: batch}
  - {name: narrow, key: key-narrow, max_concurrent_requests: 4}
  - {name: slow, key: key-slow, requests_per_minute: 5, tokens_per_minute: 100000}
"""
BODY = {"model": "builtin", "prompt": [5, 6, 7], "max_tokens": 4}
LONG = {**BODY, "max_tokens": 400, "ignore_eos": True}


def headers(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer key-{name}", "connection": "close"}  # to any plane


def ask(server: Server, name: str, body: dict[str, Any] = BODY) -> httpx.Response:
    url = f"{server.url}/v1/completions"
    return httpx.post(url, json=body, headers=headers(name), timeout=START_S)


def frontends(server: Server) -> list[psutil.Process]:
    found = psutil.Process(server.process.pid).children()
    return [child for child in found if command_of(child)[:1] == ["weft-frontend"]]


class Held(threading.Thread):
    """A long request; ``status`` is 0 where its connection broke."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self._server = server
        self.status = 0
        self.start()

    def run(self) -> None:
        try:
            self.status = ask(self._server, "narrow", LONG).status_code
        except httpx.HTTPError:
            self.status = -1


def usage(server: Server) -> dict[tuple[str, str], tuple[int, int, int]]:
    found = httpx.get(f"{server.url}/v1/usage", headers=headers("boss")).json()["data"]
    names = ("requests", "prompt_tokens", "completion_tokens")
    return {(row["key"], row["service_class"]): tuple(row[name] for name in names) for row in found}


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    (tmp_path / "keys.yaml").write_text(KEYS)
    (tmp_path / "config.yaml").write_text("classes: {gold: {priority: 0, ttft_s: 30}}\n")
    files = ["--api-key-file", str(tmp_path / "keys.yaml"), "--usage-db", str(tmp_path / "u.db")]
    files += ["--config", str(tmp_path / "config.yaml"), "--admin-key", "boss"]
    return ["--frontends", "2", *files]


def test_quotas_hold_over_planes_and_the_dead_give_back_theirs(tmp_path, arguments):
    with serving(tmp_path, *arguments, modelled=True) as server:
        eventually(lambda: len(frontends(server)) == 2, START_S)
        # Rates: exactly five pass, whichever planes they meet.
        answers = [ask(server, "slow") for _ in range(8)]
        assert [answer.status_code for answer in answers] == [200] * 5 + [429] * 3
        left = [int(answer.headers["x-ratelimit-remaining-requests"]) for answer in answers]
        assert left == [4, 3, 2, 1, 0, 0, 0, 0]
        assert int(answers[-1].headers["x-ratelimit-limit-tokens"]) == 100000
        # The official client knows what that is.
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="key-slow", max_retries=0)
        with client, pytest.raises(openai.RateLimitError):
            client.completions.create(model="builtin", prompt="x", max_tokens=4)
        # Requests in progress: four of any, and the places of a dead plane are free again.
        before = server.children()["weft-engine"]
        before.suspend()
        held = [Held(server) for _ in range(4)]
        begun = 'weft:key_requests_total{key="narrow"'
        eventually(lambda: server.metrics(begun, headers=headers("boss")) == [4], START_S)
        assert ask(server, "narrow").status_code == 429
        for plane in frontends(server):
            plane.kill()
        eventually(lambda: all(not one.is_alive() for one in held), START_S)
        before.resume()
        assert {one.status for one in held} == {-1}
        eventually(lambda: len(frontends(server)) == 2, START_S)
        held = [Held(server) for _ in range(3)]
        assert ask(server, "narrow").status_code == 200
        for one in held:
            one.join(START_S)
        assert {one.status for one in held} == {200}


def test_classes_are_chosen_refused_and_counted_over_restarts(tmp_path, arguments):
    for times in (1, 2):
        with serving(tmp_path, *arguments, modelled=True) as server:
            assert ask(server, "nightly").json()["service_tier"] == "batch"
            gold = ask(server, "nightly", {**BODY, "service_tier": "gold", "ignore_eos": True})
            assert gold.json()["service_tier"] == gold.headers["x-weft-class"] == "gold"
            denied = ask(server, "nightly", {**BODY, "service_tier": "priority"})
            assert denied.status_code == 403
            assert "only 'gold', 'batch'" in denied.json()["error"]["message"]
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="key-nightly")
            with client:
                done = client.completions.create(
                    model="builtin", prompt="x", extra_headers={"x-weft-class": "gold"}
                )
            assert done.service_tier == "gold"  # type: ignore[attr-defined]
            eventually(
                lambda n=times: usage(server).get(("nightly", "gold"), (0,))[0] == 2 * n, START_S
            )
            assert usage(server)["nightly", "batch"][:2] == (times, 3 * times)
            page = httpx.get(f"{server.url}/metrics", headers=headers("boss")).text
            labels = 'model_name="builtin",service_class="gold"'
            assert f"weft:time_to_first_token_seconds_count{{{labels}}} 2.0" in page
            assert f"weft_slo_attainment{{{labels}}} 1.0" in page
            assert 'weft:key_requests_total{key="nightly",' in page
            denied = httpx.get(f"{server.url}/v1/usage", headers=headers("nightly"))
            assert denied.status_code == 403


def test_a_key_file_with_an_unknown_class_keeps_the_server_from_starting(tmp_path, arguments):
    (tmp_path / "config.yaml").write_text("")
    done = run("serve", "--port", "0", *SMALL, *arguments)
    refused(done, "key 'nightly'", "'gold' is no service class", "there are priority")
