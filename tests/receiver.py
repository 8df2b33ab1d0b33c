"""A real HTTP server that webhooks are sent to."""

from __future__ import annotations

import contextlib
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Receiver:
    """What came, and what is answered.

    Attributes:
        got: the path, the headers and the body of each request.
        react: writes the answer to the n-th request.
    """

    react: Callable[[BaseHTTPRequestHandler, int], None]
    got: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    port: int = 0

    def take(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("content-length", 0)))
        headers = {name.lower(): value for name, value in handler.headers.items()}
        self.got.append((handler.path, headers, body))
        with contextlib.suppress(OSError):
            self.react(handler, len(self.got))


def status(number: int, **headers: str) -> Callable[[BaseHTTPRequestHandler, int], None]:
    """Answer every request with a status."""

    def react(handler: BaseHTTPRequestHandler, _: int) -> None:
        handler.send_response(number)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("content-length", "0")
        handler.end_headers()

    return react


@contextlib.contextmanager
def receiving(react: Any = None, context: ssl.SSLContext | None = None) -> Iterator[Receiver]:
    """Run a receiver on a loopback port; with a context it speaks HTTPS."""
    receiver = Receiver(react or status(204))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            receiver.take(self)

        do_GET = do_POST  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            pass  # those who refuse our certificate

    server = Quiet(("127.0.0.1", 0), Handler)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    receiver.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
