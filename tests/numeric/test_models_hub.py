"""Finding a model: the real hub library against a small local server, and every way to fail."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from weft.core.errors import ModelNotFoundError
from weft.models.hub import resolve_model

FILES = {
    "config.json": b'{"model_type": "llama"}',
    "generation_config.json": b"{}",
    "model.safetensors": b"weights",
    "consolidated.safetensors": b"the same in another form",
    "pytorch_model.bin": b"pickle",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "README.md": b"# model",
    "onnx/config.json": b"{}",
}
MAIN, OTHER = "a" * 40, "b" * 40
TOKEN = "hf_good"


@dataclass
class Hub:
    """What the server saw."""

    url: str
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
        if not any(name in path for name in ("owner/open", "owner/gated", "owner/bare")):
            return self._send(401, b"{}", body, {"X-Error-Code": "RepoNotFound"})
        return self._repository(path, body)

    def _repository(self, path: str, body: bool) -> None:
        files = {"README.md": b"# bare"} if "owner/bare" in path else FILES
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
    return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}


@pytest.fixture
def hub(monkeypatch) -> Iterator[Hub]:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Handler.hub = Hub(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield Handler.hub
    server.shutdown()
    server.server_close()
    thread.join()


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_download_takes_what_is_needed(hub, tmp_path) -> None:
    folder = resolve_model("owner/open", cache_dir=tmp_path, endpoint=hub.url)
    assert names(folder) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    }
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_revision(hub, tmp_path) -> None:
    folder = resolve_model("owner/open", "v2", cache_dir=tmp_path, endpoint=hub.url)
    assert folder.name == OTHER
    with pytest.raises(ModelNotFoundError, match="no revision 'v9'"):
        resolve_model("owner/open", "v9", cache_dir=tmp_path, endpoint=hub.url)


def test_token(hub, tmp_path, monkeypatch) -> None:
    with pytest.raises(ModelNotFoundError, match=r"gated.*HF_TOKEN"):
        resolve_model("owner/gated", cache_dir=tmp_path, endpoint=hub.url)
    folder = resolve_model("owner/gated", token=TOKEN, cache_dir=tmp_path / "a", endpoint=hub.url)
    assert "config.json" in names(folder)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    folder = resolve_model("owner/gated", cache_dir=tmp_path / "b", endpoint=hub.url)
    assert "config.json" in names(folder)
    assert hub.tokens == {None, TOKEN}


def test_offline_uses_the_cache_and_nothing_else(hub, tmp_path) -> None:
    with pytest.raises(ModelNotFoundError, match="offline mode is on"):
        resolve_model("owner/open", cache_dir=tmp_path, offline=True, endpoint=hub.url)
    assert hub.paths == []
    online = resolve_model("owner/open", cache_dir=tmp_path, endpoint=hub.url)
    hub.paths.clear()
    assert resolve_model("owner/open", cache_dir=tmp_path, offline=True) == online
    assert hub.paths == []


def test_hub_offline_setting(hub, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match="offline mode is on"):
        resolve_model("owner/open", cache_dir=tmp_path, endpoint=hub.url)
    assert hub.paths == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("owner/absent", "not on the hub, or is private; check the name, or set HF_TOKEN"),
        ("owner/bare", "has no config.json"),
        ("owner/broken", "cannot be reached"),
        ("not a name!", "neither a folder nor a hub id"),
    ],
)
def test_hub_answers_that_are_errors(hub, tmp_path, name, words) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model(name, cache_dir=tmp_path, endpoint=hub.url)
    assert words in caught.value.message
    assert name in caught.value.message
    assert "\n" not in caught.value.message


def test_unreachable_hub(tmp_path) -> None:
    with pytest.raises(ModelNotFoundError, match="the hub cannot be reached"):
        resolve_model("owner/open", cache_dir=tmp_path, endpoint="http://127.0.0.1:9")


@pytest.mark.parametrize("name", ["./absent", "/absent/model", "~/absent", "a/b/c", "../absent"])
def test_paths_are_never_sent_to_the_hub(hub, tmp_path, monkeypatch, name) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match="does not exist"):
        resolve_model(name, cache_dir=tmp_path, endpoint=hub.url)
    assert hub.paths == []


def test_folders(hub, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "open").mkdir(parents=True)
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        resolve_model("owner/open", endpoint=hub.url)
    config = tmp_path / "owner" / "open" / "config.json"
    config.write_text("{}")
    assert resolve_model("owner/open", endpoint=hub.url) == Path("owner/open")
    with pytest.raises(ModelNotFoundError, match="is a file"):
        resolve_model(str(config))
    assert hub.paths == []


def test_builtin_needs_no_network() -> None:
    folder = resolve_model("builtin", offline=True)
    assert (folder / "config.json").is_file()
    assert folder.parent.name == "weft"
