"""``weft serve`` as its users meet it: three real processes, standard clients, signals."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from pathlib import Path

import httpx
import pytest

from live import (
    SMALL,
    START_S,
    WEFT,
    Server,
    eventually,
    free_port,
    in_shared_memory,
    serving,
    wait_until_ready,
    with_engines,
)


def scheduler_is_empty(server: Server) -> bool:
    text = httpx.get(f"{server.url}/metrics").text
    values = {
        line.split("{")[0]: float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith(("weft:num_requests", "weft:kv_cache"))
    }
    assert len(values) == 3
    return not any(values.values())


def test_processes_under_clear_titles(server):
    titles = {"weft-engine", "weft-frontend", "weft-renderer", "weft-sweeper"}
    eventually(lambda: set(server.children()) == titles, START_S)
    frontend = server.children()["weft-frontend"]
    maps = Path(f"/proc/{frontend.pid}/maps").read_text()
    assert "libtorch" not in maps, "the request plane must not load torch"


def test_the_openai_client_streams_what_it_gets_whole(server):
    ask = {
        "model": "builtin",
        "messages": [{"role": "user", "content": "What does `str.split` do?"}],
        "temperature": 0.0,
        "max_tokens": 40,
    }
    with server.client() as client:
        whole = client.chat.completions.create(**ask)
        pieces, usage = [], None
        stream = client.chat.completions.create(
            **ask, stream=True, stream_options={"include_usage": True}
        )
        for chunk in stream:
            pieces += [choice.delta.content or "" for choice in chunk.choices]
            usage = chunk.usage or usage
    assert "".join(pieces) == whole.choices[0].message.content != ""
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert whole.choices[0].finish_reason in ("stop", "length")


def test_the_python_api_and_http_give_the_same_tokens(server):
    import weft

    with weft.LLM(threads=1, kv_memory="32MiB", max_num_seqs=16) as llm:
        params = weft.SamplingParams(temperature=0.9, seed=3, max_tokens=24, ignore_eos=True)
        result = llm.generate("import os\n", params, progress=False)[0]
    body = {"model": "builtin", "prompt": "import os\n", "temperature": 0.9, "seed": 3}
    body |= {"max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body).json()
    assert answer["choices"][0]["text"] == result.text


def test_many_clients_at_once_get_their_own_answers(server):
    def ask(number: int, answers: dict[int, str]) -> None:
        body = {"model": "builtin", "prompt": [9 + number] * 5, "temperature": 0, "max_tokens": 16}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
        answers[number] = answer["choices"][0]["text"]

    alone: dict[int, str] = {}
    for number in range(8):
        ask(number, alone)
    together: dict[int, str] = {}
    threads = [threading.Thread(target=ask, args=(n, together)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone


def test_a_client_that_leaves_frees_its_sequence(server):
    body = {"model": "builtin", "prompt": "x", "max_tokens": 1900, "stream": True}
    body |= {"ignore_eos": True, "temperature": 1.0}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    eventually(lambda: scheduler_is_empty(server), START_S)


@pytest.mark.parametrize(
    ("change", "status", "word"),
    [
        ({"max_tokens": -1}, 400, "max_tokens"),
        ({"temprature": 1}, 400, "temperature"),
        ({"model": "gpt-9"}, 404, "gpt-9"),
        ({"messages": [{"role": "user", "content": "word " * 4000}]}, 400, "context"),
        ({"best_of": 3}, 400, "best_of"),
    ],
)
def test_wrong_requests_get_openai_errors(server, change, status, word):
    body = {"model": "builtin", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json={**body, **change})
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert word in error["message"]


def test_not_json_and_nan_are_refused(server):
    for raw in (b"{nonsense", b'{"model":"builtin","prompt":"x","temperature":NaN}', b"\xff\xfe"):
        answer = httpx.post(
            f"{server.url}/v1/completions",
            content=raw,
            headers={"content-type": "application/json"},
        )
        assert answer.status_code == 400
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_server_info_names_the_kernels(server):
    info = httpx.get(f"{server.url}/server_info").json()
    assert "paged_attention" in json.dumps(info)


def test_a_port_in_use_is_refused_at_once(server):
    port = server.url.rsplit(":", 1)[1]
    done = subprocess.run(
        [*WEFT, "serve", "--port", port, *SMALL],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert port in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_model_that_cannot_be_served_ends_the_server():
    done = subprocess.run(
        [*WEFT, "serve", "--port", str(free_port()), "--model", "./nowhere"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "./nowhere" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_ctrl_c_lets_running_streams_finish(tmp_path):
    with serving(tmp_path) as running:
        body = {"model": "builtin", "prompt": "x", "max_tokens": 200, "stream": True}
        body |= {"ignore_eos": True, "temperature": 1.0}
        with httpx.stream("POST", f"{running.url}/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            running.process.send_signal(signal.SIGINT)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert running.process.wait(START_S) == 0


def streaming(server: Server, tokens: int, choices: int = 1):
    body = {"model": "builtin", "prompt": "x", "max_tokens": tokens, "n": choices, "stream": True}
    body |= {"ignore_eos": True, "temperature": 1.0}
    return httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60)


def test_a_signal_to_every_process_lets_streams_finish(tmp_path):
    """As service managers end a service: SIGTERM to the whole group at once."""
    with serving(tmp_path, modelled=True) as running, streaming(running, 300) as answer:
        lines = answer.iter_lines()
        next(lines)
        for process in (*running.children().values(), running.process):
            process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert running.process.wait(START_S) == 0


def test_a_second_ctrl_c_ends_streams_with_an_error(tmp_path):
    with serving(tmp_path, modelled=True) as running, streaming(running, 1900, 16) as answer:
        lines = answer.iter_lines()
        next(lines)
        running.process.send_signal(signal.SIGINT)
        eventually(lambda: httpx.get(f"{running.url}/ready").status_code == 503, START_S)
        time.sleep(1.1)  # signals that come together count as one
        running.process.send_signal(signal.SIGINT)
        rest = [line for line in lines if line]
        assert "error" in rest[-1] or "error" in rest[-2]
        assert running.process.wait(START_S) == 0


def test_a_request_plane_that_dies_at_the_start_is_restarted(tmp_path):
    with (tmp_path / "errors").open("w") as log:
        port = free_port()
        command = [*WEFT, "serve", "--port", str(port), *SMALL]
        environment = with_engines(tmp_path, modelled=True)
        process = subprocess.Popen(command, stderr=log, env=environment)
    server = Server(process, f"http://127.0.0.1:{port}", tmp_path / "errors")
    eventually(lambda: "weft-frontend" in server.children(), START_S)
    server.children()["weft-frontend"].kill()
    wait_until_ready(server)
    process.send_signal(signal.SIGTERM)
    assert process.wait(START_S) == 0
    assert "Request plane 0 ended (signal SIGKILL)" in server.errors.read_text()


def test_nothing_is_left_when_the_supervisor_is_killed(tmp_path):
    before = in_shared_memory()
    with serving(tmp_path, modelled=True) as running:
        running.process.kill()
    assert in_shared_memory() <= before


def test_a_unix_socket_serves_and_is_removed(tmp_path):
    path = tmp_path / "weft.sock"
    command = [*WEFT, "serve", "--uds", str(path), *SMALL]
    environment = with_engines(tmp_path, modelled=True)
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment) as process:
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://weft", timeout=START_S) as client:
            eventually(lambda: path.exists(), START_S)
            body = {"model": "builtin", "prompt": "x", "max_tokens": 3}
            assert client.post("/v1/completions", json=body).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(START_S) == 0
    assert not path.exists()


def test_a_key_is_demanded_and_names_are_served(tmp_path):
    arguments = ["--api-key", "secret", "--served-model-name", "mine"]
    with serving(tmp_path, *arguments, modelled=True) as running:
        body = {"model": "mine", "prompt": "x", "max_tokens": 2}
        assert httpx.post(f"{running.url}/v1/completions", json=body).status_code == 401
        key = {"Authorization": "Bearer secret"}
        answer = httpx.post(f"{running.url}/v1/completions", json=body, headers=key)
        assert answer.json()["model"] == "mine"
