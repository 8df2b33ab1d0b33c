"""The page at ``/`` over HTTP: its files, headers and keys, and that it needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted import ScriptedClient
from serving import serving

from weft.server.front_page import FOLDER, page_files, page_paths

ROOT = Path(__file__).parents[2]
BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
VENDOR = FOLDER / "vendor"
NAMES = sorted(page_files())
OWN = [name for name in NAMES if not name.startswith("vendor/")]


@pytest.fixture(scope="module")
def running(text: Any) -> Any:
    with serving(ScriptedClient(), text) as running:
        yield running


def rules_of(answer: httpx.Response) -> dict[str, list[str]]:
    """The rules of a content security policy."""
    parts = answer.headers["content-security-policy"].split("; ")
    return {name: values for name, *values in map(str.split, parts)}


class Links(html.parser.HTMLParser):
    """What a page loads, and what would be a script or style in its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.inline: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.loaded += [value for name, value in attrs if name in ("src", "href") and value]
        if tag == "style" or (tag == "script" and "src" not in given):
            self.inline.append(given.get("type") or tag)
        self.inline += [name for name in given if name == "style" or name.startswith("on")]


# -- what is answered ---------------------------------------------------------------------------


def test_browsers_get_the_page_and_probes_a_line(running):
    with running.http() as http:
        page, probe = http.get("/", headers=BROWSER), http.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "<!doctype html>" in page.text
    assert probe.text == "weft is running"  # what clients of Ollama's API ask for first
    assert page.headers["vary"] == probe.headers["vary"] == "Accept"


def test_ui_leads_to_the_page(running):
    with running.http() as http:
        answer = http.get("/ui", headers=BROWSER)
    assert (answer.status_code, answer.headers["location"]) == (308, "./")


@pytest.mark.parametrize("name", ["index.html", "js/main.js", "css/base.css", "icon.svg"])
def test_a_file_has_headers_and_a_head_and_is_sent_once(running, name):
    with running.http() as http:
        whole = http.get(f"/page/{name}")
        head = http.head(f"/page/{name}")
        again = http.get(f"/page/{name}", headers={"if-none-match": whole.headers["etag"]})
        weak = http.get(
            f"/page/{name}", headers={"if-none-match": f'"x", W/{whole.headers["etag"]}'}
        )
        other = http.get(f"/page/{name}", headers={"if-none-match": '"other"'})
    assert whole.content == (FOLDER / name).read_bytes()
    assert (head.status_code, head.content) == (200, b"")
    for field in ("content-type", "content-length", "etag", "content-security-policy"):
        assert head.headers[field] == whole.headers[field]
    assert (again.status_code, again.content) == (weak.status_code, weak.content) == (304, b"")
    assert again.headers["etag"] == whole.headers["etag"]
    assert other.status_code == 200
    assert whole.headers["cache-control"] == "no-cache"
    assert whole.headers["x-content-type-options"] == "nosniff"
    assert whole.headers["referrer-policy"] == "no-referrer"


def test_scripts_have_the_type_that_browsers_demand(running):
    with running.http() as http:
        for name in NAMES:
            if name.endswith(".js"):
                kind = http.get(f"/page/{name}").headers["content-type"]
                assert kind == "text/javascript; charset=utf-8", name


@pytest.mark.parametrize(
    "path",
    ["/page/", "/page/js", "/page/none.js", "/page/../app.py", "/page/%2e%2e/app.py",
     "/page/js/../../app.py", "/page//etc/passwd", "/page/js%2fmain.js%00"],
)  # fmt: skip
def test_nothing_else_is_served(running, path):
    with running.connect() as raw:
        raw.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        assert raw.recv(64).startswith(b"HTTP/1.1 404")


def test_the_policy_lets_in_nothing_from_elsewhere(running):
    with running.http() as http:
        answer = http.get("/", headers=BROWSER)
    rules = rules_of(answer)
    inline = re.findall(r'<script type="importmap">(.*?)</script>', answer.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(inline[0].encode()).digest()).decode()
    assert len(inline) == 1
    assert rules == {
        "default-src": ["'self'"],
        "script-src": ["'self'", f"'sha256-{digest}'"],
        "img-src": ["'self'", "data:", "blob:"],
        **{f"{name}": ["'none'"] for name in ("object-src", "base-uri", "form-action")},
        "frame-ancestors": ["'none'"],
    }


# -- keys and the setting -----------------------------------------------------------------------


def test_static_files_need_no_key_and_everything_else_does(text):
    with serving(ScriptedClient(), text, api_key=("secret",)) as running, running.http() as http:
        for path in sorted(page_paths()):
            assert http.get(path, headers=BROWSER).status_code in (200, 308), path
        for path in ("/page/none.js", "/page/", "/pages", "/v1/models", "/server_info", "/v1/loom"):
            assert http.get(path, headers=BROWSER).status_code == 401, path
        assert http.post("/v1/chat/completions", json={}).status_code == 401


def test_no_ui_turns_it_off(text):
    with serving(ScriptedClient(), text, ui=False) as running, running.http() as http:
        assert http.get("/", headers=BROWSER).text == "weft is running"
        for path in ("/ui", "/page/index.html", "/page/js/main.js"):
            assert http.get(path, headers=BROWSER).status_code == 404, path
    off: dict[str, Any] = {"ui": False, "api_key": ("secret",)}
    with serving(ScriptedClient(), text, **off) as running, running.http() as http:
        assert http.get("/", headers=BROWSER).status_code == 401


def test_the_page_learns_the_classes_that_its_key_may_use(text, tmp_path):
    keys = tmp_path / "keys.yaml"
    keys.write_text(
        "keys:\n"
        "  - {name: nightly, key: k-night, classes: [batch, flex], default_class: batch}\n"
        "  - {name: all, key: k-all}\n"
    )
    with serving(ScriptedClient(), text, api_key_file=str(keys)) as running, running.http() as http:

        def classes(key: str) -> Any:
            header = {"authorization": f"Bearer {key}"}
            return http.get("/server_info", headers=header).json()["classes"]

        assert classes("k-night") == {"usable": ["flex", "batch"], "default": "batch"}
        assert classes("k-all")["default"] == "interactive"
        assert {"interactive", "batch"} <= {*classes("k-all")["usable"]}


def test_the_page_itself_may_upload_files(text):
    with serving(ScriptedClient(), text, data_dir=None) as running:
        form: dict[str, Any] = {"file": ("in.jsonl", b"{}\n"), "purpose": (None, "no-purpose")}
        host = running.url.removeprefix("http://")
        for origin in (running.url, f"https://{host}"):
            with running.http(headers={"origin": origin}) as http:
                error = http.post("/v1/files", files=form).json()["error"]
            assert error["param"] == "purpose"  # the origin was let in, and the form read
        for origin in (f"{running.url}1", "http://evil.example", "null"):
            with running.http(headers={"origin": origin}) as http:
                error = http.post("/v1/files", files=form).json()["error"]
            assert error["code"] == "origin_not_allowed"


# -- what the files have ------------------------------------------------------------------------


def test_the_page_loads_its_own_files_alone_and_has_no_script_in_its_text():
    page = Links((FOLDER / "index.html").read_text())
    files = [link for link in page.loaded if not link.startswith("#")]
    assert files
    assert {link.removeprefix("page/") for link in files} <= {*NAMES}
    assert page.inline == ["importmap"]


def test_modules_import_files_that_are_there():
    mapped = json.loads(
        re.findall(r'"importmap">(.*?)</script>', (FOLDER / "index.html").read_text(), re.DOTALL)[0]
    )["imports"]
    for name in (name for name in NAMES if name.endswith(".js")):
        text = (FOLDER / name).read_text()
        found = re.findall(r'\b(?:from|import)\s*\(?\s*"([^"]+)"', text) if name in OWN else []
        for target in found:
            if target.startswith("."):
                path = (FOLDER / name).parent.joinpath(target).resolve()
            else:
                path = (FOLDER.parent / mapped[target]).resolve()
            assert path.is_file(), (name, target)
            assert path.is_relative_to(FOLDER.resolve())
    languages = {path.stem for path in (VENDOR / "highlight" / "languages").iterdir()}
    listed = re.search(
        r"LANGUAGES = new Set\(\((.*?)\)\.split", (FOLDER / "js/markdown.js").read_text(), re.DOTALL
    )
    assert listed is not None
    assert {*re.findall(r"\w+", listed[1])} == languages


@pytest.mark.parametrize("name", OWN)
def test_our_files_name_no_other_host(name):
    text = (FOLDER / name).read_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"(?:https?|wss?)://|[\"'(]//\w", text)
    assert not re.search(
        r"\b(?:eval|Function)\(|innerHTML|outerHTML|insertAdjacentHTML|document\.write", text
    )


def test_libraries_are_those_of_the_list():
    rows = json.loads((VENDOR / "versions.json").read_text())
    listed = {path: file["sha256"] for row in rows for path, file in row["files"].items()}
    lying = [path for path in VENDOR.rglob("*") if path.is_file() and path.name != "versions.json"]
    found = {
        path.relative_to(VENDOR).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in lying
    }
    assert found == listed
    for row in rows:
        assert row["version"]
        assert row["licence"]
        assert row["integrity"].startswith("sha512-")
        assert any(path.endswith("LICENSE.txt") for path in row["files"]), row["package"]


def test_libraries_load_nothing_from_elsewhere():
    for path in VENDOR.rglob("*.js"):
        text = path.read_text()
        assert not re.search(r"\b(?:from|import)\s*\(?\s*[\"'](?:https?:)?//", text), path
        assert not re.search(r"\b(?:fetch|XMLHttpRequest|WebSocket|EventSource|sendBeacon)\(", text)


def test_packages_have_every_file():
    """Nothing that builds a wheel or an sdist leaves them out: no pattern, and not git."""
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]
    for name in NAMES:
        path = FOLDER / name
        assert not any(path.match(pattern) for pattern in built["wheel"]["exclude"]), name
    paths = [str((FOLDER / name).relative_to(ROOT)) for name in NAMES]
    ignored = subprocess.run(
        ["git", "check-ignore", "--no-index", *paths],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ignored.stdout == ""
