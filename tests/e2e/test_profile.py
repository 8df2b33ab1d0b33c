"""``weft profile`` on the built-in model: real steps, the real executor, a file that loads."""

from __future__ import annotations

import json

import pytest

from live import run
from weft.core.config import EngineConfig
from weft.core.errors import ProfileError
from weft.cost.fit import Fitted, profile_path
from weft.cost.work import Work
from weft.engine.costs import profile_key
from weft.engine.model import find_model

SMALL = ["--threads", "1", "--max-model-len", "128", "--max-num-seqs", "4"]
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
