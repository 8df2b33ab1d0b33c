"""The server beside generation: errors, keys, limits, drain, metrics, slow readers."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted import ScriptedClient
from serving import Asking, serving

import weft
from live import eventually
from weft.core.errors import ConfigError, EngineBusyError, EngineDeadError, WeftError
from weft.core.types import FinishReason
from weft.server.listen import listen
from weft.server.options import ServerOptions
from weft.server.probe import NoProbe

BODY = {"model": "builtin", "prompt": "x", "max_tokens": 100}
CHAT = {"model": "builtin", "messages": [{"role": "user", "content": "x"}]}


def error_of(response: httpx.Response, status: int, code: str | None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert error["message"]
    assert error["type"] == ("server_error" if status >= 500 else error["type"])
    return error


@pytest.fixture
def http(scripted):
    with scripted.http() as http:
        yield http


# -- errors -------------------------------------------------------------------------------------


def test_every_error_has_openai_s_form(http):
    post = http.post
    error_of(http.get("/nope"), 404, "not_found")
    error_of(http.get("/v1/models/"), 404, "model_not_found")
    error_of(post("/health"), 405, "method_not_allowed")
    error_of(http.get("/v1/completions"), 405, "method_not_allowed")
    error_of(http.get("/v1/models/unknown"), 404, "model_not_found")
    error_of(post("/v1/completions", json={**BODY, "model": "m"}), 404, "model_not_found")
    error_of(post("/v1/completions", content=b"{"), 400, "invalid_json")
    nan = json.dumps({**BODY, "temperature": float("nan")}).encode()
    error_of(post("/v1/completions", content=nan), 400, "invalid_json")
    found = error_of(
        post("/v1/chat/completions", json={**CHAT, "tool": 1}), 400, "unknown_parameter"
    )
    assert found["param"] == "tool"
    assert found["type"] == "invalid_request_error"
    found = error_of(
        post("/v1/completions", json={**BODY, "best_of": 3}), 400, "unsupported_parameter"
    )
    assert found["param"] == "best_of"
    error_of(post("/v1/completions", json={**BODY, "max_tokens": -1}), 400, "invalid_parameter")
    long = {**BODY, "prompt": [5] * 300}
    error_of(post("/v1/completions", json=long), 400, "context_length_exceeded")
    error_of(post("/tokenize", json={"text": "x"}), 400, "unknown_parameter")


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "text/plain; charset=application/json"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/x-www-form-urlencoded", "user-agent": "Mozilla/5.0 curl/8.5"},
        {
            "content-type": "application/x-www-form-urlencoded",
            "user-agent": "curl/8.5.0",
            "origin": "https://evil.example",
        },
        {"content-type": "text/plain", "user-agent": "curl/8.5.0"},
        {"content-type": "multipart/form-data; boundary=x"},
        {"content-type": "application/jsonp"},
        {"origin": "https://evil.example"},
        {"content-type": "application/json", "content-encoding": "gzip"},
        {"content-encoding": "br, identity"},
    ],
)
def test_bodies_that_are_no_plain_json_are_not_taken(scripted, http, headers):
    for path in ("/v1/completions", "/v1/embeddings", "/v1/responses", "/tokenize", "/v1/messages"):
        answer = http.post(path, content=json.dumps(BODY).encode(), headers=headers)
        assert answer.status_code == 415, path
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert scripted.client.submitted.empty()


def test_ways_to_say_that_a_body_is_json(text):
    ways = [
        {},
        {"content-type": "application/json"},
        {"content-type": "Application/JSON; charset=utf-8", "content-encoding": "Identity"},
        {"content-type": "application/json", "origin": "https://good.example"},
        {"content-type": "application/x-www-form-urlencoded", "user-agent": "curl/8.5.0"},
    ]
    with serving(ScriptedClient([700]), text) as running, running.http() as http:
        for headers in ways:
            answer = http.post("/v1/completions", content=json.dumps(BODY), headers=headers)
            assert answer.status_code == 200, headers


def test_invocations_are_told_apart_by_what_they_have(text):
    with serving(ScriptedClient([700]), text) as running, running.http() as http:
        kinds = {"chat.completion": CHAT, "text_completion": {**BODY, "user": "me"}}
        for kind, body in kinds.items():
            assert http.post("/invocations", json=body).json()["object"] == kind
        streamed = http.post("/invocations", json={**CHAT, "stream": True})
        assert streamed.headers["content-type"].startswith("text/event-stream")
        for body, param in (
            ({"model": "builtin"}, "messages"),
            ({**CHAT, "prompt": "x"}, "prompt"),
            ({"model": "builtin", "input": ["x"], "dimensions": 0}, "dimensions"),
        ):
            refused = http.post("/invocations", json=body)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == param


def test_large_bodies(http, scripted):
    long = {**BODY, "prompt": "word " * 700_000}
    error_of(http.post("/v1/completions", json=long), 400, "context_length_exceeded")
    limit = scripted.service.options.max_body_bytes
    error_of(http.post("/v1/completions", content=b"x" * (limit + 1)), 413, "request_too_large")

    def endless():
        for _ in range(limit // 2**20 + 2):
            yield b"x" * 2**20

    error_of(http.post("/v1/completions", content=endless()), 413, "request_too_large")
    expecting = {"content-length": str(limit + 1), "expect": "100-continue"}
    with scripted.connect() as raw:
        head = "".join(f"{name}: {value}\r\n" for name, value in expecting.items())
        raw.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{head}\r\n".encode())
        assert raw.recv(64).startswith(b"HTTP/1.1 413")


def test_a_client_that_leaves_while_sending(scripted):
    with scripted.connect() as raw:
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{"
        )
    with scripted.http() as http:
        assert http.get("/health").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails_before_the_first_token(scripted, stream):
    answers = []

    def ask() -> None:
        with scripted.http() as http:
            answers.append(http.post("/v1/completions", json={**BODY, "stream": stream}))

    thread = threading.Thread(target=ask)
    thread.start()
    scripted.client.send(scripted.client.submitted.get(timeout=10), finish="cancelled")
    thread.join(10)
    error_of(answers[0], 503, "request_cancelled")


def test_an_engine_that_fails_in_the_middle_of_a_stream(scripted):
    with Asking(scripted, {**CHAT, "stream": True, "n": 2}, "/v1/chat/completions") as asking:
        first, second = (scripted.client.submitted.get(timeout=10) for _ in range(2))
        scripted.client.send(first, 700)
        asking.wait_for(2)
        scripted.client.send(second, 700, finish="error")
        asking.join()
    assert set(json.loads(asking.events[-1])["error"]) == {"message", "type", "param", "code"}
    assert "[DONE]" not in asking.events
    assert scripted.client.cancelled.get(timeout=5) == (first.id, FinishReason.CANCELLED)


def test_an_engine_that_takes_nothing(text):
    class Full(ScriptedClient):
        def submit(self, requests: Any, sink: Any) -> None:  # noqa: ARG002
            raise WeftError("No room.")

    with serving(Full(), text) as running, running.http() as http:
        error_of(http.post("/v1/completions", json=BODY), 500, "internal_error")
        assert running.service.num_open == 0
        assert running.service.metrics.waiting == 0


@pytest.mark.parametrize(("kind", "status"), [(EngineBusyError, 429), (EngineDeadError, 503)])
def test_an_engine_that_refuses(text, kind, status):
    class Refusing(ScriptedClient):
        def submit(self, requests: Any, sink: Any) -> None:  # noqa: ARG002
            raise kind("Not now.")

    with serving(Refusing(), text) as running, running.http() as http:
        answer = http.post("/v1/completions", json={**BODY, "n": 2})
        error_of(answer, status, kind.code)
        assert answer.headers["retry-after"] == str(kind.retry_after_s)
        wrong = http.post("/v1/completions", json={**BODY, "temperature": 9})
        error_of(wrong, 400, "invalid_parameter")
        assert "retry-after" not in wrong.headers
        page = http.get("/metrics").text
    label = 'model_name="builtin"'
    for reason in (kind.code, "invalid_parameter"):
        assert f'weft:request_rejected_total{{{label},reason="{reason}"}} 1.0' in page
    assert f'request_success_total{{finished_reason="cancelled",{label}}} 0.0' in page
    assert f"weft:prompt_tokens_total{{{label}}} 0.0" in page
    assert f"weft:num_requests_waiting{{{label}}} 0.0" in page


# -- the other routes ---------------------------------------------------------------------------


def test_models_tokens_and_info(scripted, http):
    assert http.get("/version").json() == {"version": weft.__version__}
    models = http.get("/v1/models").json()["data"]
    assert [m["id"] for m in models] == ["builtin", "org/other"]
    assert {m["max_model_len"] for m in models} == {scripted.service.builder.card.max_model_len}
    assert http.get("/v1/models/builtin:latest").json()["id"] == "builtin:latest"
    for name in ("org/other", "org%2Fother"):
        assert http.get(f"/v1/models/{name}").json()["id"] == "org/other"
    tokens = http.post("/tokenize", json={"model": "builtin", "prompt": "héllo"}).json()
    assert tokens["count"] == len(tokens["tokens"])
    body = {"tokens": tokens["tokens"], "skip_special_tokens": True}
    assert http.post("/detokenize", json=body).json() == {"prompt": "héllo"}
    chat = http.post("/tokenize", json={"messages": CHAT["messages"]}).json()
    assert chat["tokens"][0] == 0
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/ready").status_code == 200
    limit = chat["max_model_len"]
    assert http.post("/detokenize", json={"tokens": [5] * limit}).status_code == 200
    long = http.post("/detokenize", json={"tokens": [5] * (limit + 1)})
    assert error_of(long, 400, "context_length_exceeded")["param"] == "tokens"
    for asked in (
        {"prompt": "x" * 10**6},
        {"messages": [{"role": "user", "content": "x" * 10**6}]},
    ):
        error_of(http.post("/tokenize", json=asked), 400, "context_length_exceeded")
    info = http.get("/server_info").json()
    assert info["model"]["names"] == ["builtin", "org/other"]


class StuckProbe(NoProbe):
    def ready(self) -> bool:
        return False

    def idle_s(self) -> float:
        return 0.0

    def gauges(self) -> dict[str, float]:
        return {"num_requests_running": 7, "kv_cache_usage_perc": 0.25, "num_preemptions": 3}

    def info(self) -> dict[str, Any]:
        return {"attention": "reference", "folder": "/home/someone/model"}


def test_what_the_engine_tells(text):
    options = {"vllm_metrics": True}
    with (
        serving(ScriptedClient(), text, StuckProbe(), **options) as running,
        running.http() as http,
    ):
        assert http.get("/ready").status_code == 503
        assert http.get("/server_info").json()["engine"] == {"attention": "reference"}
        page = http.get("/metrics").text
    for prefix in ("weft", "vllm"):
        assert f'{prefix}:num_requests_running{{model_name="builtin"}} 7.0' in page
        assert f'{prefix}:num_preemptions_total{{model_name="builtin"}} 3.0' in page
        assert f'{prefix}:kv_cache_usage_perc{{model_name="builtin"}} 0.25' in page


class StarvedProbe(NoProbe):
    starved = killed = True

    def ready(self) -> bool:
        return not self.starved

    def out_of_memory(self) -> bool:
        return self.starved

    def killed_for_memory(self) -> bool:
        return self.killed

    def memory_kills(self) -> int:
        return 3


def test_without_an_engine_as_memory_ran_out_requests_end_with_that(text, monkeypatch):
    probe, body = StarvedProbe(), {"model": "builtin", "prompt": "x"}
    probe.starved = False
    with (
        serving(ScriptedClient(), text, probe) as running,
        running.http() as http,
        ThreadPoolExecutor() as pool,
    ):
        waiting = pool.submit(http.post, "/v1/completions", json=body)
        running.client.submitted.get(timeout=10)
        probe.starved = True
        told = {"status": "out_of_memory", "engines_killed_for_memory": 3}
        assert (http.get("/ready").status_code, http.get("/ready").json()) == (503, told)
        assert not waiting.done()
        monkeypatch.setattr("weft.server.service.MEMORY_PATIENCE_S", 0.0)
        error = error_of(waiting.result(), 503, "engine_out_of_memory")
        assert error["message"].startswith("The engine was killed because memory ran out")
        probe.killed = False
        answer = http.post("/v1/completions", json=body)
        error = error_of(answer, 503, "engine_out_of_memory")
        assert error["message"].startswith("There is too little free memory to start the next")
        assert answer.headers["retry-after"] == "5"
        probe.starved = False
        assert http.get("/ready").json() == told | {"status": "ready"}
        pool.submit(http.post, "/v1/completions", json=body)
        running.client.send(running.client.submitted.get(timeout=10), 700, finish="stop")


class StalledProbe(NoProbe):
    silent_s = 11.0

    def idle_s(self) -> float:
        return self.silent_s


def test_an_engine_that_stalls_is_not_ready(text):
    probe = StalledProbe()
    with serving(ScriptedClient(), text, probe) as running, running.http() as http:
        answer = http.get("/ready")
        assert (answer.status_code, answer.json()) == (503, {"status": "stalled"})
        assert http.get("/health").status_code == 200
        probe.silent_s = 9.0
        assert http.get("/ready").status_code == 200


def test_metrics_count_what_happened(text):
    with serving(ScriptedClient([700, 701, 702]), text) as running, running.http() as http:
        http.post("/v1/completions", json={**BODY, "n": 2})
        page = http.get("/metrics").text
    label = '{model_name="builtin"}'
    assert f"weft:generation_tokens_total{label} 6.0" in page
    assert f"weft:prompt_tokens_total{label} 2.0" in page
    of_class = '{model_name="builtin",service_class="interactive"}'
    assert f"weft:time_to_first_token_seconds_count{of_class} 2.0" in page
    assert f"weft:e2e_request_latency_seconds_count{of_class} 2.0" in page
    assert 'weft:request_success_total{finished_reason="stop",model_name="builtin"} 2.0' in page
    assert f"weft:num_requests_running{label} 0.0" in page


# -- keys, origins, sockets ---------------------------------------------------------------------


def test_keys_guard_every_path_but_two(text):
    keys = ("first-key", "second-key")
    with serving(ScriptedClient([700]), text, api_key=keys) as running, running.http() as http:
        for path in ("/v1/models", "/metrics", "/server_info", "/nope", "/v1/models/x"):
            error_of(http.get(path), 401, "invalid_api_key")
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            error_of(http.post(path, json=BODY), 401, "invalid_api_key")
        for path in ("/health", "/ready"):
            assert http.get(path).status_code == 200
        for value in (
            "Bearer wrong",
            "Bearer",
            "Basic first-key",
            "first-key",
            "Bearer first-key2",
        ):
            error_of(http.get("/metrics", headers={"authorization": value}), 401, "invalid_api_key")
        for key in keys:
            header = {"authorization": f"Bearer {key}"}
            assert http.post("/v1/completions", json=BODY, headers=header).status_code == 200


def test_origins(text):
    options = {"cors_origin": ("https://good.example",), "api_key": ("key",)}
    ask = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    with serving(ScriptedClient(), text, **options) as running, running.http() as http:
        good = http.options("/v1/completions", headers={"origin": "https://good.example", **ask})
        assert good.status_code == 200
        assert good.headers["access-control-allow-origin"] == "https://good.example"
        bad = http.options("/v1/completions", headers={"origin": "https://bad.example", **ask})
        assert "access-control-allow-origin" not in bad.headers
        refused = http.get("/v1/models", headers={"origin": "https://good.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://good.example"


def test_root_path(text):
    options = {"root_path": "/llm", "api_key": ("key",)}
    with serving(ScriptedClient(), text, **options) as running, running.http() as http:
        header = {"authorization": "Bearer key"}
        assert http.get("/v1/models", headers=header).status_code == 200
        assert http.get("/health").status_code == 200
        assert http.get("/v1/models").status_code == 401


def test_addresses_that_cannot_be_had(tmp_path):
    with listen(ServerOptions(port=0)) as taken, pytest.raises(ConfigError, match="--port"):
        listen(ServerOptions(port=taken.getsockname()[1]))
    path = tmp_path / "s"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="not a socket"):
        listen(ServerOptions(uds=str(path)))
    alive = tmp_path / "alive"
    with listen(ServerOptions(uds=str(alive))):
        assert stat.S_IMODE(alive.stat().st_mode) == 0o600
        with pytest.raises(ConfigError, match="Another server"):
            listen(ServerOptions(uds=str(alive)))
    listen(ServerOptions(uds=str(alive))).close()  # the dead one is replaced


@pytest.mark.parametrize(
    "options",
    [{"port": 70000}, {"api_key": ("",)}, {"root_path": "llm"}, {"served_model_name": ("",)}],
)
def test_options_that_make_no_sense(options):
    with pytest.raises(ConfigError):
        ServerOptions(**options)


# -- the end ------------------------------------------------------------------------------------


def test_drain_lets_open_streams_finish(text):
    with serving(ScriptedClient(), text, drain_timeout_s=20) as running:
        with Asking(running, {**BODY, "stream": True}) as asking, running.http() as http:
            request = running.client.submitted.get(timeout=10)
            running.client.send(request, 700)
            asking.wait_for(1)
            running.server.drain()
            assert http.get("/ready").status_code == 503
            assert http.get("/health").status_code == 200
            refused = http.post("/v1/completions", json=BODY)
            error_of(refused, 503, "shutting_down")
            assert "retry-after" in refused.headers
            running.client.send(request, 701, finish="stop")
        assert asking.events[-1] == "[DONE]"
        running.thread.join(5)
        assert not running.thread.is_alive()


def test_drain_ends_what_takes_too_long(text):
    with serving(ScriptedClient(), text, drain_timeout_s=0.3) as running:
        with Asking(running, {**BODY, "stream": True}) as asking:
            request = running.client.submitted.get(timeout=10)
            running.client.send(request, 700)
            asking.wait_for(1)
            running.server.drain()
        assert json.loads(asking.events[-1])["error"]["code"] == "shutting_down"
        assert running.client.cancelled.get(timeout=5)[0] == request.id


def test_drain_does_not_wait_for_a_client_that_does_not_read(text, caplog):
    with serving(ScriptedClient(), text, drain_timeout_s=0.1) as running:
        with running.ask({**BODY, "stream": True, "logprobs": 5}):
            request = running.client.submitted.get(timeout=10)

            def stuck() -> bool:
                running.client.send(request, *[700] * 1000)
                return any(c.flow.write_paused for c in running.server.server_state.connections)

            eventually(stuck)
            running.server.drain()
            running.thread.join(20)
        assert not running.thread.is_alive()
    assert "Cancel" not in caplog.text  # uvicorn's last word, which leaves a trace in the log


def test_the_end_answers_a_body_that_is_not_there_yet(text):
    with serving(ScriptedClient(), text) as running:
        address = ("127.0.0.1", int(running.url.rpartition(":")[2]))
        with socket.create_connection(address) as sock:
            head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99\r\n\r\n"
            sock.sendall(head + b"{")
            eventually(lambda: running.server.server_state.tasks)
            running.server.drain()
            sock.settimeout(20)
            answer = b"".join(iter(lambda: sock.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "shutting_down"


SCRIPT = """
import sys
from pathlib import Path
import weft
from weft.api import ModelCard
from weft.server.main import run_server
from weft.server.options import ServerOptions
from weft.text import ChatTemplate, Tokenizer
sys.path.insert(0, sys.argv[2])
from scripted import ScriptedClient
folder = Path(weft.__file__).parent / "builtin"
card = ModelCard(("builtin",), 4096, 256)
run_server(ScriptedClient([700, 701]), Tokenizer.load(folder), ChatTemplate.load(folder), card,
           ServerOptions(uds=sys.argv[1]), on_listening=lambda address: print(address, flush=True))
assert "torch" not in sys.modules
print("done", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_on_a_unix_socket_ends_on_a_signal(tmp_path, number):
    path = str(tmp_path / "weft.sock")
    command = [sys.executable, "-c", SCRIPT, path, str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().strip() == f"unix:{path}"
        with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://x") as http:
            assert http.post("/v1/completions", json=BODY).status_code == 200
            process.send_signal(number)
            assert process.stdout.readline().strip() == "done"
        assert process.wait(10) == 0
    assert not os.path.exists(path)
