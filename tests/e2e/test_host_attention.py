"""Schedulers that decode on the host, on a CPU: ``slo-piggyback`` and ``load-aware``."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from live import (
    START_S,
    Server,
    command_of,
    eventually,
    lives,
    refused,
    run,
    serving,
    with_engines,
)
from weft.core.config import EngineConfig
from weft.cost.curves import Curve
from weft.cost.fit import FEATURES, Fitted
from weft.engine.costs import profile_key
from weft.engine.model import find_model

COMMON = ["--device", "cpu", "--max-model-len", "256"]
TIGHT = ["--kv-memory", "2MiB", "--host-kv-memory", "16MiB"]
TWO = {"n": 2, "temperature": 0.9, "seed": 5}
CROWD = 12  # sequences of 195 tokens, of which the device holds three and a half
GIVEN = [[9 + number, 7, 5 + number] * 25 for number in range(CROWD)]


def completions(server: Server, tier: str = "flex", **more: Any) -> list[str]:
    """Greedy answers to all prompts at once, unless more says otherwise."""

    def ask(prompt: list[int]) -> str:
        body = {"model": "builtin", "prompt": prompt, "temperature": 0, "ignore_eos": True}
        body |= {"service_tier": tier, "max_tokens": 120, **more}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=START_S)
        assert answer.status_code == 200, answer.text
        return "|".join(choice["text"] for choice in answer.json()["choices"])

    with ThreadPoolExecutor(CROWD) as clients:
        return list(clients.map(ask, GIVEN))


@pytest.fixture(scope="module")
def ample(tmp_path_factory) -> tuple[list[str], list[str]]:
    """The answers of a server whose KV holds all sequences: greedy ones, and two to each prompt."""
    with serving(tmp_path_factory.mktemp("ample"), *COMMON) as server:
        return completions(server), completions(server, **TWO)


@pytest.fixture(scope="module")
def expected(ample) -> list[str]:
    return ample[0]


def made_up_costs(folder: Path, **more: Any) -> str:
    """A profile of the built-in model that was measured nowhere."""
    config = EngineConfig(model="builtin", device="cpu", threads=1, **more)
    model = find_model(config)
    key, layers = profile_key(config, model), model.spec.num_layers
    path = folder / "profile.json"
    Fitted(key, layers, Curve((1, 1024), (0.001, 0.01)), dict.fromkeys(FEATURES, 0.0)).save(path)
    return str(path)


def piggybacking_on(costs: str) -> list[str]:
    given = ["--scheduler", "slo-piggyback", "--slo-admission", "off", "--profile", costs]
    return [*COMMON, *TIGHT, *given]


@pytest.fixture(scope="module")
def piggybacking(costs) -> list[str]:
    return piggybacking_on(costs)


@pytest.fixture(scope="module")
def costs(tmp_path_factory) -> str:
    return made_up_costs(tmp_path_factory.mktemp("costs"))


@pytest.fixture(scope="module")
def overlapping(costs) -> list[str]:
    return [*COMMON, *TIGHT, "--scheduler", "load-aware", "--profile", costs]


class Crowds:
    """Sends all prompts again and again until a condition has held while one of them is served."""

    def __init__(self, server: Server, others: ThreadPoolExecutor) -> None:
        self._server, self._others = server, others
        self.sent = [others.submit(completions, server)]

    def until(self, condition: Callable[[], bool]) -> None:
        """Whether rows wait for the host at a given moment depends on how fast the machine is."""

        def held() -> bool:
            if self.sent[-1].done():
                self.sent.append(self._others.submit(completions, self._server))
            return condition()

        eventually(held, START_S)

    def answers(self) -> list[list[str]]:
        return [crowd.result() for crowd in self.sent]


def host(server: Server, name: str) -> float:
    (value,) = server.metrics(f"weft:host_attention_{name}{{")
    return value


def stopped_with_rows(server: Server, worker: psutil.Process) -> bool:
    """Stop the worker; if no row waits for it then, let it go on."""
    os.kill(worker.pid, signal.SIGSTOP)
    time.sleep(0.05)  # of steps, which tell how many wait
    if host(server, "queue") > 0:
        return True
    os.kill(worker.pid, signal.SIGCONT)
    return False


def expect_host_tokens(server: Server) -> None:
    """The counters agree that the host has computed."""
    eventually(server.idle)
    assert host(server, "tokens_total") > 0
    assert host(server, "queue") == 0
    calls, jobs = host(server, "calls_total"), host(server, "jobs_total")
    assert jobs >= max(calls, 4 * host(server, "tokens_total")), "a job for each layer"
    busy, round_trip = host(server, "busy_seconds_total"), host(server, "round_trip_seconds_total")
    assert busy > 0
    assert round_trip > 0
    assert host(server, "step_slowdown") >= 1
    assert host(server, "step_surplus_seconds") >= 0


@pytest.mark.parametrize("host_process", [False, True])
def test_best_effort_decodes_on_the_host_to_the_same_tokens(
    host_process, expected, piggybacking, tmp_path
):
    given = ["--host-threads", "1", *(["--host-process"] if host_process else [])]
    where = "process weft-host" if host_process else "the engine's process"
    words = f"best effort that gives way decodes on the host: 1 thread of {where} attends there"
    with serving(tmp_path, *piggybacking, *given) as server, ThreadPoolExecutor(1) as others:
        info = httpx.get(f"{server.url}/server_info").json()["engine"]
        assert info["host_attention"] == words
        assert words in server.errors.read_text()
        assert ("weft-host" in server.children()) == host_process
        crowd = others.submit(completions, server)
        eventually(lambda: server.metrics("weft:num_requests_running")[0] > 0, START_S)
        assert completions(server, "default") == expected
        assert crowd.result() == expected
        expect_host_tokens(server)


def test_the_process_may_be_stopped_and_killed(expected, piggybacking, tmp_path):
    """Stopped, it holds up only those for whom it attends; killed, nobody notices."""
    with (
        serving(tmp_path, *piggybacking, "--host-process") as server,
        ThreadPoolExecutor(1) as others,
    ):
        crowds = Crowds(server, others)
        crowds.until(lambda: host(server, "tokens_total") > 0)
        worker = server.children()["weft-host"]

        crowds.until(lambda: stopped_with_rows(server, worker))
        assert completions(server, "default") == expected
        assert not crowds.sent[-1].done()
        worker.kill()
        assert all(answers == expected for answers in crowds.answers())
        assert host(server, "restarts_total") >= 1
        assert server.metrics("weft:engine_restarts_total") == [0]
        expect_host_tokens(server)


def test_info_and_refusals_say_what_attends_on_the_host(call, piggybacking):
    told = json.loads(call("info", "--json", *piggybacking, "--host-threads", "2").stdout)
    words = "best effort that gives way decodes on the host: 2 threads of the engine's process"
    assert told["memory"]["host_attention"] == f"{words} attend there"
    assert words in call("info", *piggybacking, "--host-threads", "2").stdout
    without = call("serve", *COMMON, "--scheduler", "slo-piggyback")
    refused(without, "keeps KV on the host", "set host_kv_memory")
    refused(call("serve", *COMMON, "--host-threads", "2"), "slo-piggyback or load-aware")


def test_an_engine_that_is_killed_with_rows_on_the_host_loses_no_token(
    expected, piggybacking, tmp_path
):
    """Its worker ends with it, and the next engine has one of its own."""
    with (
        serving(tmp_path, *piggybacking, "--host-process") as server,
        ThreadPoolExecutor(1) as others,
    ):
        crowds = Crowds(server, others)
        crowds.until(lambda: host(server, "tokens_total") > 0)
        worker = server.children()["weft-host"]
        server.children()["weft-engine"].kill()
        assert all(answers == expected for answers in crowds.answers())
        eventually(lambda: server.metrics("weft:engine_restarts_total") == [1], START_S)
        eventually(lambda: not lives(worker))
        eventually(lambda: "weft-host" in server.children(), START_S)
        assert server.children()["weft-host"].pid != worker.pid
        eventually(server.idle)


@pytest.mark.parametrize("host_process", [False, True])
def test_steps_overlap_with_attention_on_the_host_to_the_same_tokens(
    host_process, ample, overlapping, tmp_path
):
    given = ["--host-threads", "1", *(["--host-process"] if host_process else [])]
    where = "process weft-host" if host_process else "the engine's process"
    words = f"what gives way decodes on the host: 1 thread of {where} attends there"
    with serving(tmp_path, *overlapping, *given) as server:
        info = httpx.get(f"{server.url}/server_info").json()["engine"]
        assert info["host_attention"] == words
        assert words in server.errors.read_text()
        assert completions(server) == ample[0]
        assert completions(server, **TWO) == ample[1]
        expect_host_tokens(server)


def test_a_process_that_is_killed_within_steps_is_not_noticed(expected, overlapping, tmp_path):
    with (
        serving(tmp_path, *overlapping, "--host-process") as server,
        ThreadPoolExecutor(1) as others,
    ):
        crowd = others.submit(completions, server)
        eventually(lambda: host(server, "tokens_total") > 0, START_S)
        for killed in range(1, 4):
            eventually(lambda: "weft-host" in server.children(), START_S)
            server.children()["weft-host"].kill()
            eventually(lambda least=killed: host(server, "restarts_total") >= least, START_S)
        assert crowd.result() == expected
        assert completions(server) == expected
        assert server.metrics("weft:engine_restarts_total") == [0]
        expect_host_tokens(server)


WORKER = "weft.kernels.cpu.host_process"  # the module that the process runs
ENDS_IF = """
import os
if module in sys.orig_argv and {condition}:
    os._exit(3)
"""


@pytest.mark.parametrize("kind", ["piggybacking", "overlapping"])
def test_jobs_that_end_every_worker_end_the_engine_and_lose_no_token(
    kind, expected, request, tmp_path
):
    """Whoever waits for the host would wait for ever; the next engine starts with a fresh one."""
    flag = tmp_path / "no-worker"
    ending = ENDS_IF.format(condition=f"os.path.exists({str(flag)!r})")
    given = [*request.getfixturevalue(kind), "--host-process"]
    with (
        serving(tmp_path, *given, inside={WORKER: ending}) as server,
        ThreadPoolExecutor(1) as others,
    ):
        crowds = Crowds(server, others)
        crowds.until(lambda: host(server, "tokens_total") > 0)
        flag.touch()
        server.children()["weft-host"].kill()
        words = "The host worker ended 6 times in a row without a result, at last by exit code 3."
        crowds.until(lambda: words in server.errors.read_text())
        next_one = "The next engine failed and is tried again: The host worker cannot be started"
        eventually(lambda: next_one in server.errors.read_text(), START_S)
        flag.unlink()
        assert all(answers == expected for answers in crowds.answers())
        assert server.metrics("weft:engine_restarts_total") >= [1]


def test_a_worker_process_that_cannot_start_is_said_so(piggybacking, tmp_path):
    variables = with_engines(tmp_path, inside={WORKER: ENDS_IF.format(condition=True)})
    done = run("serve", "--port", "0", *piggybacking, "--host-process", **variables)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    said = "weft: The host worker cannot be started: it ended by exit code 3"
    assert done.stderr.splitlines()[-1].startswith(said)


def test_who_overlaps_without_costs_or_a_host_tier_is_told(call, overlapping, tmp_path):
    words = "what gives way decodes on the host: 2 threads of the engine's process attend there"
    assert words in call("info", *overlapping, "--host-threads", "2").stdout
    without = call("serve", *COMMON, "--scheduler", "load-aware")
    refused(without, "keeps KV on the host", "set host_kv_memory")
    unknown = ["--scheduler", "load-aware", "--profile", str(tmp_path / "none.json")]
    refused(run("serve", *COMMON, *TIGHT, *unknown), "weft profile")


def test_ranks_carry_the_same_rows_though_the_worker_of_one_is_killed(tmp_path):
    """Each rank has a worker process; the tokens are those of ranks without a host."""
    ranks = ["--tensor-parallel", "2", "--threads", "1"]
    with serving(tmp_path, *COMMON, *ranks) as server:
        wanted = completions(server)
    given = piggybacking_on(made_up_costs(tmp_path, tensor_parallel=2))
    with serving(tmp_path, *given, *ranks, "--host-process") as server:
        info = httpx.get(f"{server.url}/server_info").json()["engine"]
        assert info["host_attention"].endswith(
            "1 thread of a process weft-host of each rank attends there"
        )
        with ThreadPoolExecutor(1) as others:
            crowd = others.submit(completions, server)
            eventually(lambda: host(server, "tokens_total") > 0, START_S)
            (worker,) = (
                process
                for process in psutil.Process(server.process.pid).children(recursive=True)
                if command_of(process)[:1] == ["weft-host"]
                and command_of(process.parent())[:1] == ["weft-rank1"]
            )
            worker.kill()
            assert completions(server, "default") == wanted
            assert crowd.result() == wanted
        expect_host_tokens(server)
        assert server.metrics("weft:engine_restarts_total") == [0]
