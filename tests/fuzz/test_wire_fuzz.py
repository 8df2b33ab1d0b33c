"""Mutated HTTP requests on bare sockets to a real server: refused or dropped, never an upset."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from depth import searching
from live import Server, serving

BODY = b'{"model":"builtin","prompt":"x","max_tokens":1}'
REQUESTS = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY),
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY),
    b"GET /v1/models/builtin HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer a\r\n\r\n",
    b"OPTIONS * HTTP/1.0\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
)
PIECES = (
    b"\r\n", b"\n", b"\r", b" ", b":", b"\x00", b"\xff" * 20, b"Content-Length: 9999999999999\r\n",
    b"Content-Length: -1\r\n", b"Transfer-Encoding: chunked\r\n", b"Expect: 100-continue\r\n",
    b"X-A: " + b"a" * 5000 + b"\r\n", b"/../" * 50, b"%00%2e%2e%2f", b"HTTP/2.0", b"PRI * HTTP/2.0",
    b"ffffffffffffffff\r\n", b"0\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"X-Request-Id: \xc3\xbc\r\n",
)  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("wire"), "--header-timeout-s", "5") as running:
        yield running


@st.composite
def broken_requests(draw) -> bytes:
    data = draw(st.sampled_from(REQUESTS))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        upto = draw(st.integers(at, min(len(data), at + 30)))
        piece = draw(st.sampled_from(PIECES) | st.binary(max_size=6))
        data = data[:at] + piece + data[draw(st.sampled_from((at, upto))) :]
    return data


def talk(server: Server, data: bytes) -> bytes:
    """Send, and return what comes until the server closes or has nothing to say for a moment."""
    host, port = server.url.removeprefix("http://").split(":")
    answer = b""
    with socket.create_connection((host, int(port)), timeout=30) as raw:
        try:
            raw.sendall(data)
            raw.settimeout(0.1)
            while part := raw.recv(65536):
                answer += part
        except (ConnectionError, TimeoutError):
            pass
    return answer


@pytest.mark.deeper
def test_whatever_comes_the_server_answers_the_next(server):
    @searching(150, suppress_health_check=list(HealthCheck))
    @given(data=broken_requests())
    def one(data: bytes) -> None:
        answer = talk(server, data)
        assert not answer or answer.startswith(b"HTTP/1.1 ")
        assert b"HTTP/1.1 5" not in answer
        assert b"Traceback" not in answer

    one()
    body = {"model": "builtin", "prompt": "x", "max_tokens": 1}
    assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
    assert "Traceback" not in server.errors.read_text()
