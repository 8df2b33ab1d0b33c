"""``weft batches`` as a user runs it: each command, Ctrl-C, a terminal, wrong keys, no server."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import termios
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from live import START_S, WEFT, Server, eventually, free_port, refused, run, serving

OPTIONS = ("--disk-reserve-bytes", "0", "--frontends", "1", "--api-key", "right")


def line(number: int, **body: Any) -> dict[str, Any]:
    made = {"model": "builtin", "prompt": [300 + number % 3000, 7], "max_tokens": 8}
    made |= {"ignore_eos": True, **body}
    return {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": made}


def write(path: Path, lines: list[Any]) -> Path:
    texts = [item if isinstance(item, str) else json.dumps(item) for item in lines]
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    with serving(folder, "--data-dir", str(folder / "data"), *OPTIONS, modelled=True) as running:
        yield running


def batches(server: Server, *words: str, key: str = "right") -> subprocess.CompletedProcess[str]:
    return run("batches", *words, "--url", server.url, OPENAI_API_KEY=key)


def names(path: Path) -> list[str]:
    return sorted(json.loads(text)["custom_id"] for text in path.read_text().splitlines())


def test_submitted_followed_listed_and_fetched(server, tmp_path):
    path = write(tmp_path / "in.jsonl", ["", *(line(i) for i in range(50))])
    done = batches(server, "submit", str(path), "--window", "30m", "--follow")
    assert done.returncode == 0, done.stderr
    assert "with lines for /v1/completions and a window of 30m" in done.stderr
    assert "the batch is validating; its window ends at " in done.stderr
    assert "completed: 50 of 50 lines answered, 0 without an answer." in done.stdout
    assert "\r" not in done.stderr, "a bar without a terminal"
    batch_id = done.stdout.split("weft batches fetch ")[1].split()[0]
    listed = batches(server, "list").stdout
    assert listed.startswith("ID ")
    assert f"{batch_id}  completed  50/50" in listed
    output = tmp_path / "out.jsonl"
    done = batches(server, "fetch", batch_id, "-o", str(output))
    assert (done.returncode, str(output) in done.stdout) == (0, True)
    assert names(output) == sorted(f"r{i}" for i in range(50))
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "out.jsonl"]
    output.write_text("mine")
    refused(batches(server, "fetch", batch_id, "-o", str(output)), "exists already", "--force")
    assert output.read_text() == "mine"
    assert batches(server, "fetch", batch_id, "-o", str(output), "--force").returncode == 0
    assert len(names(output)) == 50


def test_lines_with_errors_have_their_file_and_exit_code(server, tmp_path):
    path = write(tmp_path / "in.jsonl", [line(0), line(1, temperature="hot")])
    done = batches(server, "submit", str(path))
    assert done.returncode == 0
    batch_id = done.stdout.strip()
    assert "weft batches follow" in done.stderr
    assert batches(server, "follow", batch_id).returncode == 3
    done = batches(server, "fetch", batch_id, "-o", str(tmp_path / "out.jsonl"))
    assert done.returncode == 3
    assert names(tmp_path / "out.jsonl") == ["r0"]
    assert names(tmp_path / "out.errors.jsonl") == ["r1"]
    refused(batches(server, "fetch", batch_id, "-o", "/proc/x.jsonl"), "Cannot write '/proc/x")


def test_a_refused_input_says_which_lines(server, tmp_path):
    other = {**line(1), "url": "/v1/embeddings"}
    path = write(tmp_path / "in.jsonl", [line(0), other, line(0), "this is no JSON"])
    done = batches(server, "submit", str(path), "--follow")
    assert done.returncode == 1
    assert "line 2: url must be that of the batch, /v1/completions" in done.stdout
    assert "line 3: Line 1 has the same custom_id. (duplicate_custom_id)" in done.stdout
    assert "line 4: The line is not valid JSON" in done.stdout


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["this is no JSON"], [":1: The line is not valid JSON"]),
        (["", {**line(0), "url": "/v1/completion"}], [":2: url must be", "Did you mean"]),
        ([""], ["has no lines"]),
        (None, ["No such file"]),
    ],
)
def test_a_first_line_that_is_none_is_not_uploaded(tmp_path, lines, words):
    path = tmp_path / "in.jsonl"
    if lines is not None:
        write(path, lines)
    done = run("batches", "submit", str(path), "--url", f"http://127.0.0.1:{free_port()}")
    refused(done, *words, code=2)


def test_a_window_that_the_server_refuses_leaves_no_file(server, tmp_path):
    path = write(tmp_path / "in.jsonl", [line(0)])
    files = server.client().with_options(api_key="right").files
    before = files.list().data
    for window in ("1s", "5m"):
        done = batches(server, "submit", str(path), "--window", window)
        refused(done, "completion_window must be from 10m to 7d", f"'{window}'", code=1)
    assert files.list().data == before


def test_ctrl_c_leaves_the_batch_and_says_how_to_go_on(server, tmp_path):
    path = write(tmp_path / "in.jsonl", [line(i, max_tokens=400) for i in range(400)])
    batch_id = batches(server, "submit", str(path)).stdout.strip()
    refused(batches(server, "fetch", batch_id), "has no results yet", f"follow {batch_id}", code=1)
    command = [*WEFT, "batches", "follow", batch_id, "--url", server.url, "--api-key", "right"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as following:
        assert following.stderr is not None
        while "in_progress" not in following.stderr.readline():
            pass
        following.send_signal(signal.SIGINT)
        said = following.stderr.read()
    assert following.returncode == 130
    assert "the batch goes on" in said
    assert f"weft batches follow {batch_id} --url {server.url}" in said
    assert "Traceback" not in said
    done = batches(server, "cancel", batch_id)
    assert (done.returncode, "takes no more lines" in done.stdout) == (0, True)
    done = batches(server, "follow", batch_id)
    assert (done.returncode, "The batch is cancelled" in done.stdout) == (1, True)
    assert "is cancelled." in batches(server, "cancel", batch_id).stdout


def test_a_terminal_gets_a_bar(server, tmp_path):
    path = write(tmp_path / "in.jsonl", [line(i, max_tokens=50) for i in range(60)])
    mine, its = pty.openpty()
    termios.tcsetwinsize(its, (24, 120))
    command = [*WEFT, "batches", "submit", str(path), "--follow", "--url", server.url]
    shown = b""
    with subprocess.Popen([*command, "--api-key", "right"], stdout=its, stderr=its) as following:
        os.close(its)
        while True:
            try:
                part = os.read(mine, 65536)
            except OSError:  # it has ended
                break
            shown += part
    os.close(mine)
    assert following.returncode == 0
    assert b"60/60" in shown, shown
    assert b"\r" in shown


def test_wrong_keys_and_ids_are_told_apart(server):
    refused(batches(server, "list", key="wrong"), "does not take the key", "Incorrect", code=1)
    refused(batches(server, "list", key=""), "wants a key", "--api-key KEY", code=1)
    refused(batches(server, "follow", "batch_none"), "no batch with the id 'batch_none'", code=1)
    refused(batches(server, "cancel", "batch_none"), "'weft batches list'", code=1)
    refused(batches(server, "fetch", "../files"), "is not the id of a batch", code=2)
    refused(run("batches", "list", "--url", "nowhere"), "not a server's address", code=2)
    nobody = f"http://127.0.0.1:{free_port()}"
    refused(run("batches", "list", "--url", nobody), "No server answers at", "weft serve", code=1)


class Without(BaseHTTPRequestHandler):
    """A server that knows no batches."""

    def do_GET(self) -> None:
        body = b'{"detail": "Not Found"}'
        self.send_response(404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def test_a_server_without_batches_is_said():
    with HTTPServer(("127.0.0.1", 0), Without) as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{other.server_port}"
        refused(run("batches", "list", "--url", url), "has no batches", "weft batch FILE", code=1)
        other.shutdown()
        thread.join()


def test_a_server_that_restarts_meanwhile_is_waited_for(tmp_path):
    port = free_port()
    data = ("--data-dir", str(tmp_path / "data"), *OPTIONS)
    path = write(tmp_path / "in.jsonl", [line(i, max_tokens=100) for i in range(100)])
    with serving(tmp_path, *data, modelled=True, port=port) as first:
        batch_id = batches(first, "submit", str(path)).stdout.strip()
        command = [*WEFT, "batches", "follow", batch_id, "--url", first.url]
        log = (tmp_path / "followed.txt").open("w+")
        following = subprocess.Popen([*command, "--api-key", "right"], stdout=log, stderr=log)
        said = lambda: (tmp_path / "followed.txt").read_text()  # noqa: E731
        eventually(lambda: "in_progress" in said(), START_S)
    try:
        eventually(lambda: "Waiting for the server." in said(), START_S)
        with serving(tmp_path, *data, modelled=True, port=port):
            eventually(lambda: following.poll() is not None, START_S)
    finally:
        following.kill()
        following.wait()
        log.close()
    assert following.returncode == 0, said()
    assert "the server is back." in said()
    assert "100 of 100 lines answered" in said()
