"""KV that goes to the host and comes back: the tokens of an engine with enough KV on the device."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import build, prompt, save_with_tokenizer
from tight_kv import GREEDY, Traffic, least_kv_memory, run, settings_for, traffic

from depth import deep
from weft.core.errors import InvariantError, OutOfMemoryError
from weft.core.plan import KVMove, RowAdd, StepPlan, SubBatch, Tier
from weft.core.settings import format_bytes
from weft.core.types import FinishReason, Request
from weft.cost.curves import Curve, Grid
from weft.cost.fit import FEATURES, Fitted
from weft.cost.host_costs import HostCosts, MoveCost
from weft.cost.work import Work
from weft.engine.build import build_engine
from weft.engine.costs import describe_host_costs, profile_key, with_host
from weft.engine.model import Model, check_host_memory, find_model, resolve_settings
from weft.exec.store import KVStore
from weft.exec.tiers import HostTier
from weft.kernels.arrays import to_numpy, to_torch
from weft.kernels.block_arrays import BlockArrays
from weft.kernels.cpu import attention
from weft.kernels.cpu.blocks import copy_blocks
from weft.models.spec import KVGroup

FAMILIES = {
    "llama-gqa": {},
    "mistral-window": {},
    "gemma3": {"kv_dtype": "int8"},
    "gemma4-shared-kv": {},
    "qwen3-moe-mixed": {"steps_in_flight": 0},
    "gemma2": {"prefix_caching": False, "kv_dtype": "fp8"},
    "qwen2-window": {"kernels": "reference"},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A checkpoint of each family with the built-in model's tokenizer beside it."""
    return {
        name: save_with_tokenizer(build(name), tmp_path_factory.mktemp(name)) for name in FAMILIES
    }


@pytest.mark.usefixtures("executor")
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=deep), pytest.param(3, marks=deep)])
@pytest.mark.parametrize(
    ("family", "executor"),
    [*((name, "eager") for name in FAMILIES), ("gemma3", "graphs"), ("llama-gqa", "graphs")],
    indirect=["executor"],
)
def test_kv_on_the_host_changes_no_token(folders, family, seed, monkeypatch) -> None:
    """Arrivals, shared prefixes, classes, cancels: bit for bit what ample KV gives."""
    folder, more = folders[family], FAMILIES[family]
    ample = build_engine(settings_for(folder, **more))
    wanted, plans = run(ample, traffic(seed, cancels=False), monkeypatch)
    assert not any(plan.moves for plan in plans)
    tight = least_kv_memory(folder, **more)
    engine = build_engine(settings_for(folder, **more, kv_memory=tight, host_kv_memory=2**22))
    found, plans = run(engine, traffic(seed, cancels=True), monkeypatch)
    moves = [move for plan in plans for move in plan.moves]
    ends = Counter(answer.finish for answer in found.values())
    assert ends[FinishReason.CANCELLED] > 0
    assert ends[FinishReason.LENGTH] > 8
    for number, answer in found.items():
        told = wanted[number].tokens
        cut = answer.finish is FinishReason.CANCELLED
        assert answer.tokens == (told[: len(answer.tokens)] if cut else told), number
    assert {move.to for move in moves} == set(Tier)
    totals = engine.scheduler.totals
    spills = sum(len(plan.spills) for plan in plans)
    fills = sum(len(plan.fills) for plan in plans)
    for to, count, copied in (
        (Tier.HOST, totals.blocks_to_host, spills),
        (Tier.DEVICE, totals.blocks_to_device, fills),
    ):
        assert count - copied == sum(move.num_blocks for move in moves if move.to is to) > 0


@pytest.mark.usefixtures("executor")
@pytest.mark.parametrize("executor", ["eager", "graphs"], indirect=True)
@pytest.mark.parametrize("family", ["llama-gqa", "gemma3", "gemma4-shared-kv"])
def test_a_prefix_that_others_have_pushed_out_comes_back(folders, family, monkeypatch) -> None:
    """From the host, bit for bit, with only what is new computed."""
    folder, more = folders[family], FAMILIES[family]
    prompts = {0: 1, 30: 2, 60: 3, 90: 1}
    arrivals = {
        step: [Request(step, tuple(prompt(70, seed)), replace(GREEDY, seed=1))]
        for step, seed in prompts.items()
    }
    tight = least_kv_memory(folder, **more)
    engine = build_engine(settings_for(folder, **more, kv_memory=tight, host_kv_memory=2**22))
    found, plans = run(engine, Traffic(arrivals, {}), monkeypatch)
    assert found[90].tokens == found[0].tokens
    last = next(index for index, plan in enumerate(plans) if plan.fills)
    assert sum(plan.num_tokens for plan in plans[last:]) < 30
    assert sum(len(plan.spills) for plan in plans) > 10
    assert engine.scheduler.totals.cached_tokens >= 56


@pytest.mark.usefixtures("executor")
@pytest.mark.parametrize("family", ["llama-gqa", "gemma3"])
def test_a_layer_wise_move_takes_along_what_its_step_writes(folders, family) -> None:
    """A prompt leaves in the step that computes it; its blocks are written; it comes back."""
    engine = build_engine(settings_for(folders[family], host_kv_memory=2**20))
    groups = len(engine.resources.groups)
    here, there, back = ((blocks,) * groups for blocks in ((3, 0, 1), (2, 0, 1), (4, 5, 2)))
    away = KVMove(0, Tier.HOST, here, there, after_layer=True)
    home = KVMove(0, Tier.DEVICE, there, back)

    def tokens_of(number: int, *more: Any, start: int = 0, **also: Any) -> tuple[int, ...]:
        row, count = (0, 1) if start else (number % 10, 20)
        batch = SubBatch((row,), (start,), (count,), (True,))
        plan = StepPlan(number, (batch,), *more, **also)
        return engine.executor.launch(plan).result().tokens

    def begun(row: int) -> tuple[RowAdd]:
        sampling = replace(GREEDY, seed=0)
        tokens = tuple(prompt(20, row))
        return (RowAdd(row, row, tokens, 20, sampling, frozenset(), here),)

    stayed = tokens_of(10, add=begun(0)), tokens_of(11, start=20)
    first = tokens_of(20, (0,), begun(0), moves=(away,))
    assert tokens_of(21, add=begun(1)) != first
    assert (first, tokens_of(22, start=20, moves=(home,))) == stayed
    engine.close()


# -- copies ---------------------------------------------------------------------------------------


def random_blocks(draw: np.random.Generator, blocks: int, *shape: int) -> list[np.ndarray]:
    size = (blocks, *shape)
    return [draw.integers(-128, 127, size).astype(np.int8) for _ in range(3)]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", [(1,), (2, 4, 9), (8, 16, 130)])
def test_blocks_are_copied_and_no_others(threads, shape) -> None:
    draw = np.random.default_rng(len(shape))
    attention.set_threads(threads)
    sources, targets = random_blocks(draw, 70, *shape), random_blocks(draw, 90, *shape)
    before = [target.copy() for target in targets]
    chosen = draw.permutation(70)[:61].tolist(), draw.permutation(90)[:61].tolist()
    copy_blocks(BlockArrays(sources), BlockArrays(targets), *chosen)
    for source, target, old in zip(sources, targets, before, strict=True):
        old[chosen[1]] = source[chosen[0]]
        np.testing.assert_array_equal(target, old)
    copy_blocks(BlockArrays(sources), BlockArrays(targets), (), ())


def test_copies_that_do_not_fit_are_refused_before_anything_is_copied() -> None:
    sources, targets = np.ones((5, 4), np.int8), np.zeros((7, 4), np.int8)
    kept = BlockArrays([sources]), BlockArrays([targets])
    for blocks, words in (
        (((0, 5), (0, 1)), "block 5 of the sources is outside its 5"),
        (((0, -1), (0, 1)), "block -1 of the sources"),
        (((0, 1), (0, 7)), "block 7 of the targets is outside its 7"),
        (((0, 1), (0, -1)), "block -1 of the targets"),
        (((0, 1), (3, 3)), "written twice"),
        (((0, 1), (3,)), "differ in number"),
    ):
        with pytest.raises(ValueError, match=words):
            copy_blocks(*kept, *blocks)
    with pytest.raises(ValueError, match="blocks of 4 bytes do not fit those of 8"):
        copy_blocks(kept[0], BlockArrays([np.zeros((7, 4), np.int16)]), (0,), (0,))
    with pytest.raises(ValueError, match="differ in number"):
        copy_blocks(kept[0], BlockArrays([targets, targets]), (0,), (0,))
    for arrays in ([], [sources, targets], [sources[:, ::2]], [sources[::2]]):
        with pytest.raises(ValueError, match=r"have no common blocks|have gaps"):
            BlockArrays(arrays)
    assert not targets.any()


@pytest.mark.parametrize("wrap", [lambda array: array, to_torch])
def test_a_move_takes_every_layer_of_every_group(wrap) -> None:
    groups = [KVGroup("full", (0, 1), None, 2, 8), KVGroup("sliding", (2,), 20, 1, 12)]
    draw = np.random.default_rng(7)

    def memory(shape, dtype):
        return wrap(np.zeros(tuple(shape), dtype))

    store, host = (KVStore(groups, blocks, 4, "float32", memory) for blocks in ([6, 5], [5, 4]))
    for tensor in (t for kv in (store, host) for group in (0, 1) for t in kv.tensors(group)):
        to_numpy(tensor)[:] = draw.standard_normal(tuple(tensor.shape))
    kept = [[to_numpy(t).copy() for t in store.tensors(g)] for g in (0, 1)]
    tier = HostTier(store, host, copy_blocks)
    out = KVMove(0, Tier.HOST, ((0, 1, 4), (-1, 2, 3)), ((1, 2, 0), (-1, 0, 1)))
    tier.before(StepPlan(1, (), moves=(out,), zero_host=((0, 4), (1, 3))))
    assert out.num_blocks == 5
    assert not any(to_numpy(t[4]).any() for t in host.tensors(0))
    assert not any(to_numpy(t[3]).any() for t in host.tensors(1))
    for group in (0, 1):
        for tensor in store.tensors(group):
            tensor[:] = 0
    back = ((5, 3, 0), (-1, 4, 0))
    tier.before(StepPlan(2, (), moves=(KVMove(0, Tier.DEVICE, out.target, back),)))
    for group in (0, 1):
        for tensor, before in zip(store.tensors(group), kept[group], strict=True):
            wanted = np.zeros_like(before)
            for old, new in zip(out.source[group], back[group], strict=True):
                if old >= 0:
                    wanted[new] = before[old]
            np.testing.assert_array_equal(to_numpy(tensor), wanted)


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.usefixtures("executor")
def test_a_plan_that_needs_the_host_is_refused_without_one(folders) -> None:
    engine = build_engine(settings_for(folders["llama-gqa"]))
    plan = StepPlan(1, (), moves=(KVMove(0, Tier.HOST, ((0,),), ((0,),)),))
    with pytest.raises(InvariantError, match="needs a host tier, which is not here"):
        engine.executor.launch(plan).result()
    engine.close()


@pytest.mark.usefixtures("executor")
def test_a_plan_that_computes_on_the_host_is_refused_with_one(folders) -> None:
    engine = build_engine(settings_for(folders["llama-gqa"], host_kv_memory=2**20))
    with pytest.raises(InvariantError, match="needs attention of a host, which is not here"):
        engine.executor.launch(StepPlan(1, (), piggybacked=(0,))).result()
    engine.close()


def with_available(model: Model, free: int, device: str) -> Model:
    return replace(model, device=device, facts=replace(model.facts, available_bytes=free))


def test_the_host_must_have_the_memory_beside_weights_and_kv(folders) -> None:
    config = settings_for(folders["llama-gqa"], host_kv_memory=60 * 2**20)
    model, resolved = resolve_settings(config)
    needed = model.facts.weight_bytes + resolved.kv_bytes + 60 * 2**20
    check_host_memory(config, with_available(model, needed, "cpu"), resolved)
    left = format_bytes(60 * 2**20 - 2**20)
    words = f"is 60.00 MiB, but beside weights and KV the host has only {left} free; set it lower"
    with pytest.raises(OutOfMemoryError, match=words):
        check_host_memory(config, with_available(model, needed - 2**20, "cpu"), resolved)
    with pytest.raises(OutOfMemoryError, match=r"host_kv_memory is 1024\.00 TiB"):
        build_engine(replace(config, host_kv_memory=2**50))


def unmeasured(config, model) -> Fitted:
    curve = Curve((1, 64), (0.1, 0.2))
    return Fitted(profile_key(config, model), 3, curve, dict.fromkeys(FEATURES, 0.0))


def test_moves_that_no_profile_has_measured_take_the_time_of_a_common_link(folders) -> None:
    config = settings_for(folders["llama-gqa"], host_kv_memory=2**20)
    model = find_model(config)
    fitted = unmeasured(config, model)
    token_bytes = sum(group.bytes_per_token for group in model.facts.groups)
    for device, bytes_s, stall in (("cpu", 5e9, 1.0), ("cuda:0", 12e9, 0.0)):
        costs = with_host(config, replace(model, device=device), fitted)
        assert costs.host.out == costs.host.back == (2e-5, token_bytes / bytes_s)
        assert costs.host.stall == stall
        words = describe_host_costs(costs)
        assert f"assumed (copies of {bytes_s / 1e9:.0f} GB/s, until weft profile" in words
    assert with_host(replace(config, host_kv_memory=None), model, fitted) == fitted
    assert describe_host_costs(fitted) == describe_host_costs(None) == ""


def test_piggybacked_rows_that_no_profile_has_measured_take_the_time_of_copies(folders) -> None:
    """Residual [C], q and result [H, D], k and v [Hkv, D]: each is read and written."""
    config = settings_for(
        folders["llama-gqa"], host_kv_memory=2**20, scheduler="slo-piggyback", dtype="bfloat16"
    )
    model = find_model(config)
    costs = with_host(config, model, unmeasured(config, model))
    numbers = 2 * 64 + 2 * 4 * 16 + 2 * 2 * 16
    found = costs.terms(Work(piggyback_layers=10)).piggybacked
    assert found == pytest.approx(10 * 2 * 2 * numbers / 5e9)
    on_gpu = replace(model, device="cuda:0")
    sent = with_host(config, on_gpu, unmeasured(config, model)).terms(Work(piggyback_layers=10))
    assert sent.piggybacked == pytest.approx(10 * 2 * (2 * 4 * 16 + 2 * 2 * 16) / 12e9)
    token_bytes = sum(group.bytes_per_token for group in model.facts.groups)
    work = Work(tokens=3, host_decodes=3, host_context=900)
    calls = model.spec.num_layers * 2e-5
    assert costs.terms(work).cpu_attention == pytest.approx(calls + 900 * token_bytes / 5e9)


def test_costs_of_other_threads_or_another_transport_are_not_used_silently(folders, caplog) -> None:
    config = settings_for(
        folders["llama-gqa"], host_kv_memory=2**20, scheduler="slo-piggyback", host_threads=2
    )
    model = find_model(config)
    costs = HostCosts(None, MoveCost(0.5, 0.25), MoveCost(1.0, 0.125))
    fitted = replace(unmeasured(config, model), hosts={"2 threads of the engine": costs})
    measured = with_host(config, model, fitted)
    assert measured.host is costs
    assert describe_host_costs(measured) == "costs of the host tier are measured"
    assert not caplog.records
    for other in ({"host_threads": 1}, {"host_process": True}):
        assumed = with_host(replace(config, **other), model, fitted)
        assert assumed.host.out.step_s == 2e-5
        (warning,) = (record.getMessage() for record in caplog.records)
        assert "the profile has 2 threads of the engine, not" in warning
        assert warning.startswith("The costs of the host tier are assumed (")
        caplog.clear()


def test_moves_that_were_measured_beside_attention_are_used_without_it(folders, caplog) -> None:
    config = settings_for(folders["llama-gqa"], host_kv_memory=2**20)
    model = find_model(config)
    grid = Grid.of({(n, c): 0.1 for n in (1, 2) for c in (0, 16)})
    costs = HostCosts(grid, MoveCost(0.5, 0.25), MoveCost(1.0, 0.125), stall=0.5, duplex=False)
    fitted = replace(unmeasured(config, model), hosts={"1 thread of the engine": costs})
    found = with_host(config, model, fitted)
    assert found.host == replace(costs, attention=None)
    assert describe_host_costs(found) == "costs of the host tier are measured"
    assert not caplog.records


def test_the_host_must_have_the_memory_of_all_ranks(folders, monkeypatch) -> None:
    config = settings_for(folders["llama-gqa"])
    model, resolved = resolve_settings(config)
    model = with_available(model, 0, "cuda:0")  # whose KV lies elsewhere
    monkeypatch.setattr("weft.engine.model.available_memory", lambda: 100 * 2**20)
    for mib, ranks in ((90, 1), (50, 2)):
        given = replace(config, host_kv_memory=mib * 2**20, tensor_parallel=ranks)
        check_host_memory(given, model, resolved)
    two = replace(config, host_kv_memory=60 * 2**20, tensor_parallel=2)
    with pytest.raises(OutOfMemoryError, match=r"is 60.00 MiB for each rank, but .* 50.00 MiB"):
        check_host_memory(two, model, resolved)
    with pytest.raises(OutOfMemoryError, match=r"is 101.00 MiB, but the host has only 100"):
        check_host_memory(replace(config, host_kv_memory=101 * 2**20), model, resolved)
