"""Request planes are killed amid background responses: nothing is lost, nothing said twice."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from depth import deep
from live import START_S, Server, command_of, eventually, serving
from weft.server.scratch import MEMORY, PREFIX, scratch_folder

PATH = "/v1/responses"
TOKENS = 400
BODIES = [
    {"input": "Tell me of a tree.", "temperature": 0},
    {"input": "And a lake.", "temperature": 1, "seed": 5, "frequency_penalty": 0.5},
    {
        "input": "Words, please.",
        "temperature": 1,
        "seed": 6,
        "ignore_eos": False,
        "structured_outputs": {"regex": "([a-z]{3}[0-9]{2}; ){150}"},
    },
]


def ask(server: Server, number: int) -> str:
    """Begin a background response; its id."""
    body = {
        "model": "builtin",
        "background": True,
        "max_output_tokens": TOKENS,
        "ignore_eos": True,
        **BODIES[number],
    }
    answer = httpx.post(f"{server.url}{PATH}", json=body, timeout=START_S)
    assert answer.status_code == 200, answer.text
    assert answer.json()["status"] == "queued"
    return str(answer.json()["id"])


def follow(server: Server, number: str, most: int = 10**9) -> list[Any]:
    """The events of a response, however often the connection breaks; up to so many."""
    events: list[Any] = []
    end = time.monotonic() + 3 * START_S
    while time.monotonic() < end:
        query: dict[str, Any] = {"stream": "true"}
        if events:
            query["starting_after"] = events[-1]["sequence_number"]
        try:
            url = f"{server.url}{PATH}/{number}"
            with httpx.stream("GET", url, params=query, timeout=START_S / 2) as answer:
                assert answer.status_code == 200
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        events.append(json.loads(line[6:]))
                        if len(events) == most:
                            return events
            return events
        except httpx.HTTPError:
            time.sleep(0.05)
    raise AssertionError(f"{number} came to no end: {server.errors.read_text()}")


def text_of(events: list[Any]) -> str:
    return "".join(event["delta"] for event in events if event["type"].endswith("text.delta"))


def frontends(server: Server) -> list[psutil.Process]:
    found = psutil.Process(server.process.pid).children()
    return [child for child in found if command_of(child)[:1] == ["weft-frontend"]]


@pytest.mark.parametrize("planes", [1, pytest.param(2, marks=deep)])
def test_a_killed_request_plane_loses_no_response(tmp_path, planes):
    """The text is the undisturbed one, each event comes once, and usage is right."""
    with serving(tmp_path, "--frontends", str(planes), modelled=True) as server:
        eventually(lambda: len(frontends(server)) == planes, START_S)
        undisturbed = [text_of(follow(server, one)) for one in [ask(server, n) for n in range(3)]]
        numbers = [ask(server, number) for number in range(3)]
        for number in numbers:  # has said something, and is far from its end
            assert "delta" in follow(server, number, 6)[-1]
        for plane in frontends(server):
            plane.kill()
        for number, expected in zip(numbers, undisturbed, strict=True):
            events = follow(server, number)
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            assert text_of(events) == expected
            response = events[-1]["response"]
            assert response["status"] in ("completed", "incomplete")
            [item] = response["output"]
            assert item["content"][0]["text"] == expected
            assert 0 < response["usage"]["output_tokens"] <= TOKENS
        assert "is resumed" in server.errors.read_text()
        eventually(server.idle, START_S)
        assert server.process.poll() is None


@deep
def test_responses_go_on_after_a_restart_of_everything(tmp_path):
    kept = ("--responses-db", str(tmp_path / "responses.db"))
    with serving(tmp_path, *kept) as server:
        expected = text_of(follow(server, ask(server, 1)))
        number = ask(server, 1)
        seen = follow(server, number, 6)
        server.process.kill()
        server.process.wait()
        with serving(tmp_path, *kept) as again:
            events = follow(again, number)
            assert events[:6] == seen
            assert text_of(events) == expected


@deep
def test_a_killed_server_leaves_no_responses(tmp_path):
    """They lie in memory; a process removes them, or else the next start does."""
    with serving(tmp_path) as server:
        folder = scratch_of(server.process.pid)
        assert folder.stat().st_mode & 0o077 == 0
        httpx.post(f"{server.url}{PATH}", json={"input": "hi", "max_output_tokens": 2})
        assert (folder / "responses.db").exists()
        server.process.kill()
        server.process.wait()
        eventually(lambda: not folder.exists(), START_S)
    with serving(tmp_path) as server:
        folder = scratch_of(server.process.pid)
        [sweeper] = [
            child
            for child in psutil.Process(server.process.pid).children()
            if command_of(child)[0] == "weft-sweeper"
        ]
        sweeper.kill()
        server.process.kill()
        server.process.wait()
        assert folder.exists()
    with scratch_folder() as other:
        assert not folder.exists()
    assert not other.exists()


def scratch_of(pid: int) -> Path:
    """The folder in memory that a supervisor holds."""
    open_files = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
    [folder] = [Path(name) for name in open_files if name.startswith(str(MEMORY / PREFIX))]
    return folder
