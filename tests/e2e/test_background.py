"""Request planes are killed amid background responses: nothing is lost, nothing said twice."""

from __future__ import annotations

import glob
import json
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from live import START_S, Server, command_of, eventually, serving
from weft.server.scratch import PREFIX

PATH = "/v1/responses"
TOKENS = 600
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
    while len(events) < most:
        query: dict[str, Any] = {"stream": "true"}
        if events:
            query["starting_after"] = events[-1]["sequence_number"]
        try:
            url = f"{server.url}{PATH}/{number}"
            with httpx.stream("GET", url, params=query, timeout=START_S) as answer:
                assert answer.status_code == 200
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        events.append(json.loads(line[6:]))
                        if len(events) == most:
                            return events
            return events
        except httpx.HTTPError:
            continue
    return events


def text_of(events: list[Any]) -> str:
    return "".join(event["delta"] for event in events if event["type"].endswith("text.delta"))


def frontends(server: Server) -> list[psutil.Process]:
    found = psutil.Process(server.process.pid).children()
    return [child for child in found if command_of(child)[:1] == ["weft-frontend"]]


@pytest.mark.parametrize("planes", [1, 2])
def test_a_killed_request_plane_loses_no_response(tmp_path, planes):
    """The text is the undisturbed one, each event comes once, and usage is right."""
    with serving(tmp_path, "--frontends", str(planes)) as server:
        eventually(lambda: len(frontends(server)) == planes, START_S)
        undisturbed = [text_of(follow(server, ask(server, number))) for number in range(3)]
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
        assert "is taken up" in server.errors.read_text()
        eventually(server.idle, START_S)
        assert server.process.poll() is None


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


def test_what_a_killed_server_has_stored_goes_at_the_next_start(tmp_path, monkeypatch):
    """And at its own end, if it has one."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    folders = str(tmp_path / f"{PREFIX}*")
    with serving(tmp_path) as server:
        [mine] = glob.glob(folders)
        assert Path(mine).stat().st_mode & 0o077 == 0
        httpx.post(f"{server.url}{PATH}", json={"input": "hi", "max_output_tokens": 2})
        with serving(tmp_path):
            assert mine in glob.glob(folders)
            assert len(glob.glob(folders)) == 2
        assert glob.glob(folders) == [mine]
        server.process.kill()
        server.process.wait()
        with serving(tmp_path):
            [other] = glob.glob(folders)
            assert other != mine
    assert glob.glob(folders) == []
