"""``weft top`` and ``weft status``: nothing that a server says controls the terminal."""

from __future__ import annotations

import io
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
from rich.console import Console

from weft.cli import main
from weft.core.errors import ConfigError, WeftError
from weft.running_server import RunningServer
from weft.status_command import run_status
from weft.top_command import TopView, _follow, run_top

HOSTILE = "[red]\x1b[2Jname"
SHOWN = "[red]\u241b[2Jname"
NONE = {"p50": None, "p99": None, "target": None}


def event() -> dict[str, Any]:
    """What a server says whose names are hostile."""
    return {
        "object": "loom",
        "at": 1.0,
        "version": HOSTILE,
        "models": [HOSTILE],
        "engine": {"state": HOSTILE, "number": 1, "policy": HOSTILE, "max_num_seqs": 4},
        "load": {"waiting": 0, "queued_prompt_tokens": 0, "running": 0},
        "kv": {"used_blocks": 0, "blocks": 4, "block_size": 16, "host_blocks": 0},
        "totals": {},
        "classes": [
            {"name": HOSTILE, "waiting": None, "running": None, "kept": None,
             "ttft_s": NONE, "tpot_s": NONE}
        ],
        "batches": [
            {"id": HOSTILE, "service_class": HOSTILE, "status": HOSTILE, "completed": 1,
             "failed": 0, "total": 2, "progress": 0.5, "eta_s": None, "warning": None}
        ],
        "recoveries": [],
        "steps": [
            {"n": 0, "ms": 1.0, "predicted_ms": None, "prefill": {HOSTILE: 3}, "decode": {}}
        ],
    }  # fmt: skip


def test_what_a_server_says_is_inert(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(RunningServer, "loom", lambda *_: event())
    given = {"url": "http://127.0.0.1:9", "api_key": None, "model": None}
    assert run_top({**given, "json": False, "once": True}) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert shown.count(SHOWN) == 9  # four above, the legend, the class, and three of the batch


def test_a_row_of_a_class_fits_into_a_narrow_terminal():
    now, slow = event(), {"p50": 0.08, "p99": 1.76, "target": 9.0}
    row = {"name": "interactive", "waiting": 128, "running": 128, "kept": 0.97, "judged": 48}
    now["classes"] = [{**row, "ttft_s": slow, "tpot_s": slow}]
    console = Console(file=io.StringIO(), width=80)
    view = TopView()
    view.push(now)
    console.print(view.render("http://a", 80))
    [shown] = [line for line in console.file.getvalue().splitlines() if "97% of 48" in line]
    assert shown.split()[:3] == ["interactive", "128", "128"]
    assert shown.split().count("1.76s") == 2


def test_a_state_and_an_error_are_inert(monkeypatch, capsys):
    given = {"url": "http://127.0.0.1:9", "api_key": None, "interval_s": 0.0}
    monkeypatch.setattr(RunningServer, "state", lambda _: HOSTILE)
    assert run_status({**given, "ready": True, "json": False}) == 1
    assert capsys.readouterr().out == f"{SHOWN}\n"
    monkeypatch.setattr(RunningServer, "state", Mock(side_effect=WeftError(HOSTILE)))
    with pytest.raises(SystemExit):
        main(["status", "--ready"])
    assert capsys.readouterr().err == f"weft: {SHOWN}\n"


class Elsewhere(BaseHTTPRequestHandler):
    """Leads every request to another server."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(307)
        self.send_header("location", "/elsewhere")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def test_a_key_goes_to_no_other_server():
    with HTTPServer(("127.0.0.1", 0), Elsewhere) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        server = RunningServer(f"http://127.0.0.1:{http.server_port}/v1", "a-key")
        with pytest.raises(WeftError, match=r"is not weft: .*307 Temporary Redirect"):
            server.state()
        for ask in (server.info, lambda: next(server.looms("m"))):
            with pytest.raises(WeftError, match=r"with 307 Temporary Redirect\."):
                ask()
        http.shutdown()
    assert Elsewhere.asked == ["/ready", "/server_info", "/v1/loom?model=m"]
    with pytest.raises(WeftError, match="No server answers at"):
        server.state()
    with pytest.raises(ConfigError, match="printable ASCII"):
        RunningServer("http://a", "schlüssel\n")


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ([{"object": "loom.end", "reason": "server_stopping"}], "has stopped."),
        ([{"object": "loom.end", "reason": "key_revoked"}], "takes this key no more;"),
        ([], "has ended the stream."),
    ],
)
def test_the_end_has_its_reason(monkeypatch, end, words):
    monkeypatch.setattr(RunningServer, "looms", lambda *_: iter([event(), *end]))
    console = Console(file=io.StringIO(), width=200)
    server = RunningServer("http://127.0.0.1:9", None)
    _follow(server, None, TopView(), console)
    assert f"The server at http://127.0.0.1:9 {words}" in console.file.getvalue()
