"""Limits of a connection: long, slow and malformed requests, on bare sockets."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import struct
from typing import Any

import pytest
from scripted import ScriptedClient
from serving import read_all, serving

from live import eventually

LIMIT = 4096


@pytest.fixture(scope="module")
def server(text: Any):
    options = {"max_header_bytes": LIMIT, "header_timeout_s": 0.5}
    with serving(ScriptedClient([700]), text, **options) as running:
        yield running


def check_refusal(answer: bytes, status: int, code: str) -> str:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"content-type: application/json" in head
    assert b"connection: close" in head
    assert f"content-length: {len(body)}".encode() in head
    assert re.search(rb"\r\nx-request-id: [0-9a-f]{32}\r\n", head)
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["type"]) == (code, "invalid_request_error")
    return str(error["message"])


GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
LAST = GET + b"Connection: close\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
FILL = b"x" * (3 * LIMIT)


@pytest.mark.parametrize(
    "parts",
    [
        (GET + b"Long: " + FILL,),
        (GET + b"Long: ", *[b"x" * 100] * 200),
        (GET, *[b"A: b\r\n"] * 2000),
        (b"GET /" + FILL,),
        (b"G" * 1, b"ET /?", FILL, b" HTTP/1.1\r\n\r\n"),
        (b"\r\n" * (2 * LIMIT),),
        (GET + b"\r\n" + GET + b"Long: " + FILL,),  # the second of a connection
        (CHUNKED + b"0\r\nTrailer: " + FILL,),
        (CHUNKED + b"1;" + FILL,),
    ],
    ids=["value", "pieces", "many", "url", "query", "empty", "second", "trailer", "extension"],
)
def test_long_headers_are_refused(server, parts):
    answer = server.talk(*parts)
    check_refusal(answer[answer.rindex(b"HTTP/1.1") :], 431, "headers_too_large")
    with server.http() as http:
        assert http.get("/health").status_code == 200


def test_headers_within_the_limit_and_long_bodies_pass(server):
    with server.http() as http:
        for _ in range(3):  # on one connection
            assert http.get("/health", headers={"long": "x" * (LIMIT - 500)}).status_code == 200
            body = json.dumps({"model": "builtin", "prompt": "x"}).ljust(50 * LIMIT).encode()
            assert http.post("/v1/completions", content=body).status_code == 200
            pieces = (body[i : i + 100] for i in range(0, len(body), 100))
            assert http.post("/v1/completions", content=pieces).status_code == 200


def test_many_requests_sent_at_once_pass(server):
    answer = server.talk((GET + b"\r\n") * 300 + LAST)
    assert answer.count(b"HTTP/1.1 200 OK") == 301


@pytest.mark.parametrize("start", [b"", b"GET /health HT", GET, GET + b"\r\n" + b"\r\n"])
def test_headers_that_do_not_come_end_the_connection(server, start):
    with server.connect() as raw:
        raw.sendall(start)
        if start.endswith(b"\r\n\r\n"):  # a partial second request after an answered one
            assert raw.recv(4096).startswith(b"HTTP/1.1 200")
            raw.sendall(b"GET")
            read_all(raw)
        else:
            assert read_all(raw) == b""


def test_a_slow_answer_outlives_the_time_for_headers(text):
    """Also if something of a next request has come already."""
    body = json.dumps({"model": "builtin", "prompt": "x"}).encode()
    head = POST + f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with serving(ScriptedClient(), text, header_timeout_s=0.1) as running, running.connect() as raw:
        raw.sendall(head + body)
        request = running.client.submitted.get(timeout=10)
        raw.sendall(b"\r\n")
        raw.settimeout(0.5)
        with pytest.raises(TimeoutError):
            raw.recv(1)
        raw.settimeout(30)
        running.client.send(request, 700, finish="stop")
        assert read_all(raw).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"hello\r\n\r\n", "method"),
        (b"GET /health\xff HTTP/1.1\r\n\r\n", "url"),
        (b"GET / HTTP/9.9\r\n\r\n", "HTTP version"),
        (GET + b"no colon\r\n\r\n", "header token"),
        (POST + b"Content-Length: x\r\n\r\n", "Content-Length"),
        (CHUNKED + b"zz\r\n", "chunk size"),
        (b"\x16\x03\x01\x02\x00\x01\x00", "method"),
        (b"GET /health HTTP/1.1\r\n\r\n", "one Host header"),
        (GET + b"Host: y\r\n\r\n", "one Host header"),
    ],
)
def test_malformed_http_is_refused_in_openai_s_form(server, data, reason):
    assert reason in check_refusal(server.talk(data), 400, "invalid_http")


def test_old_http_needs_no_host(server):
    assert server.talk(b"GET /health HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200")


STREAM = json.dumps({"model": "builtin", "prompt": "x", "stream": True}).encode()
ASK = POST + f"Content-Length: {len(STREAM)}\r\n\r\n".encode() + STREAM
BROKEN = CHUNKED + b"zz\r\n"


def answers_of(data: bytes) -> list[tuple[int, bytes]]:
    """Status and body of every answer in what a connection has sent; nothing may be left."""
    found = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        status = int(re.fullmatch(rb"HTTP/1.1 (\d+) .*", head.splitlines()[0])[1])
        length = re.search(rb"content-length: (\d+)", head)
        body = b""
        if length:
            body, data = data[: int(length[1])], data[int(length[1]) :]
        else:
            while size := int(data[: data.index(b"\r\n")], 16):
                start = data.index(b"\r\n") + 2
                body, data = body + data[start : start + size], data[start + size + 2 :]
            data = data.removeprefix(b"0\r\n\r\n")
        found.append((status, body))
    return found


@pytest.mark.parametrize("begun", [True, False], ids=["begun", "waiting"])
@pytest.mark.parametrize(
    ("behind", "statuses"),
    [
        (b"rubbish\r\n\r\n", [400]),
        (GET + b"\r\nrubbish\r\n\r\n", [200, 400]),
        (GET + b"\r\n" + GET + b"\r\n" + BROKEN, [200, 200, 400]),
        (BROKEN, [400]),
        (GET + b"Long: " + b"x" * 70_000, [431]),
    ],
    ids=["rubbish", "get", "gets", "body", "long"],
)
def test_a_refusal_waits_for_the_answers_before_it(text, begun, behind, statuses):
    """A client could not tell it from a part of the answer that is being written."""
    with serving(ScriptedClient(), text) as running, running.connect() as raw:
        raw.sendall(ASK)
        request = running.client.submitted.get(timeout=10)
        said = b""
        if begun:
            running.client.send(request, 700)
            said = raw.recv(65536)
        raw.sendall(behind)
        connection = next(iter(running.server.server_state.connections))
        eventually(lambda: connection._refused is not None or connection.flow.held)
        running.client.send(request, 701, finish="stop")
        answers = answers_of(said + read_all(raw))
        assert [status for status, _ in answers] == [200, *statuses]
        assert answers[0][1].endswith(b"data: [DONE]\n\n")


def test_who_leaves_while_a_refusal_waits_is_noticed(text):
    with serving(ScriptedClient(), text) as running, running.connect() as raw:
        raw.sendall(ASK)
        first = running.client.submitted.get(timeout=10)
        raw.sendall(b"rubbish\r\n\r\n")
        raw.close()
        assert running.client.cancelled.get(timeout=10)[0] == first.id


def test_who_leaves_while_a_request_waits_is_noticed(text):
    """By writing, as nothing is read then."""
    with serving(ScriptedClient(), text) as running, running.connect() as raw:
        raw.sendall(ASK)
        first = running.client.submitted.get(timeout=10)
        raw.sendall(GET + b"\r\n")
        connection = next(iter(running.server.server_state.connections))
        eventually(lambda: connection.flow.held)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raw.close()

        def cancelled() -> bool:
            running.client.send(first, 700)
            return not running.client.cancelled.empty()

        eventually(cancelled)
        assert running.client.cancelled.get()[0] == first.id


# -- requests that wait for the answers before theirs -------------------------------------------


def test_requests_that_wait_are_bounded(text):
    """Whatever is sent behind a request that is being answered."""
    with serving(ScriptedClient(), text) as running, running.connect() as raw:
        raw.sendall(ASK)
        request = running.client.submitted.get(timeout=10)
        connection = next(iter(running.server.server_state.connections))
        raw.settimeout(0.2)
        sent, tiny = 0, b"GET / HTTP/1.1\r\nHost:\r\n\r\n"
        with contextlib.suppress(TimeoutError):
            while sent < 64 * 2**20:
                sent += raw.send(tiny * 10_000)
        assert sent < 64 * 2**20  # the server reads no more
        assert 1 <= len(connection.pipeline) <= 1024 // len(tiny) + 1
        assert len(connection._unparsed) <= 2**20
        with running.http() as http:
            assert http.get("/health").status_code == 200
        running.client.send(request, 700, finish="stop")
        raw.settimeout(30)
        assert raw.recv(65536).startswith(b"HTTP/1.1 200")


def test_a_flood_of_requests_on_one_connection_takes_little_memory(text):
    """One socket that repeats a request and hardly reads."""
    with serving(ScriptedClient([700]), text) as running, running.connect() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.settimeout(1.0)
        most, sent = 0, 0
        connections = running.server.server_state.connections
        with contextlib.suppress(TimeoutError):
            while sent < 16 * 2**20:
                sent += raw.send((GET + b"\r\n") * 2000)
                raw.recv(100)
                most = max(most, *(len(one.pipeline) for one in list(connections)))
        assert most <= 1024 // len(GET) + 1
        with running.http() as http:
            for _ in range(20):
                assert http.get("/health").status_code == 200


def test_requests_that_wait_for_an_unread_body_do_not_hang(text):
    """Bodies that are read piece by piece, behind others, and a half request at the end."""
    body = json.dumps({"model": "builtin", "prompt": "x" * 200}).ljust(300_000).encode()
    ask = POST + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
    with serving(ScriptedClient([700]), text) as running:
        answers = answers_of(running.talk(ask + GET + b"\r\n" + ask + ask + LAST))
        assert [status for status, _ in answers] == [200] * 5


def test_an_upgrade_that_is_asked_for_is_ignored(server):
    upgrade = GET + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    answers = answers_of(server.talk((upgrade + b"\r\n") * 3 + LAST))
    assert [status for status, _ in answers] == [200] * 4
    with_body = POST + b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 3\r\n\r\n"
    message = check_refusal(server.talk(with_body + GET[:3]), 400, "invalid_http")
    assert "Upgrade" in message
