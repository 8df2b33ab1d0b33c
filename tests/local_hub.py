"""A small hub for tests: the few endpoints that a download by the hub's own library needs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MAIN, OTHER = "a" * 40, "b" * 40  # commits of every repository
TOKEN = "hf_good"  # without it owner/gated is not to be had


@dataclass
class Hub:
    """What the server has, by repository and name, and what it saw."""

    url: str
    files: Mapping[str, Mapping[str, bytes]]
    paths: list[str] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)


class Handler(BaseHTTPRequestHandler):
    """The few endpoints that a snapshot download needs."""

    hub: Hub

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, *, body: bool) -> None:
        path = self.path.split("?")[0]
        self.hub.paths.append(path)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        self.hub.tokens.add(token)
        if "owner/broken" in path:
            return self._send(500, b"{}", body)
        if "owner/gated" in path and token != TOKEN:
            return self._send(403, b"{}", body, {"X-Error-Code": "GatedRepo"})
        found = [files for name, files in self.hub.files.items() if name in path]
        if not found:
            return self._send(401, b"{}", body, {"X-Error-Code": "RepoNotFound"})
        return self._repository(path, found[0], body)

    def _repository(self, path: str, files: Mapping[str, bytes], body: bool) -> None:
        if path.startswith("/api/models/"):
            revision = path.split("/revision/")[-1] if "/revision/" in path else "main"
            commits = {"main": MAIN, "v2": OTHER, MAIN: MAIN, OTHER: OTHER}
            if "/tree/" in path:
                return self._send(200, json.dumps([_entry(n, d) for n, d in files.items()]), body)
            if revision not in commits:
                return self._send(404, b"{}", body, {"X-Error-Code": "RevisionNotFound"})
            siblings = [{"rfilename": name} for name in files]
            info = {"id": "owner/open", "sha": commits[revision], "siblings": siblings}
            return self._send(200, json.dumps(info), body)
        commit, name = path.split("/resolve/")[1].split("/", 1)
        data = files[name]
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": commit}
        return self._send(200, data, body, headers)

    def _send(
        self, status: int, data: bytes | str, body: bool, headers: dict[str, str] | None = None
    ) -> None:
        data = data.encode() if isinstance(data, str) else data
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


def _entry(name: str, data: bytes) -> dict[str, object]:
    """A file as the hub lists it."""
    return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}


@contextlib.contextmanager
def serving_hub(files: Mapping[str, Mapping[str, bytes]]) -> Iterator[Hub]:
    """Serve repositories until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Handler.hub = Hub(f"http://127.0.0.1:{server.server_address[1]}", files)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield Handler.hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
