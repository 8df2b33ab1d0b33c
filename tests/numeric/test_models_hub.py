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
from weft.models.hub import choose_gguf, resolve_model

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
GGUF = {
    "config.json": b"{}",
    "README.md": b"# quantised",
    "m-Q8_0.gguf": b"eight",
    "m-Q4_K_M.gguf": b"four",
    "m-UD-Q2_K_XL.gguf": b"two",
    "mmproj-m-F16.gguf": b"vision",
    "Q6_K/m-Q6_K-00001-of-00002.gguf": b"six",
    "Q6_K/m-Q6_K-00002-of-00002.gguf": b"six again",
}
MAIN, OTHER = "a" * 40, "b" * 40
TOKEN = "hf_good"
KNOWN = ("owner/open", "owner/gated", "owner/bare", "owner/gguf")


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
        if not any(name in path for name in KNOWN):
            return self._send(401, b"{}", body, {"X-Error-Code": "RepoNotFound"})
        return self._repository(path, body)

    def _repository(self, path: str, body: bool) -> None:
        files = {"README.md": b"# bare"} if "owner/bare" in path else FILES
        files = GGUF if "owner/gguf" in path else files
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


@pytest.mark.parametrize(
    ("asked", "file"),
    [
        ("owner/gguf", "m-Q4_K_M.gguf"),
        ("owner/gguf:q8_0", "m-Q8_0.gguf"),
        ("owner/gguf:Q6_K", "Q6_K/m-Q6_K-00001-of-00002.gguf"),
        ("owner/gguf:m-UD-Q2_K_XL.gguf", "m-UD-Q2_K_XL.gguf"),
    ],
)
def test_a_gguf_file_is_chosen_by_its_type(hub, tmp_path, asked, file) -> None:
    found = resolve_model(asked, cache_dir=tmp_path, endpoint=hub.url)
    assert found.is_file()
    assert found.as_posix().endswith(f"/{file}")
    fetched = {
        path.split("/resolve/")[1].split("/", 1)[1] for path in hub.paths if "/resolve/" in path
    }
    parts = {file, file.replace("00001-of", "00002-of")}
    assert fetched - {"config.json"} == parts
    before = len(hub.paths)
    again = resolve_model(asked, cache_dir=tmp_path, endpoint=hub.url, offline=True)
    assert again == found
    assert len(hub.paths) == before


def test_a_type_that_is_not_there_is_refused_with_those_that_are(hub, tmp_path) -> None:
    words = r"no GGUF file of the type 'Q5_K_M'; its files: m-Q4_K_M\.gguf, m-Q6_K-00001-of"
    with pytest.raises(ModelNotFoundError, match=words):
        resolve_model("owner/gguf:Q5_K_M", cache_dir=tmp_path, endpoint=hub.url)
    with pytest.raises(ModelNotFoundError, match="'owner/none:Q4_0' is not on the hub"):
        resolve_model("owner/none:Q4_0", cache_dir=tmp_path, endpoint=hub.url)


def test_without_the_usual_type_the_first_file_counts() -> None:
    assert choose_gguf(["b-Q8_0.gguf", "a-F16.gguf"], None) == ["a-F16.gguf"]
    assert choose_gguf(["a-IQ4_XS.gguf"], "XS") is None
    assert choose_gguf([], None) is None
