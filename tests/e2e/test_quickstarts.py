"""Pages of the quickstart, followed to the letter: each block is done, in its order."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from live import SMALL, START_S, Server, run, serving

PAGES = Path(__file__).parents[2] / "docs" / "quickstart"
ADDRESS = "http://127.0.0.1:8000"
ASKS_A_SERVER = ("status", "top", "batches")


class Reader:
    """Follows a page in a folder.

    Attributes:
        answers: what each line of curl got.
        said: what each command and script printed.
    """

    def __init__(self, page: str, folder: Path, stack: ExitStack) -> None:
        self.answers: list[httpx.Response] = []
        self.said: list[str] = []
        self._text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
        self._folder = folder
        self._stack = stack
        self._server: Server | None = None

    def follow(self) -> None:
        for language, block in re.findall(r"^```(\w+)\n(.*?)^```", self._text, re.M | re.S):
            match language:
                case "yaml":
                    name = block.splitlines()[0].removeprefix("# ")
                    (self._folder / name).write_text(block)
                case "sh":
                    for line in self._lines(block):
                        self._do(line)
                case "python":
                    self._python(block)
                case _:
                    raise AssertionError(f"nobody knows how to follow a block of {language}")

    def _lines(self, block: str) -> Iterator[list[str]]:
        """The commands of a block; files that one writes are written."""
        heredoc = re.compile(r"^cat > (\S+) <<'END'\n(.*?)^END\n", re.M | re.S)
        for name, content in heredoc.findall(block):
            (self._folder / name).write_text(content)
        rest = heredoc.sub("", block).replace("\\\n", " ")
        words = (shlex.split(line, comments=True) for line in rest.splitlines())
        yield from (line for line in words if line)

    def _do(self, words: list[str]) -> None:
        if words[0] == "curl":
            self._curl(words[1:])
            return
        assert words[0] == "weft", words
        if words[1] == "serve":
            assert self._server is None
            given = [self._path(word) for word in words[2:]]
            self._server = self._stack.enter_context(serving(self._folder, *given))
            return
        command = [self._path(word) for word in words[1:]]
        if words[1] in ASKS_A_SERVER:
            command += ["--url", self._here.url]
        else:
            command += SMALL[:-3]  # settings of an engine alone
        done = run(*command)
        assert done.returncode == 0, f"{shlex.join(words)}: {done.stderr}"
        self.said.append(done.stdout)

    @property
    def _here(self) -> Server:
        assert self._server is not None, "the page asks a server before it starts one"
        return self._server

    def _path(self, word: str) -> str:
        """A file that the page names, in the folder of this reader."""
        return str(self._folder / word) if re.search(r"\.(yaml|jsonl)$", word) else word

    def _curl(self, words: list[str]) -> None:
        method, url, headers, body = "GET", "", {}, None
        while words:
            match words:
                case ["-s", *words]:
                    pass
                case ["-X", method, *words]:
                    pass
                case ["-H", header, *words]:
                    name, _, value = header.partition(": ")
                    headers[name] = value
                case ["-d", body, *words]:
                    method = "POST" if method == "GET" else method
                case [url, *words]:
                    assert url.startswith(ADDRESS), url
        asked = url.replace(ADDRESS, self._here.url)
        answer = httpx.request(method, asked, headers=headers, content=body, timeout=START_S)
        self.answers.append(answer)

    def _python(self, block: str) -> None:
        script = self._folder / "script.py"
        script.write_text(block.replace(ADDRESS, self._here.url))
        command = [sys.executable, str(script)]
        done = subprocess.run(command, cwd=self._folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        self.said.append(done.stdout)


@pytest.fixture
def stack(tmp_path, monkeypatch) -> Iterator[ExitStack]:
    """The environment of a user without caches; what runs is ended."""
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with ExitStack() as stack:
        yield stack


def test_a_team_s_server(tmp_path, stack):
    reader = Reader("team-server", tmp_path, stack)
    reader.follow()
    chat, lax, targets, changed, metrics, usage = reader.answers
    assert chat.json()["choices"][0]["message"]["content"]
    assert (chat.headers["x-weft-class"], lax.headers["x-weft-class"]) == ("interactive", "flex")
    assert targets.json()["object"] == "targets"
    assert (changed.status_code, changed.json()["error"]["code"]) == (409, "no_targets")
    assert "weft:key_requests_total" in metrics.text
    keys = {row["key"] for row in usage.json()["data"]}
    assert keys == {"ada", "nightly"}
    top, status = reader.said
    assert "interactive" in top
    assert "ready" in status


def test_a_nightly_batch(tmp_path, stack):
    reader = Reader("nightly-batch", tmp_path, stack)
    reader.follow()
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert {json.loads(line)["custom_id"] for line in lines} == {"1", "2"}
    _, followed, listed, scripted = reader.said
    assert "completed: 2 of 2 lines answered" in followed
    assert "batch_" in listed
    assert re.match(r"batch_\w+ (validating|in_progress)", scripted)
