"""Whether steps are computed in halves: by settings, device and profile, with a sentence for it."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from halved import SIZES, use_halves
from test_graphs import packaged

from weft.batch.choice import choose_order
from weft.core.config import EngineConfig
from weft.core.errors import ConfigError
from weft.cost.curves import Curve
from weft.cost.fit import FEATURES, Fitted, ProfileKey
from weft.cost.interference import Interference, Speeds
from weft.engine import costs, halves, profiling
from weft.engine.halves import choose_halves
from weft.engine.info import collect_info, format_info
from weft.engine.model import find_model, resolve_settings
from weft.engine.profiling import profile_engine, profiled_config
from weft.models.host_part import HostPart

GAINING = Speeds(33, 0.8, 0.7, 0.9, 1e-4, 1.25)
COSTS = dict.fromkeys(FEATURES, 0.0) | {"decode_context": 1e-8}
DENSE = Curve((1, 2048), (4e-3, 33e-3))


@pytest.fixture
def model(monkeypatch):
    """The built-in model, as if a GPU were to compute it."""
    monkeypatch.setattr(costs, "device_name", lambda _: "NVIDIA H200")
    return replace(find_model(EngineConfig(device="cpu")), device="cuda:0")


def config_of(path: Path | None = None, **settings) -> EngineConfig:
    profile = None if path is None else str(path)
    return EngineConfig(profile=profile, max_num_batched_tokens=2048, **settings)


def keep(path: Path, model, speeds: Speeds | None, dense: Curve = DENSE) -> None:
    """Write a profile for the model."""
    key = costs.profile_key(config_of(), model)
    found = None if speeds is None else Interference((Speeds(0, 0.5, 0.5), speeds))
    Fitted(key, 6, dense, COSTS, interference=found).save(path)


def test_auto_splits_by_a_profile_that_has_measured_a_gain(model, tmp_path) -> None:
    path = tmp_path / "profile.json"
    keep(path, model, GAINING)
    found = choose_halves(config_of(path), model)
    assert (found.sizes, found.programs) == ((128, 256, 384, 512), 33)
    assert found.rule is not None
    assert found.rule.speeds == GAINING
    assert "with 33 programs of attention" in found.why
    assert "1.25 times as fast in halves" in found.why
    uncaptured = choose_halves(config_of(path, graphs=False), _keyed(model, path, graphs=False))
    assert uncaptured.sizes == ()


def _keyed(model, path: Path, **settings):
    """The model, with its profile kept again for other settings."""
    read = Fitted.load(path)
    replace(read, key=costs.profile_key(config_of(**settings), model)).save(path)
    return model


@pytest.mark.parametrize(
    ("speeds", "dense", "why"),
    [
        (None, DENSE, "has nothing of halves; measure them with: weft profile"),
        (GAINING._replace(gain=1.03), DENSE, "1.03 times as fast in halves"),
        (GAINING, Curve((1, 2048), (4e-3, 4e-3)), "never leave the compute ridge"),
    ],
)
def test_auto_runs_whole_where_nothing_was_gained(model, tmp_path, speeds, dense, why) -> None:
    path = tmp_path / "profile.json"
    keep(path, model, speeds, dense)
    found = choose_halves(config_of(path), model)
    assert found.rule is None
    assert found.why.startswith("steps run whole: ")
    assert why in found.why


def test_without_a_profile_only_on_splits(model, tmp_path) -> None:
    path = tmp_path / "none.json"
    auto = choose_halves(config_of(path), model)
    assert auto.rule is None
    assert "There is no profile of costs" in auto.why
    on = choose_halves(config_of(path, overlap="on"), model)
    assert on.rule is not None
    assert on.rule.speeds is on.programs is None
    assert on.why.startswith("steps from 256 tokens on run in halves, unmeasured: There is no")
    assert choose_halves(config_of(path, overlap="off"), model) == halves.HalvesChoice()


def test_layers_that_wait_for_experts_on_the_host_are_not_halved(model, tmp_path) -> None:
    path = tmp_path / "profile.json"
    hosting = replace(model, host=HostPart(frozenset({1}), model.ops, lambda _: None))
    found = choose_halves(config_of(path), hosting)
    assert found.rule is None
    assert "experts on the host" in found.why
    with pytest.raises(ConfigError, match="with host_experts each layer waits"):
        choose_halves(config_of(path, overlap="on"), hosting)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"device": "cpu"}, "device is 'cpu': all cores compute either half already"),
        ({"tensor_parallel": 2}, "tensor_parallel is 2, and halves are for one process"),
        ({"resident": "on"}, "steps that nobody plans are not split"),
        ({"scheduler": "load-aware", "host_kv_memory": 2**30}, "has sub-batches of its own"),
        ({"scheduler": "slo-piggyback", "host_kv_memory": 2**30}, "has sub-batches of its own"),
    ],
)
def test_on_is_refused_where_steps_cannot_be_split(model, settings, why) -> None:
    """And auto is off there, in words."""
    with pytest.raises(ConfigError, match=why) as refused:
        config_of(overlap="on", **settings)
    assert refused.value.param == "overlap"
    assert "leave overlap at 'auto'" in refused.value.message
    found = choose_halves(config_of(**settings), model)
    assert found.rule is None
    assert why in found.why


def test_a_cpu_has_no_halves() -> None:
    model = find_model(EngineConfig(device="cpu"))
    assert choose_halves(config_of(), model) == halves.HalvesChoice()
    with pytest.raises(ConfigError, match="but the CPU computes here"):
        choose_halves(config_of(overlap="on"), model)


def test_info_says_whether_steps_are_split(monkeypatch) -> None:
    config = EngineConfig(device="cpu")
    whole = collect_info(config)
    assert whole["halves"] == ""
    assert "halves" not in format_info(whole)
    choice = halves.HalvesChoice("steps run in halves", (128,), None, halves.Halves((), 2, None))
    monkeypatch.setattr("weft.engine.info.choose_halves", lambda *_: choice)
    assert "halves     steps run in halves" in format_info(collect_info(config))


def test_the_memory_of_halves_is_set_aside(monkeypatch) -> None:
    monkeypatch.setattr("weft.engine.model.is_cpu", lambda _: False)
    config = EngineConfig(device="cpu", dtype="float32", kv_memory=2**22)
    (whole, _), (halved, resolved) = (resolve_settings(config, halves=h) for h in (False, True))
    more = halved.facts.workspace_bytes - whole.facts.workspace_bytes
    assert more > 4 * 1024 * whole.spec.hidden_size
    assert resolved.half_sizes is None


def test_an_engine_measures_its_halves(monkeypatch) -> None:
    """On a device that stands in, whose times mean nothing but which runs every step."""
    counts = use_halves(monkeypatch, 1)
    monkeypatch.setattr(profiling, "attention_limits", lambda _: (2, 0))
    settings = {"max_model_len": 96, "max_num_seqs": 8, "max_num_batched_tokens": 24}
    known = Fitted(ProfileKey("", "", "", "", ""), 6, DENSE, COSTS | {"decode_context": 1e-4})
    monkeypatch.setattr(profiling, "profile", lambda *_: (known, {}))
    config = EngineConfig(
        device="cpu", dtype="float32", threads=1, kv_memory=2**22, resident="off", **settings
    )
    key, fitted, report = profile_engine(config, SimpleNamespace(repeats=2))
    assert isinstance(key, ProfileKey)
    assert [speeds.programs for speeds in fitted.interference.at] == [2, 0]
    assert [row["programs"] for row in report["interference"]["limits"]] == [2, 0]
    assert counts["captured"] + counts["uncaptured"] > 100
    shapes = replace(known, coefficients=dict.fromkeys(FEATURES, 0.0))
    monkeypatch.setattr(profiling, "profile", lambda *_: (shapes, {}))
    _, fitted, report = profile_engine(config, SimpleNamespace(repeats=2))
    assert fitted.interference is None
    assert "too little attention" in report["interference"]["problem"]


def test_a_batch_is_blended_where_steps_overlap(monkeypatch) -> None:
    """By what the engine says of itself."""
    use_halves(monkeypatch)
    with packaged(resident="off") as llm:
        served = llm.engine.served
        assert served.halves == "split"
        assert llm.engine.built.resolved.half_sizes == SIZES
    chosen = choose_order("auto", asdict(served), forecast=True, weighed=True)
    assert chosen.kind == "blend"
    whole = asdict(replace(served, overlaps=False))
    assert choose_order("auto", whole, forecast=True, weighed=True).kind == "dfs"


def test_a_gpu_is_profiled_with_halves(monkeypatch) -> None:
    monkeypatch.setattr(profiling, "pick_device", lambda _: "cuda:0")
    assert profiled_config({}).overlap == "on"
    assert profiled_config({"overlap": "off"}).overlap == "off"
    assert profiled_config({"tensor_parallel": 2}).overlap == "auto"
    monkeypatch.setattr(profiling, "pick_device", lambda _: "cpu")
    assert profiled_config({}).overlap == "auto"
