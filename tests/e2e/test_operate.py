"""``weft serve`` as an operator runs it: keys in a file, JSON logs, a bounded queue, deadlines."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import httpx
import pytest

from live import START_S, Server, eventually, serving

KEY = {"authorization": "Bearer key-of-alice"}
ENDLESS = {"model": "builtin", "prompt": "x", "max_tokens": 1900, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("operate")
    (folder / "keys").write_text("# of the test\nalice: key-of-alice\n")
    logs = ["--log-format", "json", "--access-log", "--log-level", "info"]
    limits = ["--max-queued-requests", "1", "--max-num-seqs", "1"]
    keys = ["--api-key-file", str(folder / "keys")]
    with serving(folder, *keys, *logs, *limits) as running:
        yield running


def lines(server: Server) -> list[dict]:
    return [json.loads(line) for line in server.errors.read_text().splitlines()]


def gauge(server: Server, name: str) -> float:
    (value,) = server.metrics(name, headers=KEY)
    return value


def test_every_line_is_json_and_bears_its_request(server):
    headers = {**KEY, "x-request-id": "one-of-mine"}
    body = {"model": "builtin", "prompt": "a secret", "max_tokens": 3}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers)
    assert answer.headers["x-request-id"] == "one-of-mine"
    eventually(
        lambda: any(line.get("request_id") == "one-of-mine" for line in lines(server)), START_S
    )
    (line,) = [line for line in lines(server) if line.get("request_id") == "one-of-mine"]
    assert (line["key"], line["status"], line["process"]) == ("alice", 200, "frontend")
    assert line["output_tokens"] <= 3
    everything = server.errors.read_text()
    assert "key-of-alice" not in everything
    assert "secret" not in everything
    assert any("serving builtin" in line["message"] for line in lines(server))


def test_server_info_has_kernels_limits_and_versions(server):
    answer = httpx.get(f"{server.url}/server_info", headers=KEY)
    info = answer.json()
    assert info["engine"]["kernels"]["paged_attention"] == {
        "kernel": "cpu",
        "dtype": info["engine"]["dtype"],
        "kv_dtype": info["engine"]["dtype"],
    }
    versions = info["engine"]["versions"]
    assert set(versions) == {"weft", "python", "numpy", "llguidance", "tokenizers"}
    assert all(versions.values())
    assert info["limits"]["max_queued_requests"] == 1
    assert "folder" not in answer.text
    assert "keys" not in answer.text


def test_a_deadline_frees_the_engine(server):
    headers = {**KEY, "X-Request-Timeout": "0.3"}
    answer = httpx.post(f"{server.url}/v1/completions", json=ENDLESS, headers=headers, timeout=60)
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    eventually(lambda: gauge(server, "weft:num_requests_running") == 0, START_S)


def ask_without_reading(server: Server) -> socket.socket:
    """Send an endless request; closing the connection ends it."""
    host, port = server.url.removeprefix("http://").split(":")
    raw = socket.create_connection((host, int(port)))
    body = json.dumps(ENDLESS)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: key-of-alice\r\n"
    raw.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    return raw


def test_a_full_queue_is_refused_and_told_when_to_return(server):
    """One row: one sequence runs, one waits, the third is refused."""
    with ask_without_reading(server):
        eventually(lambda: gauge(server, "weft:num_requests_running") == 1, START_S)
        with ask_without_reading(server):
            eventually(lambda: gauge(server, "weft:num_requests_waiting") == 1, START_S)
            refused = httpx.post(f"{server.url}/v1/completions", json=ENDLESS, headers=KEY)
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "queue_full"
            assert 1 <= int(refused.headers["retry-after"]) <= 60
    eventually(lambda: gauge(server, "weft:num_requests_running") == 0, START_S)
