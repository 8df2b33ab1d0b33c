"""A server in a control group with a memory limit: its memory use, and its behaviour beyond it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from depth import deep
from groups import MIB, join, limited_group, set_limit
from live import START_S, WEFT, Server, eventually, serving

HUNGRY = 3999  # first token of a prompt with which the engine takes all the memory there is
TAKING = f"""
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
"""


# Together they leave less than an engine takes; each is too small to be killed instead of one.
HOGS, LEFT = 12, 6 * MIB
HOG = """
import sys
kept = []
for line in sys.stdin:
    kept.append(b"x" * int(line))
    print("has it", flush=True)
"""

# A file that is written, so that it counts for the process's group, and read until it is active.
FILE_IN_USE = """
import os
with open("file", "wb") as file:
    file.write(bytes(300 << 20))
    os.fsync(file.fileno())
for _ in range(4):
    open("file", "rb").read()
"""


def completion(server: Server, prompt: list[int], **more: object) -> httpx.Response:
    asked = {"model": "builtin", "prompt": prompt, "max_tokens": 8, "temperature": 0, **more}
    return httpx.post(f"{server.url}/v1/completions", json=asked, timeout=START_S)


def state(server: Server) -> tuple[int, str]:
    answer = httpx.get(f"{server.url}/ready", timeout=START_S)
    return answer.status_code, answer.json()["status"]


def anonymous(group: Path, without: str) -> int:
    """Bytes of a group's processes that no file backs, less those of one process."""
    total = 0
    for pid in (group / "cgroup.procs").read_text().split():
        if without not in Path(f"/proc/{pid}/cmdline").read_text():
            status = Path(f"/proc/{pid}/status").read_text()
            total += int(status.split("RssAnon:")[1].split()[0]) * 1024
    return total


def hog_of(group: Path) -> subprocess.Popen[bytes]:
    """A process of the group that takes as many bytes as each line of its input says."""
    command = [*join(group), sys.executable, "-S", "-c", HOG]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def take(hog: subprocess.Popen[bytes], size: int) -> None:
    hog.stdin.write(b"%d\n" % size)
    hog.stdin.flush()


def is_without_memory(server: Server, group: Path, hogs: list[subprocess.Popen[bytes]]) -> bool:
    """Whether the engine is; while it lives, the hogs take what other processes leave, but for
    a little. (A process that was just starting when they took the most may have ended since.)"""
    now = state(server)
    free = 700 * MIB - anonymous(group, without="weft-engine") - LEFT
    if now == (200, "ready") and free >= HOGS * MIB:
        for hog in hogs:
            take(hog, free // HOGS)
        time.sleep(1)
    return now == (503, "out_of_memory")


def used(group: Path) -> int:
    """Bytes of a group's processes and files."""
    names = ("memory.usage_in_bytes", "memory.current")
    return int(next(group / name for name in names if (group / name).exists()).read_text())


def test_an_engine_takes_less_than_its_group_has():
    with limited_group(700 * MIB) as group:
        command = [*join(group), *WEFT, "info", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    assert told["machine"]["available_bytes"] < 700 * MIB
    assert told["memory"]["kv_bytes"] < 350 * MIB


@deep
def test_a_request_that_takes_all_memory_is_ended_for_that_and_no_other(tmp_path):
    with (
        limited_group(700 * MIB) as group,
        serving(tmp_path, "--max-crashes", "1", within=join(group), engines=TAKING) as server,
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
        hogs = [hog_of(group) for _ in range(HOGS)]
        time.sleep(1)  # each has what an interpreter takes
        try:
            eventually(lambda: is_without_memory(server, group, hogs), START_S)
            waiting = completion(server, [5, 6, 7])
            assert waiting.json()["error"]["code"] == "engine_out_of_memory"
            assert waiting.status_code == 503
            assert "retry-after" in waiting.headers
        finally:
            for hog in hogs:
                hog.communicate()
        eventually(lambda: state(server) == (200, "ready"), START_S)
        assert completion(server, [5, 6, 7]).json()["choices"] == undisturbed
        log = server.errors.read_text().splitlines()
        (death,) = [line for line in log if "The engine ended (" in line]
        assert "700.00 MiB of memory" in death
        failed = [line for line in log if "tried again" in line]
        assert failed
        assert all("700.00 MiB of memory" in line or "are free" in line for line in failed)


def kill_engine(server: Server) -> None:
    server.children()["weft-engine"].kill()


@deep
def test_files_in_the_page_cache_take_no_memory_from_the_next_engine(tmp_path):
    """Also those in use, such as weights that other processes map."""
    with (
        limited_group(900 * MIB) as group,
        serving(tmp_path, "--kv-memory", "150MiB", within=join(group)) as server,
    ):
        undisturbed = completion(server, [5, 6, 7]).json()["choices"]
        subprocess.run(
            [*join(group), sys.executable, "-S", "-c", FILE_IN_USE], cwd=tmp_path, check=True
        )
        set_limit(group, used(group) + 20 * MIB)
        kill_engine(server)
        assert completion(server, [5, 6, 7]).json()["choices"] == undisturbed
        assert "tried again" not in server.errors.read_text()
        assert server.metrics("weft:engine_memory_kills_total") == [0.0]


@deep
def test_too_little_memory_after_a_kill_from_outside_is_not_called_a_kill_for_memory(tmp_path):
    with (
        limited_group(700 * MIB) as group,
        serving(tmp_path, "--kv-memory", "150MiB", within=join(group)) as server,
    ):
        undisturbed = completion(server, [5, 6, 7]).json()["choices"]
        with hog_of(group) as hog:
            take(hog, 700 * MIB - anonymous(group, without="nobody") - 60 * MIB)
            assert hog.stdout.readline()
            kill_engine(server)
            eventually(lambda: state(server) == (503, "out_of_memory"), START_S)
            error = completion(server, [5, 6, 7]).json()["error"]
            hog.communicate()
        assert error["code"] == "engine_out_of_memory"
        assert error["message"].startswith("There is too little free memory to start the next")
        eventually(lambda: state(server) == (200, "ready"), START_S)
        assert httpx.get(f"{server.url}/ready").json() == {"status": "ready"}  # no kills
        assert completion(server, [5, 6, 7]).json()["choices"] == undisturbed
        failed = [line for line in server.errors.read_text().splitlines() if "tried again" in line]
        assert len(failed) == 1
        assert "kv_memory is 150.00 MiB" in failed[0]
