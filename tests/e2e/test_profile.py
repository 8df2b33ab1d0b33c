"""``weft profile`` on the built-in model: real steps, the real executor, a file that loads."""

from __future__ import annotations

import json
import shlex
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from live import START_S, Server, eventually, run, serving
from weft.core.config import EngineConfig
from weft.core.errors import ProfileError
from weft.cost.fit import Fitted, profile_path
from weft.cost.work import Work
from weft.engine.costs import measured_costs, profile_key
from weft.engine.model import find_model

SMALL = ["--threads", "1", "--max-model-len", "128", "--max-num-seqs", "4"]
TIER = ["--device", "cpu", "--host-kv-memory", "4MiB", "--kv-memory", "1MiB"]
HOST = ["--host-threads", "1", "--max-model-len", "128"]
SMALL += ["--max-num-batched-tokens", "64", "--repeats", "20", "--steps", "20"]


def test_a_profile_is_measured_kept_and_found_again(tmp_path, monkeypatch):
    done = run("profile", *SMALL, XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    for words in ("accuracy, held out", "machine repeats itself", "goal", "written to"):
        assert words in done.stdout
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = EngineConfig(threads=1)
    key = profile_key(config, find_model(config))
    path = profile_path(key)
    fitted = Fitted.load(path, key)
    assert fitted.layers == 6
    small, large = Work(), Work()
    small.add(10, 1)
    large.add(0, 60)
    assert fitted.terms(small).total > 0
    assert fitted.terms(large).total > 0
    report = json.loads(path.read_text())["report"]
    if report["repeatability"]["p90"] > 0.9:  # a busy machine measures itself, not the steps
        assert fitted.terms(small).total < fitted.terms(large).total < 1
        assert report["held_out"]["average"] > 0.5
    assert len([p for p in report["points"] if p["use"] == "held out"]) == 10

    other = EngineConfig(threads=1, quantize="int8")
    with pytest.raises(ProfileError, match=r"dtype is '\w+', not '\w+ int8/64'"):
        Fitted.load(path, profile_key(other, find_model(other)))


def test_the_command_that_a_refused_server_names_measures_what_it_lacks(tmp_path):
    path = tmp_path / "costs.json"
    given = ["--dtype", "float32", "--threads", "1", "--quantize", "int8", "--profile", str(path)]
    refused = run("serve", "--port", "0", "--scheduler", "slo", *given)
    assert refused.returncode == 1
    command = shlex.split(refused.stderr.partition("Make one with: weft ")[2])
    done = run(*command, *SMALL)
    assert done.returncode == 0, done.stderr
    mapping = {"dtype": "float32", "threads": 1, "quantize": "int8", "profile": str(path)}
    config = EngineConfig.from_mapping(mapping)
    assert measured_costs(config, find_model(config)).layers == 6


def test_a_profile_that_cannot_be_written_is_refused_before_the_work(call, tmp_path):
    (tmp_path / "file").touch()
    done = call("profile", "--profile", str(tmp_path / "file" / "profile.json"))
    assert done.returncode == 2
    assert "Cannot make" in done.stderr
    done = call("profile", "--repeats", "3")
    assert done.returncode == 2
    assert "repeats" in done.stderr


def test_launches_are_measured_on_a_gpu_alone(call, tmp_path):
    done = call("profile", "--tune", "--device", "cpu", "--tuning", str(tmp_path / "gpu.json"))
    assert done.returncode == 1
    assert "Launches are measured on a GPU" in done.stderr
    assert not list(tmp_path.iterdir())


def served_costs(tmp_path, path, *given: str) -> str:
    """What the start lines, /server_info and ``weft info`` say of the host tier's costs."""
    given = (*TIER, *HOST, "--scheduler", "slo-piggyback", "--profile", str(path), *given)
    with serving(tmp_path, *given, "--slo-admission", "off") as server:
        told = httpx.get(f"{server.url}/server_info").json()["engine"]["host_costs"]
        assert told in server.errors.read_text()
        best_effort_decodes_on_the_host(server)
    info = json.loads(run("info", "--json", *given).stdout)
    assert info["scheduling"]["host_costs"] == told
    return told


def best_effort_decodes_on_the_host(server: Server) -> None:
    """More sequences than the device holds all get their tokens, some of the host in the end."""

    def ask(number: int) -> int:
        body = {"model": "builtin", "prompt": [7 + number] * 60, "ignore_eos": True}
        body |= {"service_tier": "flex", "max_tokens": 60}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=START_S)
        return answer.json()["usage"]["completion_tokens"]

    def crowd_gets_some() -> bool:
        with ThreadPoolExecutor(8) as clients:
            assert list(clients.map(ask, range(8))) == [60] * 8
        return server.metrics("weft:host_attention_tokens_total")[0] > 0

    eventually(crowd_gets_some, START_S)


def test_the_host_tier_is_measured_and_planned_with(tmp_path):
    """With its threads and transport alone; a profile of an older version is refused."""
    path = tmp_path / "host.json"
    done = run("profile", *SMALL, *TIER, "--host-threads", "1", "--profile", str(path))
    assert done.returncode == 0, done.stderr
    assert "host tier: 1 thread of the engine" in done.stdout
    for words in ("moves to the host:", "steps with host rows, held out", "round trips, held out"):
        assert words in done.stdout
    for words in ("one sub-batch, held out", "two sub-batches, held out", "of waits"):
        assert words in done.stdout
    host = Fitted.load(path).hosts["1 thread of the engine"]
    overlapped = json.loads(path.read_text())["report"]["host"]["overlapped"]
    held_out = [bool(p["second"]) for p in overlapped["points"] if p["use"] == "held out"]
    assert held_out == [False, True] * 4
    assert host.overlap is not None
    assert host.overlap._asdict() == overlapped["cost"]
    assert min(map(min, host.attention.seconds)) > 0
    assert min(*host.out, *host.back) >= 0  # a busy machine may show no slope for moves so short
    assert served_costs(tmp_path, path) == "costs of the host tier are measured"
    other = served_costs(tmp_path, path, "--host-process")
    assert "assumed (the profile has 1 thread of the engine, not 1 thread of weft-host" in other
    path.write_text(path.read_text().replace('"version": 4', '"version": 3'))
    refused = run("serve", *TIER, *HOST, "--scheduler", "slo-piggyback", "--profile", str(path))
    assert refused.returncode == 1
    assert "has version 3, not 4. Make one with: weft profile" in refused.stderr
