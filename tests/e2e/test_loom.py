"""The loom of a real server: steps by class, an engine that is killed, keys, ``weft top``."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest

from live import WEFT, Server, eventually, free_port, refused, serving

KEYS = "keys:\n  - {name: user, key: one}\n  - {name: admin, key: two}\n"


class Reader(threading.Thread):
    """Reads a stream to its end, whatever happens to the engine meanwhile."""

    def __init__(self, url: str, key: str = "") -> None:
        super().__init__(daemon=True)
        self.events: list[dict[str, Any]] = []
        self._url = url
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self.start()

    def run(self) -> None:
        with httpx.stream(
            "GET", f"{self._url}/v1/loom", headers=self._headers, timeout=60
        ) as answer:
            for line in answer.iter_lines():
                if line:
                    self.events.append(json.loads(line.removeprefix("data: ")))

    @property
    def looms(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event["object"] == "loom"]

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [step for event in self.looms for step in event["steps"]]


class Seen(threading.Thread):
    """What a terminal shows."""

    def __init__(self, terminal: int) -> None:
        super().__init__(daemon=True)
        self.text = ""
        self._terminal = terminal
        self.start()

    def run(self) -> None:
        with contextlib.suppress(OSError), os.fdopen(self._terminal, "rb", 0) as terminal:
            while data := terminal.read(65536):
                self.text += data.decode(errors="replace")


def ask(server: Server, number: int, tier: str, tokens: int, **headers: str) -> dict[str, Any]:
    """A completion whose prompt shares no block with another one."""
    prompt = [300 + (37 * number + at) % 3000 for at in range(20 + number)]
    body = {
        "model": "builtin", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True,
        "service_tier": tier, "temperature": 0, "speculation": 0,
    }  # fmt: skip
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    usage: dict[str, Any] = answer.json()["usage"]
    return usage


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("loom")
    given = ("--data-dir", str(folder / "data"), "--frontends", "2")
    with serving(folder, *given) as running:
        yield running


def test_counts_of_steps_add_up_to_what_was_served(server):
    """Through whichever request plane: each has all steps of the engine."""
    reader = Reader(server.url)
    eventually(lambda: bool(reader.looms))
    prompts: Counter[str] = Counter()
    outputs: Counter[str] = Counter()
    first: Counter[str] = Counter()
    names = {"default": "interactive", "flex": "flex", "batch": "batch"}
    threads = []

    def one(number: int, tier: str) -> None:
        usage = ask(server, number, tier, 10 + number)
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        prompts[names[tier]] += usage["prompt_tokens"] - cached
        outputs[names[tier]] += usage["completion_tokens"]
        first[names[tier]] += 1

    for number, tier in enumerate(["default", "flex", "batch"] * 4):
        threads.append(threading.Thread(target=one, args=(number, tier)))
        threads[-1].start()
    for thread in threads:
        thread.join(60)

    def sums(kind: str) -> Counter[str]:
        found: Counter[str] = Counter()
        for step in reader.steps:
            for name, count in step[kind].items():
                found[name] += count * step["steps"]
        return found

    assert sum(first.values()) == 12
    eventually(lambda: sums("decode") == outputs - first)
    assert sums("prefill") == prompts
    numbers = [step["n"] for step in reader.steps]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert all(event["lost_steps"] == 0 for event in reader.looms)
    now = time.time()
    assert all(0 < step["ms"] < 60_000 and now - 600 < step["at"] < now for step in reader.steps)
    eventually(lambda: not any(reader.looms[-1]["load"].values()))

    def row() -> dict[str, Any]:
        return next(r for r in reader.looms[-1]["classes"] if r["name"] == "interactive")

    eventually(lambda: row()["judged"] == row()["ttft_s"]["count"] == 4)  # of both request planes
    assert row()["tpot_s"]["p99"] > 0
    totals = reader.looms[-1]["totals"]
    assert totals["output_tokens"] == sum(outputs.values())


def test_a_killed_engine_is_a_marked_gap_and_the_stream_goes_on(server):
    reader = Reader(server.url)
    eventually(lambda: bool(reader.looms))
    before = reader.looms[0]["engine"]["number"]
    asking = threading.Thread(target=ask, args=(server, 40, "default", 1900))
    asking.start()
    eventually(lambda: any(step["decode"] for step in reader.steps[-3:]), 30)
    killed_at = time.time()
    server.children()["weft-engine"].send_signal(signal.SIGKILL)
    asking.join(60)
    eventually(lambda: reader.looms[-1]["engine"]["number"] == before + 1, 30)
    eventually(lambda: reader.looms[-1]["engine"]["state"] == "ready", 30)
    last = reader.looms[-1]
    recovery = last["recoveries"][-1]
    eventually(lambda: reader.steps[-1]["n"] >= recovery["n"], 30)  # events come later than tokens
    assert recovery["engine"] == before + 1
    assert abs(recovery["died_at"] - killed_at) < 2
    assert recovery["gap_s"] > 0
    numbers = [step["n"] for step in reader.steps]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    by_engine = {step["n"]: step["engine"] for step in reader.steps}
    assert by_engine[recovery["n"]] == before + 1
    assert by_engine[recovery["n"] - 1] == before
    starts = {step["n"]: step["at"] for step in reader.steps}
    assert starts[recovery["n"]] >= recovery["back_at"]


def test_top_prints_it_once_without_a_terminal_or_as_json(server, call):
    ask(server, 70, "flex", 5)
    shown = call("top", "--url", server.url)
    assert (shown.returncode, shown.stderr) == (0, "")
    for words in ("builtin at", ": ready", "interactive", "TTFT P50", "KV cache", "last step"):
        assert words in shown.stdout, shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 80
    found = json.loads(call("top", "--url", f"{server.url}/v1", "--json").stdout)
    assert found["object"] == "loom"
    assert found["steps"][-1]["decode"] == {"flex": 1}


def test_top_in_a_terminal_goes_on_until_ctrl_c_or_the_end_of_the_server(tmp_path):
    with serving(tmp_path, modelled=True) as server:
        ours, theirs = os.openpty()
        command = [*WEFT, "top", "--url", server.url]
        shown = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE)
        other = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE)
        os.close(theirs)
        seen = Seen(ours)
        eventually(lambda: seen.text.count("no steps yet") >= 6, 60)
        shown.send_signal(signal.SIGINT)
        assert shown.wait(30) == 130
        assert shown.stderr is not None
        assert b"Traceback" not in shown.stderr.read()
    assert other.wait(30) == 0
    seen.join(30)
    assert "has stopped" in seen.text


def test_top_says_what_is_wrong(tmp_path, call):
    keys = tmp_path / "keys"
    keys.write_text(KEYS)
    nobody = f"http://127.0.0.1:{free_port()}"
    refused(call("top", "--url", nobody), "No server answers", "weft serve", code=1)
    given = ("--api-key-file", str(keys), "--metrics-key", "admin")
    with serving(tmp_path, *given, modelled=True) as server:
        asked = ("top", "--once", "--url", server.url, "--api-key")
        refused(call(*asked, ""), "needs a key", "--api-key", code=1)
        refused(call(*asked, "three"), "refuses this key", code=1)
        refused(call(*asked, "one"), "403", "--metrics-key", code=1)
        shown = call(*asked, "two")
        assert (shown.returncode, shown.stderr) == (0, "")
        assert "no steps yet" in shown.stdout


class Older(BaseHTTPRequestHandler):
    """A server that has no loom."""

    def do_GET(self) -> None:
        self.send_response(404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_top_of_an_older_server(call):
    with HTTPServer(("127.0.0.1", 0), Older) as older:
        thread = threading.Thread(target=older.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{older.server_address[1]}"
        refused(call("top", "--once", "--url", url), "no /v1/loom", "older", code=1)
        older.shutdown()
        thread.join()
