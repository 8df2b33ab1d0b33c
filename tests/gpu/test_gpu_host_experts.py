"""Experts on the host beside a device: the tokens of the whole model there, captured and not."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from checkpoints import build, prompt, save
from served import Truth, opened, serve, settings_for, told
from test_models_blocks import FINE, fine
from test_models_quant import rewritten

import where
from weft.core.config import EngineConfig
from weft.core.errors import ConfigError, HostWorkerError, OutOfMemoryError
from weft.core.logs import NOTICES
from weft.core.types import SamplingParams
from weft.engine import host_experts
from weft.engine.costs import profile_command, profile_key
from weft.engine.host_experts import kept_settings
from weft.engine.info import collect_info, format_info
from weft.engine.model import check_host_memory, find_model, resolve_settings
from weft.engine.profiling import profiled_config
from weft.exec import hosted_experts
from weft.exec.workspace import expert_rows_bytes
from weft.kernels.cpu import expert_server
from weft.kernels.cpu.expert_server import ExpertServer
from weft.kernels.hosted import HostedExperts
from weft.kernels.ops import select_ops
from weft.kernels.storage import Storage
from weft.kernels.triton import hosted
from weft.models.host_part import HostPart
from weft.models.kept_weights import KeptWeights
from weft.models.layout import storage_of
from weft.models.loader import load_model
from weft.models.packed_cache import PackedCache
from weft.models.quant_config import StoredWeights

TOLERANCE = 5e-4  # as in test_gpu_families
GREEDY = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True, seed=0)
DRAWN = SamplingParams(temperature=0.9, seed=3, max_tokens=7, ignore_eos=True)
SCORED = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, seed=0, prompt_logprobs=0)
# One longer than a step and than every captured one, so in chunks; one of a token.
PROMPTS = [prompt(90, 1), [5], prompt(20, 2), prompt(7, 3)]
MIXED, DENSE = "qwen3-moe-mixed", "llama-gqa"
FAMILIES = ["qwen3-moe", MIXED, "gemma4-moe-key-is-value", "qwen2-moe"]  # the last two beside MLPs


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("experts")
    return {name: save(build(name), root / name) for name in (*FAMILIES, DENSE)}


@pytest.fixture(autouse=True)
def _device_that_stands_in(monkeypatch):
    """Also the native kernels compute for a device, op by op."""
    monkeypatch.setattr(host_experts, "DEVICE_KERNELS", ("triton", "cpu"))


def answers(engine):
    found = serve(engine, PROMPTS, [GREEDY, DRAWN, GREEDY, GREEDY])
    return found + serve(engine, [PROMPTS[0][:70]], [SCORED])


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_of_the_host_give_the_tokens_of_the_model(folders, family) -> None:
    """Of all layers and of one, in captured steps and uncaptured ones, bit for bit."""
    folder, found = folders[family], {}
    truth = Truth(folder)
    for wish, graphs in (("all", True), ("all", False), ("1", True)):
        with opened(folder, graphs=graphs, host_experts=wish) as engine:
            assert (engine.executor.captured > 0) == graphs
            found[wish, graphs] = answers(engine)
            server = engine.executor._functions.experts.server
            assert server.answers > 0
            assert server.rows > 0
            spec, most = engine.model.spec, engine.executor._packer.max_tokens
            assert pinned_for_experts(engine) == expert_rows_bytes(spec, 4, most)
            assert engine.model.facts.pinned_bytes == expert_rows_bytes(spec, 4, 48)
    captured, uncaptured = found["all", True], found["all", False]
    assert [a.tokens for a in captured] == [a.tokens for a in uncaptured]
    assert torch.equal(told(captured[-1]), told(uncaptured[-1]))
    for several in (captured, found["1", True]):
        for number in (0, 2, 3):
            assert truth.miss(PROMPTS[number], several[number]) < TOLERANCE
        assert truth.gap(PROMPTS[0][:70], several[-1]) < TOLERANCE


@pytest.mark.parametrize("family", ["qwen3-moe", "qwen2-moe"])
def test_the_kernels_of_gpus_wait_for_the_host(folders, family) -> None:
    """Uncaptured here, as each run is interpreted; the layers are fused ones."""
    given, asked = [prompt(20, 2), [5]], [replace(GREEDY, max_tokens=2)] * 2
    settings = {"kernels": "triton", "graphs": where.ON_GPU, "host_experts": "2"}
    with opened(folders[family], **settings) as engine:
        assert engine.executor._functions.experts._await_answer is hosted.await_answer
        found = serve(engine, given, asked)
    truth = Truth(folders[family])
    assert max(truth.miss(*pair) for pair in zip(given, found, strict=True)) < TOLERANCE


@pytest.mark.parametrize("rounding", ["int8", "int4"])
def test_experts_that_are_rounded_on_the_host_alone(folders, rounding) -> None:
    """As the CPU computes with them."""
    more = {"host_experts": "all", "host_quantize": rounding, "quantize_group": 32}
    with opened(folders["qwen3-moe"], **more) as engine:
        found = serve(engine, PROMPTS[:1], [SCORED])
        layer = engine.executor._decoder.layers[0]
        assert layer.expert_down.down[0].format == rounding
        assert getattr(layer.qkv, "format", "float32") == "float32"
        assert engine.model.facts.host_weight_bytes == nbytes_on_host(engine)
    gap = Truth(folders["qwen3-moe"]).gap(PROMPTS[0], found[0])
    assert TOLERANCE < gap < {"int8": 0.1, "int4": 1.0}[rounding]


def nbytes_on_host(engine) -> int:
    every = [layer.expert_down for layer in engine.executor._decoder.layers]
    layers = [experts for experts in every if isinstance(experts, HostedExperts)]
    return sum(one.nbytes for layer in layers for one in (*layer.gate_up, *layer.down))


def pinned_for_experts(engine) -> int:
    link = engine.executor._functions.experts
    tensors = [held for held in vars(link).values() if isinstance(held, torch.Tensor)]
    tensors += [link._answered.memory, link._gave_up.memory]
    return sum(tensor.nbytes for tensor in tensors if tensor is not link._tickets)


def test_leased_steps_reach_the_host(folders) -> None:
    """Steps that follow without plans give the tokens of planned ones."""
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, seed=0)
    found = []
    for resident in ("on", "off"):
        with opened(folders["qwen3-moe"], host_experts="all", resident=resident) as engine:
            assert engine.executor.resident == (resident == "on")
            found.append([a.tokens for a in serve(engine, PROMPTS[2:], [long, long])])
    assert found[0] == found[1]


def test_padding_costs_the_host_nothing(folders) -> None:
    """Of a step of three rows, which is captured for four, three are computed."""
    with opened(folders["qwen3-moe"], host_experts="all", prefix_caching=False) as engine:
        server = engine.executor._functions.experts.server
        before = server.rows
        serve(engine, [[5], [6], [7]], [GREEDY] * 3)
        assert server.rows - before == 3 * 3 * GREEDY.max_tokens  # layers, rows, steps


# -- hosts that fail ------------------------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["captured", "uncaptured"])
def engine(request, folders, monkeypatch):
    """With a watch that is soon impatient."""
    monkeypatch.setattr(expert_server, "ANSWER_S", 0.3)
    monkeypatch.setattr(expert_server, "CHECK_S", 0.05)
    monkeypatch.setattr(expert_server, "CLOSE_S", 0.1)
    more = {"graphs": request.param, "steps_in_flight": 0}
    with opened(folders["qwen3-moe"], host_experts="all", **more) as built:
        yield built


def test_a_host_that_hangs_is_a_typed_error(engine) -> None:
    server = engine.executor._functions.experts.server
    server._native.stop()
    start = time.monotonic()
    with pytest.raises(HostWorkerError, match=r"has not computed experts within 0 s\."):
        serve(engine, PROMPTS[2:3], [GREEDY])
    assert time.monotonic() - start < 10
    with pytest.raises(HostWorkerError, match="has not computed experts"):
        serve(engine, PROMPTS[3:], [GREEDY])


def test_a_host_thread_that_dies_is_a_typed_error(engine, monkeypatch) -> None:
    link = engine.executor._functions.experts
    send = link.send
    wild = lambda place, x, shares, experts: send(place, x, shares, experts + 99)  # noqa: E731
    monkeypatch.setattr(link, "send", wild)
    with pytest.raises(
        HostWorkerError, match=r"cannot compute experts any more: expert \d+ is none"
    ):
        serve(engine, PROMPTS[2:3], [GREEDY])


def test_a_device_does_not_wait_for_ever(engine, monkeypatch) -> None:
    """Not even if nobody watches."""
    monkeypatch.setattr(hosted_experts, "MOST_LOOKS", 100)
    if where.ON_GPU:  # what was captured looks as often as was said then
        engine.executor._steps.forward_graphs.clear()
    server = engine.executor._functions.experts.server
    server._closing.set()
    server._native.stop()
    with pytest.raises(HostWorkerError, match="has not computed the experts of a step in time"):
        serve(engine, PROMPTS[2:3], [GREEDY])


def test_a_host_that_fails_at_the_start_ends_the_start(folders, monkeypatch) -> None:
    monkeypatch.setattr(ExpertServer, "_serve", lambda self: self._give_up("No memory."))
    with (
        pytest.raises(HostWorkerError, match=r"No memory\."),
        opened(folders["qwen3-moe"], host_experts="all"),
    ):
        pass


# -- memory and what is refused -------------------------------------------------------------------


def config_of(folder, **more) -> EngineConfig:
    return EngineConfig(**settings_for(folder, **more))


def test_only_what_is_on_the_device_counts_there(folders) -> None:
    whole = find_model(config_of(folders["qwen3-moe"])).facts
    each = 6 * 3 * 64 * 40 * 4  # experts, matrices, and their size in float32
    for wish, layers in (("none", 0), ("1", 1), ("all", 3)):
        facts = find_model(config_of(folders["qwen3-moe"], host_experts=wish)).facts
        assert facts.host_weight_bytes == layers * each
        assert facts.weight_bytes == whole.weight_bytes - layers * each
    dense = find_model(config_of(folders[MIXED], host_experts="1")).host
    assert dense.layers == {1}  # of layers 1 and 3, the last is dense


@pytest.mark.parametrize(("room", "layers"), [(0, 0), (-1, 1), (-2.5, 3), (-9, 3)])
def test_auto_keeps_on_the_host_what_has_no_room(folders, monkeypatch, room, layers) -> None:
    """Room beside everything, in layers; below three of them it is not enough."""
    settings = {"kv_memory": 2**20, "host_experts": "auto"}
    facts = find_model(config_of(folders["qwen3-moe"], kv_memory=2**20)).facts
    each = 6 * 3 * 64 * 40 * 4
    free = facts.weight_bytes + facts.workspace_bytes + 2**20 + int(room * each)
    monkeypatch.setattr("weft.engine.model.free_memory", lambda _: free)
    model = find_model(config_of(folders["qwen3-moe"], **settings))
    assert (0 if model.host is None else len(model.host.layers)) == layers
    if room == -9:
        with pytest.raises(OutOfMemoryError, match="weights"):
            resolve_settings(config_of(folders["qwen3-moe"], **settings))


def test_auto_leaves_dense_models_and_cpus_alone(folders, monkeypatch) -> None:
    assert find_model(config_of(folders[DENSE], host_experts="auto")).host is None
    monkeypatch.setattr(host_experts, "DEVICE_KERNELS", ("triton",))
    assert (
        find_model(config_of(folders["qwen3-moe"], host_experts="auto", device="cpu")).host is None
    )


REFUSED = [
    ({"host_experts": "most"}, "none, auto, all or a number of layers from 1 on, not 'most'"),
    ({"host_experts": "0"}, "not '0'"),
    ({"host_experts": "4"}, "is 4, but the model has 3 layers with experts"),
    ({"host_experts": "all", "tensor_parallel": 2}, "tensor_parallel is 2"),
    ({"host_experts": "all", "pipeline_parallel": 2}, "pipeline_parallel is 2"),
    ({"host_experts": "all", "kernels": "reference"}, "kernels is 'reference'"),
    (
        {"host_experts": "all", "scheduler": "load-aware", "host_kv_memory": 2**20},
        "scheduler load-aware has the host attend, too",
    ),
    ({"host_quantize": "int8"}, "there are none; set host_experts"),
    ({"host_experts": "all", "dtype": "float16", "kernels": "triton"}, "in float16; set dtype"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_what_cannot_work_is_refused(folders, settings, message, monkeypatch) -> None:
    monkeypatch.setattr("weft.engine.model._choose_dtype", lambda config, *_: config.dtype)
    with pytest.raises(ConfigError, match=message):
        find_model(config_of(folders["qwen3-moe"], **settings))


def test_a_model_or_an_engine_without_two_places_is_refused(folders, monkeypatch) -> None:
    with pytest.raises(ConfigError, match="this llama model has none, only dense layers"):
        find_model(config_of(folders[DENSE], host_experts="all"))
    monkeypatch.setattr(host_experts, "DEVICE_KERNELS", ("triton",))
    with pytest.raises(ConfigError, match="compute everything in one place; leave it out"):
        find_model(config_of(folders["qwen3-moe"], host_experts="all", kernels="cpu", device="cpu"))


FP8 = StoredWeights("fp8", 8, None, zeros=False)
AWQ = StoredWeights("awq", 4, 32, zeros=True)
MXFP4 = StoredWeights("mxfp4", 4, 32, zeros=False)


@pytest.mark.parametrize(
    ("stored", "rounding", "message"),
    [
        (FP8, "auto", None),
        (FP8, "int4", None),
        (FP8, "none", None),
        (AWQ, "int8", r"quantised already \(awq int4, groups of 32\); leave host_quantize out"),
        (AWQ, "auto", None),
        (MXFP4, "auto", None),
    ],
)
def test_quantised_checkpoints_are_taken_as_far_as_a_cpu_goes(
    folders, stored, rounding, message
) -> None:
    config = config_of(folders["qwen3-moe"], host_experts="all", host_quantize=rounding)
    model = find_model(config_of(folders["qwen3-moe"]))
    given = replace(model.spec, stored_weights=stored), "float32", model.ops, model.facts
    if message is not None:
        with pytest.raises(ConfigError, match=message):
            host_experts.place_experts(config, *given)
        return
    facts, part = host_experts.place_experts(config, *given)
    assert part is not None
    kept = {
        (AWQ, "auto"): Storage(4, 32, "float16", zeros=True),
        (MXFP4, "auto"): Storage(8, 32),
        (FP8, "auto"): Storage(8, None),
        (FP8, "int4"): Storage(4, 64),
        (FP8, "none"): None,
    }[stored, rounding]
    each, kind = 3 * 64 * 40 * 4, "float32"
    if kept is not None:
        each = kept.nbytes(80, 64, gated=True) + kept.nbytes(64, 40)
        kind = f"int{kept.bits}"
    assert facts.host_weight_bytes == 3 * 6 * each
    spec = given[0]
    offloaded = host_experts.offloaded_model(config, spec, "float32", facts, part)
    assert offloaded.kind == kind
    assert offloaded.expert_bytes == each


@pytest.mark.parametrize("quantize", ["fp8", "fp8-head"])
def test_a_cpu_takes_int8_in_place_of_fp8(folders, quantize, monkeypatch) -> None:
    """By what is counted and predicted, and in a whole engine with the kernels of GPUs."""
    settings = {"kernels": "triton", "graphs": where.ON_GPU, "quantize": quantize}
    whole = find_model(config_of(folders["qwen3-moe"], **settings)).facts
    free = whole.weight_bytes + whole.workspace_bytes + 2**20 - 1  # without room for one layer
    auto = {"host_experts": "auto", "kv_memory": 2**20}
    config = config_of(folders["qwen3-moe"], **settings, **auto)
    with monkeypatch.context() as patch:
        patch.setattr("weft.engine.model.free_memory", lambda _: free)
        host = find_model(config).host
    assert kept_settings(config, host) == {"quantize": "int8/64", "experts": "of layers 2"}
    assert find_model(config).host is None  # where there is room
    given = prompt(20, 2)
    with opened(folders["qwen3-moe"], **settings, host_experts="1") as engine:
        assert engine.model.host.layers == {2}
        assert nbytes_on_host(engine) == engine.model.facts.host_weight_bytes
        lines = host_experts.predicted_lines(config, engine.model, "cpu")
        assert "experts of 1 of 3 layers on the host" in lines[0]
        assert " in int8, read at" in lines[0]
        first, *_, last = engine.executor._decoder.layers
        assert last.expert_down.down[0].format == "int8"
        assert first.expert_down.values.dtype == torch.float8_e4m3fn
        (found,) = serve(engine, [given], [replace(GREEDY, max_tokens=1, prompt_logprobs=0)])
    exact = Truth(folders["qwen3-moe"]).logprobs(given)
    rounding = partial(storage_of, quantize=quantize, group=64)
    lost = (Truth(folders["qwen3-moe"], rounding).logprobs(given) - exact).abs().mean()
    assert 0.3 * lost < (told(found) - exact).abs().mean() < 1.6 * lost


@pytest.mark.parametrize("wish", ["auto", "int4", "none"])
def test_experts_that_are_stored_in_fp8_are_rounded_on_the_host(folders, wish, tmp_path) -> None:
    folder = tmp_path / "fp8"
    rewritten(folders["qwen3-moe"], folder, FINE, fine)
    more = {"host_experts": "all", "host_quantize": wish, "quantize_group": 32}
    with opened(folder, **more) as engine:
        (found,) = serve(engine, PROMPTS[:1], [SCORED])
        if wish != "none":  # whose panels are padded, of sizes as small as here
            assert nbytes_on_host(engine) == engine.model.facts.host_weight_bytes
        layer = engine.executor._decoder.layers[0]
        kinds = {"auto": "int8", "int4": "int4", "none": "float32"}
        assert layer.expert_down.down[0].format == kinds[wish]
    with opened(folder) as engine:  # whose CPU computes FP8 as floats, and a GPU rounds rows
        (exact,) = serve(engine, PROMPTS[:1], [SCORED])
    gap = float((told(found) - told(exact)).abs().max())
    assert gap < {"auto": 0.4, "int4": 1.5, "none": 0.4 if where.ON_GPU else TOLERANCE}[wish]


def test_profiles_are_of_the_experts_that_lie_on_the_host(folders) -> None:
    keys = set()
    for more in (
        {},
        {"host_experts": "1"},
        {"host_experts": "all"},
        {"host_experts": "all", "host_quantize": "int8"},
        {"host_experts": "all", "threads": 2},
    ):
        config = config_of(folders["qwen3-moe"], **{"threads": 1, **more})
        keys.add(profile_key(config, find_model(config)).kernels)
    assert len(keys) == 5
    config = config_of(folders["qwen3-moe"], host_experts="all", host_quantize="int8")
    assert "--host-experts all --host-quantize int8" in profile_command(config)


def test_a_profile_with_experts_on_the_host_is_of_whole_steps(monkeypatch) -> None:
    monkeypatch.setattr("weft.engine.profiling.pick_device", lambda _: "cuda:0")
    assert profiled_config({}).overlap == "on"
    for wish in ("all", "auto"):
        assert profiled_config({"host_experts": wish}).overlap == "auto"
    assert profiled_config({"tensor_parallel": 2}).overlap == "auto"


def test_a_host_without_room_is_refused(folders, monkeypatch) -> None:
    config = config_of(folders["qwen3-moe"], host_experts="all")
    model, resolved = resolve_settings(config)
    needed = model.facts.host_weight_bytes + model.facts.pinned_bytes
    for free, fits in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr("weft.engine.model.available_memory", lambda free=free: free)
        # On a device that stands in, the rest takes its part of the same memory.
        beside = free + model.facts.weight_bytes + resolved.kv_bytes
        tight = replace(model, facts=replace(model.facts, available_bytes=beside))
        with nullcontext() if fits else pytest.raises(OutOfMemoryError, match="set host_quantize"):
            check_host_memory(config, tight, resolved)


def test_weft_info_predicts_the_speed(folders) -> None:
    text = format_info(collect_info(config_of(folders["qwen3-moe"], host_experts="2")))
    assert "offload    experts of 2 of 3 layers on the host: 360.00 KiB in float32" in text
    assert "predicted tokens/s, by sequences that decode:" in text
    assert "predicted for prompts:" in text
    assert "host_moe" in text
    plain = format_info(collect_info(config_of(folders["qwen3-moe"])))
    assert "predicted" not in plain


def test_a_start_says_how_fast_it_will_be(folders, caplog) -> None:
    """Before it loads weights, and whatever is logged."""
    with caplog.at_level("INFO", NOTICES), opened(folders["qwen3-moe"], host_experts=2) as engine:
        assert engine.model.host.layers == {1, 2}
    lines = [record.getMessage() for record in caplog.records if record.name == NOTICES]
    assert lines[0].startswith("experts of 2 of 3 layers on the host: 360.00 KiB in float32")
    assert [line.startswith("predicted") for line in lines] == [False, True, True]


def test_packed_experts_are_found_again(folders, tmp_path) -> None:
    """Mapped from the cache of packed weights, also by other processes."""
    ops, native = (select_ops("cpu", "float32", kernels) for kernels in ("reference", "cpu"))
    part = HostPart(frozenset({1, 2}), native, lambda _: None)
    states, found = [], []
    for _ in range(2):
        kept = KeptWeights(PackedCache(2**30, tmp_path), {"experts": "of layers 1, 2"})
        decoder = load_model(folders["qwen3-moe"], "float32", 112, ops, kept=kept, host=part)
        kept.write()
        assert kept.join(60)
        states.append(kept.state)
        experts = [decoder.layers[number].expert_gate_up for number in (1, 2)]
        found.append([bytes(one.memory) for layer in experts for one in layer.gate_up])
        assert isinstance(decoder.layers[0].expert_gate_up, torch.Tensor)
    assert states == ["packed", "mapped"]
    assert found[0] == found[1]
