"""Scheduler slo in a real engine: its profile, targets that cannot be met, and its answers."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest

from live import eventually, serving
from weft import LLM, SamplingParams
from weft.core.config import EngineConfig
from weft.core.errors import ConfigError, ProfileError
from weft.cost.curves import Curve
from weft.cost.fit import FEATURES, Fitted
from weft.engine.build import build_engine, choose_policy
from weft.engine.costs import profile_key
from weft.engine.model import find_model

SETTINGS = {"model": "builtin", "threads": 1, "max_model_len": 256, "kv_memory": 2**24}


@pytest.fixture
def profile(tmp_path):
    """A profile of the built-in model: 10 ms a step and 0.1 ms a token, measured nowhere."""
    config = EngineConfig(**SETTINGS)
    key = profile_key(config, find_model(config))
    curve = Curve((1, 1024), (0.01, 0.11))
    path = tmp_path / "profile.json"
    Fitted(key, 4, curve, dict.fromkeys(FEATURES, 0.0)).save(path)
    return str(path)


def test_without_a_profile_the_error_names_the_command(tmp_path):
    config = EngineConfig(**SETTINGS, scheduler="slo", profile=str(tmp_path / "none.json"))
    words = r"weft profile --model builtin --threads 1 --profile .*none.json"
    with pytest.raises(ProfileError, match=words):
        build_engine(config)


def test_a_target_that_no_load_can_meet_is_refused_at_start(profile):
    classes = {"interactive": {"tpot_s": 0.01}}
    config = EngineConfig(**SETTINGS, scheduler="slo", profile=profile, classes=classes)
    with pytest.raises(ConfigError, match=r"'interactive' has tpot_s 0.01, .* takes 0.01 s"):
        build_engine(config)


def test_such_a_target_ends_no_server_that_chooses_by_itself(profile, caplog):
    """A later engine of a server meets a profile that the first one did not have."""
    classes = {"interactive": {"tpot_s": 0.01}}
    config = EngineConfig(**SETTINGS, profile=profile, classes=classes)
    engine = build_engine(config)
    choice = choose_policy(config, engine)
    assert (choice.policy, engine.scheduler.policy.name) == ("fcfs", "fcfs")
    assert "no load can meet it. Raise it to 0.01" in choice.describe()
    assert any("stays with fcfs" in text for text in caplog.messages)
    engine.close()


def test_the_answers_are_those_of_fcfs(profile):
    prompts = ["import os\n", "def add(a, b):\n", "class Stack:\n"]
    params, answers = SamplingParams(temperature=0, max_tokens=12), []
    for more in ({}, {"scheduler": "slo", "profile": profile}):
        with LLM(**SETTINGS, **more) as llm:
            answers.append([one.text for one in llm.generate(prompts, params)])
    assert answers[0] == answers[1]


def test_a_server_measures_itself_while_idle_and_keeps_targets_from_then_on(tmp_path, monkeypatch):
    """Answers stay the same meanwhile; the next start knows the costs already."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked = {"model": "builtin", "prompt": "def add(a, b):\n", "max_tokens": 12, "temperature": 0}
    texts, policies = [], []
    with serving(tmp_path, "--self-profile-s", "2") as server:
        end = time.monotonic() + 120
        while time.monotonic() < end and policies[-1:] != ["slo"]:
            answer = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60)
            texts.append(answer.raise_for_status().json()["choices"][0]["text"])
            info = httpx.get(f"{server.url}/server_info").json()["engine"]["scheduling"]
            policies.append(info["policy"])
            time.sleep(0.3)
        assert server.idle()
        said = server.errors.read_text()
    assert (policies[0], policies[-1]) == ("fcfs", "slo")
    assert len(set(texts)) == 1
    assert info["targets"]["interactive"]["ttft_s"] > info["targets"]["priority"]["tpot_s"] > 0
    assert "scheduling by fcfs, as there is no profile" in said
    assert "scheduling by slo" in said
    with serving(tmp_path, "--self-profile-s", "2") as server:
        info = httpx.get(f"{server.url}/server_info").json()["engine"]["scheduling"]
        assert info["policy"] == "slo"
        assert "scheduling by slo" in server.errors.read_text()


def test_an_administrator_changes_targets_and_a_killed_engine_loses_none(tmp_path, profile):
    keys = tmp_path / "keys"
    keys.write_text("admin:secret-a\nuser:secret-u\n")
    given = ("--profile", profile, "--api-key-file", str(keys), "--admin-key", "admin")
    with serving(tmp_path, *given) as server:
        http = httpx.Client(
            base_url=server.url, headers={"authorization": "Bearer secret-a"}, timeout=60
        )

        def change(body: dict) -> httpx.Response:
            return http.put("/v1/targets", json=body)

        derived = shown(http.get("/v1/targets"))
        tpot_s = 3 * derived["interactive"][1]
        wanted = {"interactive": {"ttft_s": 7.0, "tpot_s": tpot_s}}
        assert shown(change({"classes": wanted}))["interactive"] == (7.0, tpot_s)
        refused = change({"classes": {"interactive": {"tpot_s": 1e-5}}})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "classes")
        assert "no load can meet it. Raise it to 0.01" in refused.json()["error"]["message"]
        misspelt = change({"classes": {"interactiv": {"tpot_s": 1}}}).json()["error"]["message"]
        assert "Did you mean 'interactive'?" in misspelt
        user = {"authorization": "Bearer secret-u"}
        assert http.put("/v1/targets", json={}, headers=user).status_code == 403
        killed = server.children()["weft-engine"]
        killed.kill()
        eventually(lambda: server.children().get("weft-engine", killed) != killed, 60)
        eventually(lambda: http.get("/ready").status_code == 200, 60)
        assert shown(http.get("/v1/targets"))["interactive"] == (7.0, tpot_s)
        assert shown(change({}))["interactive"] == derived["interactive"]


def test_a_standby_that_is_older_than_the_profile_takes_over_with_it(tmp_path, profile):
    """Under steady load it has no idle moment in which it could find it later."""
    profile, later = Path(profile), tmp_path / "later.json"
    given = ("--standby", "--profile", str(later), "--log-level", "info")
    with serving(tmp_path, *given) as server:

        def policy() -> str:
            info = httpx.get(f"{server.url}/server_info", timeout=60).json()
            return info["engine"]["scheduling"]["policy"]

        looked = f"There is no profile of costs at {later}"
        eventually(lambda: server.errors.read_text().count(looked) == 2, 60)
        assert policy() == "fcfs"
        profile.rename(later)
        standby, killed = (server.children()[f"weft-{one}"] for one in ("standby", "engine"))
        killed.kill()
        eventually(lambda: server.children().get("weft-engine") == standby, 60)
        eventually(lambda: httpx.get(f"{server.url}/ready").status_code == 200, 60)
        assert policy() == "slo"
        targets = httpx.get(f"{server.url}/server_info").json()["engine"]["scheduling"]["targets"]
        assert targets["interactive"]["ttft_s"] > 0


def shown(answer: httpx.Response) -> dict[str, tuple[float | None, float | None]]:
    rows = answer.raise_for_status().json()["classes"]
    return {row["name"]: (row["ttft_s"], row["tpot_s"]) for row in rows}
