"""A server of OpenAI's API that answers as its model's name says, for tests of clients."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PER_WORD, EXTRA = 2, 7  # tokens of a prompt, as the fake tokeniser counts


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeServer

    def log_message(self, *_: Any) -> None:
        """Tests want a quiet output."""

    def do_GET(self) -> None:
        self._json(200, {"data": [{"id": name} for name in self.server.models]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        self.server.connections[self.client_address] += 1
        behaviour = body["model"].split(",")[
            len(self.server.bodies) % (body["model"].count(",") + 1)
        ]
        getattr(self, f"be_{behaviour}")(body)

    def be_good(self, body: dict[str, Any]) -> None:
        self._begin()
        for _ in range(body["max_tokens"]):
            self._event(chunk(body, "x"))
        self._event({"choices": [], "usage": usage(body)})
        self._event("[DONE]")
        self._chunk(b"")

    def be_short(self, body: dict[str, Any]) -> None:
        self.be_good({**body, "max_tokens": 1})

    def be_busy(self, _: dict[str, Any]) -> None:
        self._json(429, {"error": {"message": "come back later"}})

    def be_cut(self, body: dict[str, Any]) -> None:
        self._begin()
        self._event(chunk(body, "x"))
        self.close_connection = True

    def be_unfinished(self, body: dict[str, Any]) -> None:
        self._begin()
        self._event(chunk(body, "x"))
        self._chunk(b"")

    def be_failing(self, body: dict[str, Any]) -> None:
        self._begin()
        self._event(chunk(body, "x"))
        self._event({"error": {"message": "it broke", "code": "broken"}})
        self._event("[DONE]")
        self._chunk(b"")

    def be_silent(self, body: dict[str, Any]) -> None:
        self._begin()
        self._event(chunk(body, ""))
        self._event("[DONE]")
        self._chunk(b"")

    def be_hanging(self, _: dict[str, Any]) -> None:
        self.server.end.wait(30)
        self.close_connection = True

    def be_garbage(self, _: dict[str, Any]) -> None:
        self.wfile.write(b"what?\r\n\r\n")
        self.close_connection = True

    def be_unbounded(self, body: dict[str, Any]) -> None:
        """Neither a length nor chunks: the end of the connection ends the answer."""
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for event in (chunk(body, "x"), "[DONE]"):
            text = event if isinstance(event, str) else json.dumps(event)
            self.wfile.write(f"data: {text}\r\n\r\n".encode())
        self.close_connection = True

    def _begin(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()

    def _event(self, value: Any) -> None:
        text = value if isinstance(value, str) else json.dumps(value)
        self._chunk(f"data: {text}\n\n".encode())

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _json(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def chunk(body: dict[str, Any], text: str) -> dict[str, Any]:
    if "messages" in body:
        return {"choices": [{"index": 0, "delta": {"content": text}}]}
    return {"choices": [{"index": 0, "text": text}]}


def usage(body: dict[str, Any]) -> dict[str, int]:
    prompt = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
    count = len(prompt) if isinstance(prompt, list) else PER_WORD * len(prompt.split()) + EXTRA
    return {"prompt_tokens": count, "completion_tokens": body["max_tokens"]}


class FakeServer(ThreadingHTTPServer):
    """What it was asked is in ``bodies``, in the order of arrival."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, models: list[str]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.models = models
        self.bodies: list[dict[str, Any]] = []
        self.connections: Counter[Any] = Counter()
        self.end = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


@contextlib.contextmanager
def fake_server(*models: str) -> Iterator[FakeServer]:
    """Serve until the block ends; a model's name is a behaviour, or several in turns."""
    with FakeServer(list(models) or ["good"]) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.end.set()
            server.shutdown()
            thread.join()


# A server, and a child of it that is busy.
SERVER = """
import subprocess, sys
sys.path.insert(0, {folder!r})
from fakeserver import FakeServer
server = FakeServer(["good"])
busy = "import time\\nwhile True: sum(range(100000)); time.sleep(0.001)"
child = subprocess.Popen([sys.executable, "-c", busy])
print(server.server_address[1], child.pid, flush=True)
try:
    server.serve_forever()
finally:
    child.kill()
"""


@contextlib.contextmanager
def server_process() -> Iterator[tuple[int, int, int]]:
    """The port, the process and the child of a server that runs beside this process."""
    command = [sys.executable, "-c", SERVER.format(folder=str(Path(__file__).parent))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port, child = map(int, process.stdout.readline().split())
            yield port, process.pid, child
        finally:
            os.kill(child, 9)
            process.kill()
