"""A server in a control group with a memory limit: its memory use, and its behaviour beyond it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import httpx

from depth import deep
from groups import MIB, join, limited_group
from live import START_S, WEFT, Server, eventually, serving

HUNGRY = 3999  # first token of a prompt with which the engine takes all the memory there is
TAKING = textwrap.dedent("""
    import sys
    if "weft.engine.process" in sys.orig_argv:
        from weft.exec.eager import EagerExecutor
        launch = EagerExecutor.launch
        def hungry(self, plan):
            for add in plan.add:
                if add.tokens[0] == {HUNGRY}:
                    kept = []
                    while True:
                        kept.append(bytearray(b"x" * 2**24))
            return launch(self, plan)
        EagerExecutor.launch = hungry
""")


# Each takes less than an engine does, which is therefore who is killed.
HOGS, HOG_MIB = 10, 49
HOG = f"""
kept = b"x" * ({HOG_MIB} << 20)
input()
"""


def completion(server: Server, prompt: list[int], **more: object) -> httpx.Response:
    asked = {"model": "builtin", "prompt": prompt, "max_tokens": 8, "temperature": 0, **more}
    return httpx.post(f"{server.url}/v1/completions", json=asked, timeout=START_S)


def state(server: Server) -> tuple[int, str]:
    answer = httpx.get(f"{server.url}/ready", timeout=START_S)
    return answer.status_code, answer.json()["status"]


def test_an_engine_takes_less_than_its_group_has():
    with limited_group(700 * MIB) as group:
        command = [*join(group), *WEFT, "info", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    assert told["machine"]["available_bytes"] < 700 * MIB
    assert told["memory"]["kv_bytes"] < 350 * MIB


@deep
def test_a_request_that_takes_all_memory_is_ended_for_that_and_no_other(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(TAKING.replace("{HUNGRY}", str(HUNGRY)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with (
        limited_group(700 * MIB) as group,
        serving(tmp_path, "--max-crashes", "1", within=join(group)) as server,
    ):
        assert httpx.get(f"{server.url}/ready").json() == {"status": "ready"}
        undisturbed = completion(server, [5, 6, 7]).json()["choices"]
        with ThreadPoolExecutor() as pool:
            hungry = pool.submit(completion, server, [HUNGRY, 6, 7])
            others = [pool.submit(completion, server, [5, 6, 7]) for _ in range(4)]
        answer = hungry.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (
            500,
            "request_out_of_memory",
        )
        assert [other.result().json()["choices"] for other in others] == [undisturbed] * 4
        ready = httpx.get(f"{server.url}/ready").json()
        assert ready == {"status": "ready", "engines_killed_for_memory": 3}
        assert server.metrics("weft:engine_memory_kills_total") == [3.0]
        told = [line for line in server.errors.read_text().splitlines() if "SIGKILL" in line]
        assert len(told) == 3
        for line in told:
            for words in ("700.00 MiB of memory", "control group", "lower kv_memory"):
                assert words in line


@deep
def test_without_memory_for_any_engine_requests_end_until_there_is_some_again(tmp_path):
    with limited_group(700 * MIB) as group, serving(tmp_path, within=join(group)) as server:
        undisturbed = completion(server, [5, 6, 7]).json()["choices"]
        command = [*join(group), sys.executable, "-S", "-c", HOG]
        hogs = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(HOGS)]
        try:
            eventually(lambda: state(server) == (503, "out_of_memory"), START_S)
            waiting = completion(server, [5, 6, 7])
            assert waiting.json()["error"]["code"] == "engine_out_of_memory"
            assert waiting.status_code == 503
            assert "retry-after" in waiting.headers
        finally:
            for hog in hogs:
                hog.communicate(b"\n")
        eventually(lambda: state(server) == (200, "ready"), START_S)
        assert completion(server, [5, 6, 7]).json()["choices"] == undisturbed
        deaths = [line for line in server.errors.read_text().splitlines() if "ended (" in line]
        assert len(deaths) > 1
        assert all("700.00 MiB of memory" in line for line in deaths)
