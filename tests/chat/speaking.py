"""A server of OpenAI's API that says what a test has it say, and keeps what it was asked."""

from __future__ import annotations

import contextlib
import json
import queue
import select
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

from fakeserver import FakeServer, Handler

DROP = object()  # the connection breaks
UNTIL_LEFT = object()  # wait until the client leaves
Step = Any


@dataclass
class Refusal:
    """An answer with an error."""

    status: int
    message: str
    code: str = ""
    headers: dict[str, str] = field(default_factory=dict)


def thought(text: str) -> dict[str, Any]:
    return {"reasoning_content": text}


class Speaker(Handler):
    """Answers with the next script: texts, deltas, events to wait for, what breaks."""

    server: SpeakingServer

    def do_GET(self) -> None:  # noqa: N802 - http.server's name
        if self.path == "/server_info" and self.server.info is not None:
            self._json(200, self.server.info)
        elif self.path == "/v1/models":
            self.server.tells.wait(30)
            super().do_GET()
        else:
            self._json(404, {"error": {"message": "no such page"}})

    def do_POST(self) -> None:  # noqa: N802
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        steps = self.server.script.get(timeout=30)
        if steps and isinstance(steps[0], Refusal):
            self._refuse(steps[0])
            return
        self._begin()
        for step in steps:
            if step is DROP:
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
                return
            if step is UNTIL_LEFT:
                self._until_left()
                return
            if isinstance(step, threading.Event):
                step.wait(30)
            elif isinstance(step, bytes):
                self._chunk(step)
            else:
                delta = {"content": step} if isinstance(step, str) else step
                self._event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": self.server.finish}]})
        self._event({"choices": [], "usage": {"completion_tokens": len(steps)}})
        self._event("[DONE]")
        self._chunk(b"")

    def _until_left(self) -> None:
        select.select([self.connection], [], [], 30)
        with contextlib.suppress(OSError):
            if not self.connection.recv(1):
                self.server.left.set()
        self.close_connection = True

    def _refuse(self, refusal: Refusal) -> None:
        error = {"message": refusal.message, "code": refusal.code}
        data = json.dumps({"error": error}).encode()
        self.send_response(refusal.status)
        for name, value in {**refusal.headers, "content-length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


class SpeakingServer(FakeServer):
    """``script`` has the steps of each answer, ``bodies`` what was asked."""

    def __init__(self, models: list[str]) -> None:
        super().__init__(models)
        self.RequestHandlerClass = Speaker
        self.script: queue.Queue[list[Step]] = queue.Queue()
        self.left = threading.Event()
        self.tells = threading.Event()  # what models there are
        self.tells.set()
        self.finish = "stop"
        self.info: dict[str, Any] | None = None

    def says(self, *steps: Step) -> None:
        self.script.put(list(steps))

    @property
    def asked(self) -> list[tuple[str, str]]:
        """Roles and contents of the last request."""
        return [(m["role"], m["content"]) for m in self.bodies[-1]["messages"]]


@contextlib.contextmanager
def speaking(*models: str) -> Iterator[SpeakingServer]:
    """Serve until the block ends."""
    with SpeakingServer(list(models) or ["one"]) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
