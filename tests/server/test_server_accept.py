"""Connections from accept on: places for health checks, silent TLS clients, too few descriptors."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import ssl
import subprocess
import sys
from typing import Any

import httpx
import pytest
import trustme
from scripted import ScriptedClient
from serving import Running, read_all, serving

from live import eventually, free_port
from weft.server.places import num_reserved

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
READY = b"GET /ready?x HTTP/1.1\r\nHost: localhost\r\n\r\n"
MODELS = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
NUM = 3  # connections that the servers of these tests take


def say(raw: socket.socket, data: bytes) -> bytes:
    """What a client gets for its bytes, until the server closes; nothing if that is a reset."""
    with contextlib.suppress(OSError):
        raw.sendall(data)
        return read_all(raw)
    return b""


@contextlib.contextmanager
def silent(running: Running, count: int) -> Any:
    """Connections that say nothing."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(running.connect()) for _ in range(count)]


# -- places for health checks -------------------------------------------------------------------


def test_a_full_server_answers_health_checks_and_refuses_the_rest(text, caplog):
    with serving(ScriptedClient(), text, max_connections=NUM) as running, silent(running, NUM):
        for ask in (HEALTH, READY, HEALTH):
            with running.connect() as raw:
                answer = say(raw, ask + MODELS)
            assert answer.startswith(b"HTTP/1.1 200 OK")
            assert answer.count(b"HTTP/1.1") == 1  # one answer, whatever follows
            assert b"\r\nconnection: close\r\n" in answer
        for parts in ((MODELS,), (POST, b"123456789"), (b"rubbish\r\n\r\n",)):
            answer = running.talk(*parts)
            assert answer.startswith(b"HTTP/1.1 400" if parts[0][0:1] == b"r" else b"HTTP/1.1 503")
            assert answer.count(b"HTTP/1.1") == 1
        assert b"\r\nretry-after: 1\r\n" in running.talk(MODELS)
    lines = [line for line in caplog.messages if "max_connections" in line]
    assert lines == [
        f"All {NUM} connections (max_connections) are taken; others get 503, "
        "but for health checks. Others: 1."
    ]


def test_silent_connections_do_not_keep_a_health_check_out(text):
    """Beyond the limit, too: the oldest goes."""
    most = NUM + num_reserved(NUM)
    with serving(ScriptedClient(), text, max_connections=NUM) as running:
        with silent(running, 10 * most) as raws:
            eventually(lambda: running.server.num_connections == most)
            for _ in range(3):
                assert running.talk(HEALTH).startswith(b"HTTP/1.1 200")
            assert raws[NUM].recv(1) == b""  # closed; the first ones are not
            eventually(lambda: len(running.server.server_state.connections) <= most)
        eventually(lambda: not running.server.num_connections)
        with running.http() as http:
            assert http.get("/v1/models").status_code == 200


def test_a_silent_connection_beyond_the_limit_is_refused_after_a_while(text):
    options: dict[str, Any] = {"max_connections": NUM, "header_timeout_s": 0.3}
    with serving(ScriptedClient(), text, **options) as running:
        stays = [running.ask({"model": "builtin", "prompt": "x"}) for _ in range(NUM)]
        requests = [running.client.submitted.get(timeout=10) for _ in stays]
        with running.connect() as raw:
            answer = read_all(raw)
        assert answer.startswith(b"HTTP/1.1 503")
        assert b'"code":"busy"' in answer
        for request in requests:
            running.client.send(request, 700, finish="stop")
        for raw in stays:
            assert raw.recv(100).startswith(b"HTTP/1.1 200")
            raw.close()


# -- TLS ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tls(tmp_path_factory) -> tuple[ssl.SSLContext, dict[str, Any]]:
    """What trusts a server, and the server's options."""
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "localhost")
    cert, key = folder / "cert.pem", folder / "key.pem"
    cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    key.write_bytes(issued.private_key_pem.bytes())
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    return trusting, {"tls_cert": str(cert), "tls_key": str(key)}


def healthy(running: Running, trusting: ssl.SSLContext) -> bool:
    url = running.url.replace("http://", "https://")
    return httpx.get(f"{url}/health", verify=trusting, timeout=30).status_code == 200


def test_connections_count_before_their_tls_handshake(text, tls):
    trusting, files = tls
    most = NUM + num_reserved(NUM)
    with serving(ScriptedClient(), text, max_connections=NUM, **files) as running:
        with silent(running, 10 * most) as raws:
            eventually(lambda: running.server.num_connections == most)
            assert healthy(running, trusting)
            for raw in raws[NUM : NUM + most]:
                assert raw.recv(1) == b""
        eventually(lambda: not running.server.num_connections)
        assert healthy(running, trusting)


def test_a_tls_handshake_has_the_time_for_headers(text, tls, caplog):
    trusting, files = tls
    begun = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"  # of a client's first message
    with serving(ScriptedClient(), text, header_timeout_s=0.4, **files) as running:
        with silent(running, 4) as raws:
            raws[0].sendall(begun)
            for raw in raws:
                assert raw.recv(1) == b""  # closed without an answer
        eventually(lambda: not running.server.num_connections)
        with running.connect() as raw, trusting.wrap_socket(raw, server_hostname="localhost") as up:
            assert read_all(up) == b""  # a handshake, and no request
        eventually(lambda: not running.server.num_connections)
        assert healthy(running, trusting)
    handshake, headers = caplog.messages
    assert handshake == "Connections closed because the TLS handshake took too long: 1."
    assert headers == "Connections closed because no complete headers came in time: 1."


def test_what_is_no_tls_does_not_stay(text, tls):
    with serving(ScriptedClient(), text, **tls[1]) as running:
        for _ in range(3):
            with running.connect() as raw:
                assert not say(raw, HEALTH).startswith(b"HTTP/1.1 200")
        with running.connect():
            pass  # left at once
        eventually(lambda: not running.server.num_connections)


def test_silent_clients_do_not_hold_up_the_end(text, tls):
    with contextlib.ExitStack() as stack:
        with serving(ScriptedClient(), text, max_connections=NUM, **tls[1]) as running:
            raws = stack.enter_context(silent(running, 2 * NUM))
            eventually(lambda: running.server.num_connections > NUM)
        assert all(say(raw, b"") == b"" for raw in raws)


# -- descriptors --------------------------------------------------------------------------------


@contextlib.contextmanager
def few_files(spare: int) -> Any:
    """Let this process open so many more files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    free = [number for number in range(4096) if number not in used]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[spare], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_without_descriptors_connections_wait_and_the_log_says_so(text, caplog):
    ask = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with serving(ScriptedClient(), text) as running, contextlib.ExitStack() as stack:
        host, port = running.url.removeprefix("http://").split(":")
        raws = [stack.enter_context(socket.socket()) for _ in range(12)]
        with few_files(4):
            for raw in raws:
                raw.settimeout(30)
                raw.connect((host, int(port)))
            eventually(lambda: "Too many open files" in caplog.text)
        for raw in raws:
            assert say(raw, ask).startswith(b"HTTP/1.1 200")
    assert len(caplog.messages) == 1


LIMITED = """
import resource, logging
from weft.core.process import raise_file_limit
from weft.server.options import ServerOptions
from weft.server.places import fit_file_limit
logging.basicConfig(format="%(message)s")
for files in (4192, 4191, 1024, 100, 24):
    resource.setrlimit(resource.RLIMIT_NOFILE, (files // 2, files))
    raise_file_limit()
    taken = fit_file_limit(ServerOptions()).max_connections
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], taken)
"""


def test_a_file_limit_below_the_connections_is_said():
    done = subprocess.run(
        [sys.executable, "-c", LIMITED], check=True, capture_output=True, text=True
    )
    chosen = [(4192, 4096), (4191, 4095), (1024, 928), (100, 61), (24, 1)]
    assert done.stdout.splitlines() == [f"{files} {taken}" for files, taken in chosen]
    assert done.stderr.splitlines() == [
        f"A process may open {files} files here (ulimit -Hn), so a request plane takes "
        f"{taken} connections at once, not 4096 (max_connections)."
        for files, taken in chosen[1:]
    ]


def test_the_command_says_it_at_its_start():
    """Before the model is loaded, and with the number that its request planes keep to."""
    command = f"ulimit -n 100; exec {sys.executable} -m weft.cli serve --port {free_port()}"
    with subprocess.Popen(["sh", "-c", command], stderr=subprocess.PIPE, text=True) as process:
        line = process.stderr.readline()
        process.terminate()
        process.wait(60)
    assert "A process may open 100 files here" in line
    assert "takes 61 connections" in line
