"""Real servers on loopback ports, before a real engine or one whose every step a test decides."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from live import eventually
from weft.core.ports import EngineClient
from weft.server.app import create_app
from weft.server.listen import address_of, listen
from weft.server.main import DrainingServer
from weft.server.options import ServerOptions
from weft.server.probe import EngineProbe
from weft.server.quota_board import QuotaBoard
from weft.server.service import Service


@dataclass
class Running:
    """A server that answers on ``url``."""

    url: str
    service: Service
    server: DrainingServer
    thread: threading.Thread
    client: Any

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30, **options)

    def connect(self) -> socket.socket:
        """A bare connection."""
        host, port = self.url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=30)

    def ask(self, body: Any, path: str = "/v1/completions") -> socket.socket:
        """A bare connection with a request whose answer nobody reads."""
        data, raw = json.dumps(body).encode(), self.connect()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        raw.sendall(head.encode() + data)
        return raw

    def talk(self, *parts: bytes) -> bytes:
        """What a bare connection gets for these bytes, until the server closes it."""
        with self.connect() as raw:
            with contextlib.suppress(OSError):  # it has closed; what it said can be read still
                for part in parts:
                    raw.sendall(part)
            return read_all(raw)


def read_all(raw: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    answer = b""
    while part := raw.recv(65536):
        answer += part
    return answer


@contextlib.contextmanager
def serving(
    client: EngineClient,
    text: Any,
    probe: EngineProbe | None = None,
    *,
    checked: bool = True,
    quotas: QuotaBoard | None = None,
    **options: Any,
) -> Iterator[Running]:
    """Run a server on a thread; it is drained at the end.

    Args:
        checked: look at the files that the options name, as whoever starts a server does.
        quotas: what keys use, where several servers are planes of one.
    """
    chosen = ServerOptions(port=0, **options)
    sock = listen(chosen if checked else ServerOptions(port=0))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)  # so that slow readers are felt
    app = create_app(client, *text, chosen, probe=probe, quotas=quotas)
    listening = threading.Event()
    server = DrainingServer(app, chosen, lambda _: listening.set())
    url = address_of(sock)
    thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
    thread.start()
    assert listening.wait(20)
    try:
        yield Running(url, app.state.service, server, thread, client)
    finally:
        server.drain()
        thread.join(20)
    assert not thread.is_alive()


class Asking:
    """Reads a stream on a thread, so that the test can play the engine meanwhile."""

    def __init__(self, running: Any, body: dict[str, Any], path: str = "/v1/completions") -> None:
        self.events: list[str] = []
        self._running, self._body, self._path = running, body, path
        self._thread = threading.Thread(target=self._read, daemon=True)

    def _read(self) -> None:
        http = self._running.http()
        with http, http.stream("POST", self._path, json=self._body) as answer:
            for line in answer.iter_lines():
                if line:
                    self.events.append(line.removeprefix("data: "))

    def wait_for(self, count: int) -> None:
        eventually(lambda: len(self.events) >= count)

    def join(self) -> None:
        self._thread.join(10)
        assert not self._thread.is_alive()

    def __enter__(self) -> Asking:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.join()
