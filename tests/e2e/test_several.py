"""Several models in one server: routed by name, each with an engine of its own; they sleep."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from openai.types import Batch

import pooled
from live import START_S, Server, command_of, eventually, refused, run, serving

NAMES = ["a=builtin", "b=builtin"]
FLAGS = ["--model", "a=builtin", "--model", "b=builtin"]
LONG = 1500
ADMIN, USER = {"authorization": "Bearer root-key"}, {"authorization": "Bearer user-key"}
# Room for two of the small models, not for three.
ROOM = ["--models-memory", "300MiB"]


def ask(server: Server, model: str, tokens: int = 8, **more: object) -> httpx.Response:
    body: dict = {"prompt": [5, 6, 7, 8], "max_tokens": tokens, "temperature": 0, **more}
    body |= {"model": model, "ignore_eos": True, "return_token_ids": True}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=START_S, headers=ADMIN)


def tokens_of(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"][0]["token_ids"])


def code_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def states(server: Server) -> dict[str, str]:
    found = httpx.get(f"{server.url}/v1/models", headers=ADMIN, timeout=START_S).json()["data"]
    return {entry["id"]: entry["state"] for entry in found}


def engines(server: Server) -> list[psutil.Process]:
    """Engines, the oldest first."""
    found = psutil.Process(server.process.pid).children(recursive=True)
    titles = ((child, command_of(child)) for child in found)
    those = [child for child, words in titles if words and words[0].split()[0] == "weft-engine"]
    return sorted(those, key=lambda child: child.create_time())


class Stream(threading.Thread):
    """Reads a stream to its end."""

    def __init__(self, server: Server, model: str, tokens: int, n: int = 1) -> None:
        super().__init__(daemon=True)
        self.tokens: list[int] = []
        self.problem = ""
        self._server, self._model, self._wanted, self._n = server, model, tokens, n
        self.start()

    def run(self) -> None:
        body = {
            **{"model": self._model, "prompt": [5, 6, 7, 8], "max_tokens": self._wanted},
            **{"temperature": 0, "ignore_eos": True, "return_token_ids": True, "stream": True},
            "n": self._n,
        }
        url = f"{self._server.url}/v1/completions"
        try:
            with httpx.stream("POST", url, json=body, timeout=120, headers=ADMIN) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line[6:])
                        for choice in event.get("choices", ()):
                            self.tokens += choice.get("token_ids") or []
                        self.problem = event.get("error", {}).get("code", self.problem)
                    elif line.startswith("{"):
                        self.problem = line
        except httpx.HTTPError as error:
            self.problem = repr(error)

    def outcome(self) -> tuple[list[int], str]:
        self.join(120)
        assert not self.is_alive()
        return self.tokens, self.problem


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A random checkpoint, and beside it one that cannot be loaded."""
    root = tmp_path_factory.mktemp("models")
    for name in ("tiny", "broken"):
        (root / name).mkdir()
    pooled.model().save_pretrained(root / "tiny")
    pooled.tokenizer().save(str(root / "tiny" / "tokenizer.json"))
    shutil.copytree(root / "tiny", root / "broken", dirs_exist_ok=True)
    os.truncate(root / "broken" / "model.safetensors", 100)
    return root


@pytest.fixture(scope="module")
def several(tiny, tmp_path_factory) -> Iterator[Server]:
    """Four models, all loaded at the start; one of them cannot be."""
    folder = tmp_path_factory.mktemp("server")
    with serving(folder, *NAMES, str(tiny), "--data-dir", str(folder / "data")) as server:
        eventually(lambda: "loading" not in states(server).values(), START_S)
        eventually(lambda: "asleep" not in states(server).values(), START_S)
        yield server


def test_routes_are_described_and_the_loom_is_that_of_a_model(several):
    said = several.errors.read_text()
    assert "classes: priority" in said
    assert "live view: http" in said
    paths = httpx.get(f"{several.url}/openapi.json").raise_for_status().json()["paths"]
    assert {"/v1/models/load", "/v1/models/unload", "/v1/chat/completions", "/ready"} <= set(paths)
    for name in ("a", "b"):
        url = f"{several.url}/v1/loom?once=1&model={name}"
        shown = httpx.get(url, headers=ADMIN, timeout=START_S).raise_for_status().json()
        assert shown["models"] == [name]
        top = run("top", "--once", "--url", several.url, "--model", name)
        assert (top.returncode, name in top.stdout) == (0, True), top.stderr
    top = run("top", "--once", "--url", several.url, "--model", "c")
    assert top.returncode == 1
    assert "The model 'c' was not found" in top.stderr


def test_requests_find_their_model(several):
    assert states(several) == {"a": "awake", "b": "awake", "broken": "failed", "tiny": "awake"}
    of_a = tokens_of(ask(several, "a"))
    assert tokens_of(ask(several, "b")) == of_a
    assert tokens_of(ask(several, "tiny")) != of_a
    assert ask(several, "b").json()["model"] == "b"
    unknown = ask(several, "nobody")
    assert code_of(unknown) == (404, "model_not_found")
    assert all(f"'{name}'" in unknown.json()["error"]["message"] for name in states(several))
    shown = httpx.get(f"{several.url}/v1/models/tiny").json()
    assert shown["state"] == "awake"
    assert shown["memory_bytes"] > 2**20
    assert shown["wake_s"] > 0
    counted = httpx.post(f"{several.url}/tokenize", json={"model": "tiny", "prompt": "hello"})
    assert counted.status_code == 200


def test_a_model_that_cannot_be_loaded_fails_alone(several):
    failed = ask(several, "broken")
    assert code_of(failed) == (503, "model_failed")
    assert "model.safetensors" in failed.json()["error"]["message"]
    assert failed.headers["retry-after"]
    assert tokens_of(ask(several, "a"))
    assert httpx.get(f"{several.url}/ready").json()["models"]["broken"] == "failed"


def test_metrics_and_status_tell_models_apart(several):
    page = httpx.get(f"{several.url}/metrics").text
    for name in ("a", "b", "tiny"):
        assert f'weft:model_state{{model_name="{name}",state="awake"}} 1.0' in page
        assert f'weft:engine_restarts_total{{model_name="{name}"}} 0.0' in page
    assert page.count("# TYPE weft:generation_tokens_total ") == 1
    assert 'weft:model_state{model_name="broken",state="failed"} 1.0' in page
    said = run("status", "--url", several.url, "--interval-s", "0").stdout
    assert "tiny: awake" in said
    assert "broken: failed" in said
    assert "woken in" in said


def test_the_death_of_an_engine_concerns_its_model_alone(several):
    undisturbed = tokens_of(ask(several, "a", 600))
    streams = {name: Stream(several, name, 600) for name in ("a", "b")}
    eventually(lambda: all(len(stream.tokens) > 5 for stream in streams.values()), START_S)
    before = engines(several)
    before[0].send_signal(signal.SIGKILL)
    assert {name: stream.outcome() for name, stream in streams.items()} == {
        "a": (undisturbed, ""), "b": (undisturbed, ""),
    }  # fmt: skip
    page = httpx.get(f"{several.url}/metrics").text
    assert 'weft:engine_restarts_total{model_name="a"} 1.0' in page
    assert 'weft:engine_restarts_total{model_name="b"} 0.0' in page
    assert all(engine.is_running() for engine in before[1:])
    assert "The engine of 'a' ended" in several.errors.read_text()


def begin_batch(server: Server, model: str) -> str:
    """Begin a batch of one line; its id."""
    line = {
        "custom_id": "one", "method": "POST", "url": "/v1/completions",
        "body": {"model": model, "prompt": [5, 6, 7, 8], "max_tokens": 8, "temperature": 0,
                 "ignore_eos": True, "return_token_ids": True},
    }  # fmt: skip
    client = server.client()
    file = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )
    return batch.id


def completed(server: Server, batch: str) -> Batch:
    """The batch, once it is complete."""
    batches = server.client().batches
    eventually(lambda: batches.retrieve(batch).status == "completed", START_S)
    return batches.retrieve(batch)


def test_a_batch_is_answered_by_the_model_of_its_lines(several):
    done = completed(several, begin_batch(several, "tiny"))
    client = several.client()
    assert done.output_file_id is not None
    (answer,) = client.files.content(done.output_file_id).text.splitlines()
    body = json.loads(answer)["response"]["body"]
    assert body["choices"][0]["token_ids"] == tokens_of(ask(several, "tiny"))
    assert body["model"] == "tiny"


def messages(*names: str) -> dict[str, list[dict[str, object]]]:
    """A batch of messages for models."""
    said = {"max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}
    params = ({"model": name, **said} for name in names)
    return {"requests": [{"custom_id": f"r{at}", "params": one} for at, one in enumerate(params)]}


def test_a_batch_of_messages_is_answered_by_the_model_of_its_requests(several):
    url = f"{several.url}/v1/messages/batches"
    for query in ({}, {"model": "b"}):
        made = httpx.post(url, json=messages("b", "b:latest"), params=query, timeout=START_S)
        assert made.status_code == 200, made.text
        one = f"{url}/{made.json()['id']}"
        eventually(lambda one=one: httpx.get(one).json()["processing_status"] == "ended", START_S)
        lines = [json.loads(line)["result"] for line in httpx.get(f"{one}/results").iter_lines()]
        assert [line["type"] for line in lines] == ["succeeded", "succeeded"], lines
        assert {line["message"]["model"] for line in lines} == {"b", "b:latest"}
    for query, names in (({}, ("b", "b", "a")), ({"model": "a"}, ("a", "b"))):
        mixed = httpx.post(url, json=messages(*names), params=query, timeout=START_S)
        assert mixed.status_code == 400, mixed.text
        said = mixed.json()["error"]["message"]
        assert f"requests[{len(names) - 1}] is for '{names[-1]}'" in said
    unknown = httpx.post(url, json=messages("none"), timeout=START_S)
    assert unknown.status_code == 200  # each request has an error of its own
    assert httpx.post(url, content=b'{"requests": [{]', timeout=START_S).status_code in (400, 415)


@pytest.fixture
def keys(tmp_path) -> list[str]:
    path = tmp_path / "keys"
    path.write_text("root:root-key\nuser:user-key\n")
    return ["--api-key-file", str(path), "--admin-key", "root"]


def order(server: Server, what: str, model: str, headers: dict = ADMIN) -> httpx.Response:
    url = f"{server.url}/v1/models/{what}"
    return httpx.post(url, json={"model": model}, headers=headers, timeout=START_S)


def memory_of(server: Server) -> int:
    """PSS of all processes of a server."""
    family = psutil.Process(server.process.pid).children(recursive=True)
    return sum(child.memory_full_info().pss for child in family)


def test_administrators_let_models_sleep_and_requests_wake_them(tmp_path, keys):
    with serving(tmp_path, *FLAGS, *keys) as server:
        eventually(lambda: set(states(server).values()) == {"awake"}, START_S)
        before = tokens_of(ask(server, "b", 50))
        for what in ("load", "unload"):
            assert code_of(order(server, what, "b", USER)) == (403, "models_not_allowed")
        assert code_of(order(server, "unload", "nobody")) == (404, "model_not_found")
        awake = memory_of(server)
        assert order(server, "unload", "b").json()["state"] == "asleep"
        assert len(engines(server)) == 1
        assert awake - memory_of(server) > 20 * 2**20
        assert tokens_of(ask(server, "a", 50)) == before
        counted = {"model": "b", "prompt": "hello"}
        counting = httpx.post(f"{server.url}/tokenize", json=counted, headers=ADMIN)
        assert counting.status_code == 200
        assert states(server) == {"a": "awake", "b": "asleep"}
        assert tokens_of(ask(server, "b", 50)) == before
        assert states(server)["b"] == "awake"
        looked = httpx.get(f"{server.url}/v1/loom?once=1&model=b", headers=ADMIN, timeout=START_S)
        assert looked.json()["recoveries"] == []
        loaded = order(server, "load", "b")
        assert loaded.status_code == 200
        assert loaded.json()["wake_s"] > 0
        stream = Stream(server, "b", LONG, 8)
        eventually(lambda: bool(stream.tokens), START_S)
        assert code_of(order(server, "unload", "b")) == (503, "models_busy")
        assert stream.outcome()[1] == ""
        assert len(stream.tokens) == 8 * LONG
        assert "model b sleeps: as asked" in server.errors.read_text()


def test_models_that_are_not_used_sleep_and_busy_ones_never_do(tmp_path):
    with serving(tmp_path, *NAMES, "--idle-sleep-s", "1") as server:
        before = tokens_of(ask(server, "a", 50))
        stream = Stream(server, "a", LONG, 8)
        eventually(lambda: states(server) == {"a": "awake", "b": "asleep"}, START_S)
        assert stream.outcome() == (stream.tokens, "")
        assert len(stream.tokens) == 8 * LONG
        eventually(lambda: states(server)["a"] == "asleep", START_S)
        assert not engines(server)
        assert httpx.get(f"{server.url}/ready").status_code == 200
        began = [Stream(server, name, 50) for name in ("a", "b", "a", "b")]
        assert [one.outcome() for one in began] == 4 * [(before, "")]


def test_the_least_recently_used_model_makes_room(tmp_path, tiny):
    with serving(tmp_path, *NAMES, str(tiny / "tiny"), *ROOM) as server:
        eventually(lambda: "loading" not in states(server).values(), START_S)
        assert states(server) == {"a": "awake", "b": "awake", "tiny": "asleep"}
        for path, status, code in (
            ("/v1/loom", 503, "model_asleep"), ("/v1/targets", 503, "model_asleep"),
            ("/v1/nothing", 404, "not_found"),
        ):  # fmt: skip
            answer = httpx.get(f"{server.url}{path}?model=tiny", timeout=START_S)
            assert code_of(answer) == (status, code)
        assert states(server)["tiny"] == "asleep"
        tokens_of(ask(server, "a"))
        targets, wanted = f"{server.url}/v1/targets?model=tiny", {"classes": {"nobody": {}}}
        answer = httpx.put(targets, json=wanted, timeout=START_S)
        assert "no service class 'nobody'" in answer.json()["error"]["message"]
        asleep = tokens_of(ask(server, "tiny"))
        assert states(server) == {"a": "awake", "b": "asleep", "tiny": "awake"}
        for engine in engines(server):
            engine.suspend()
        streams = [Stream(server, name, 100) for name in ("a", "tiny")]
        time.sleep(0.5)  # which is longer than they take to come
        none = ask(server, "b")
        for engine in engines(server):
            engine.resume()
        assert code_of(none) == (503, "models_busy")
        assert int(none.headers["retry-after"]) > 0
        assert [stream.outcome()[1] for stream in streams] == ["", ""]
        assert tokens_of(ask(server, "b"))
        assert tokens_of(ask(server, "tiny")) == asleep


def test_a_server_ends_while_a_model_wakes(tmp_path):
    with serving(tmp_path, *NAMES, "--drain-timeout-s", "20") as server:
        before = tokens_of(ask(server, "b"))
        order(server, "unload", "b")
        stream = Stream(server, "b", 8)
        eventually(lambda: states(server)["b"] == "loading", START_S)
        server.process.send_signal(signal.SIGTERM)
        assert stream.outcome() == (before, "")
        assert server.process.wait(START_S) == 0


def test_batches_of_before_wake_models_that_do_not_fit_together(tmp_path):
    data = ["--data-dir", str(tmp_path / "data")]
    with serving(tmp_path, *NAMES, *data) as server:
        eventually(lambda: set(states(server).values()) == {"awake"}, START_S)
        for engine in engines(server):
            engine.suspend()
        begun = [begin_batch(server, name) for name in ("b", "a")]
        server.process.kill()
    with serving(tmp_path, *NAMES, *data, "--models-memory", "200MiB") as server:
        assert [completed(server, batch).id for batch in begun] == begun


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["builtin", "builtin=builtin"], ["Two models have the name 'builtin'"]),
        ([*NAMES, "--served-model-name", "x"], ["--served-model-name", "--model"]),
        ([*NAMES, "--device", "cuda"], ["only on a CPU"]),
        ([*NAMES, "--chat-template", __file__], ["--chat-template", "of one model"]),
        ([*NAMES, "./nowhere"], ["./nowhere", "does not exist"]),
        (["builtin", "--models-memory", "1GiB"], ["several models"]),
        ([*NAMES, "--engine-only", "--ring-listen", "127.0.0.1:0"], ["--engine-only"]),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(call, words, said):
    refused(call("serve", *words), *said)
