"""``weft top`` and ``weft status``: nothing that a server says controls the terminal."""

from __future__ import annotations

import io
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console

from weft.cli import main
from weft.core.errors import WeftError
from weft.status_command import RunningServer, run_status
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


def test_a_state_and_an_error_are_inert(monkeypatch, capsys):
    given = {"url": "http://127.0.0.1:9", "api_key": None, "interval_s": 0.0}
    monkeypatch.setattr(RunningServer, "state", lambda _: HOSTILE)
    assert run_status({**given, "ready": True, "json": False}) == 1
    assert capsys.readouterr().out == f"{SHOWN}\n"
    monkeypatch.setattr(RunningServer, "state", Mock(side_effect=WeftError(HOSTILE)))
    with pytest.raises(SystemExit):
        main(["status", "--ready"])
    assert capsys.readouterr().err == f"weft: {SHOWN}\n"


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
    with RunningServer("http://127.0.0.1:9", None) as server:
        _follow(server, None, TopView(), console)
    assert f"The server at http://127.0.0.1:9 {words}" in console.file.getvalue()
