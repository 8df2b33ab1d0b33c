"""Launches of attention: from a file, and measured, with all kernels compiled beforehand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from attention_cases import Case, make_case
from attention_cases import Shape as AttentionShape
from weft.core.config import EngineConfig
from weft.core.errors import KernelError
from weft.engine import tuning as engine_tuning
from weft.engine.model import find_model
from weft.engine.weights import check_heads
from weft.kernels import reference
from weft.kernels.candidates import MOST
from weft.kernels.gpus import KNOWN
from weft.kernels.ops import select_ops
from weft.kernels.parts import StackParts
from weft.kernels.triton import tuned, tuned_attention
from weft.kernels.triton.attention import paged_attention, plan_for
from weft.kernels.triton.tiles import Heads, Tile, launches, plan
from weft.kernels.tuning import DECODE, EVERY, PREFILL, Heuristic, LaunchShape, Pinned
from weft.kernels.unavailable import KernelUnavailable

CPU = torch.device("cpu")
H200 = Heuristic(132, 227 * 1024)
GPU = "NVIDIA H200"
BUILTIN = EngineConfig(kernels="triton", dtype="bfloat16", quantize="fp8", kv_dtype="int8")


HEADS = Heads(2, 3, 16, torch.float32, torch.int8)
SMALL = {
    (HEADS.shape(DECODE), EVERY): {
        "SPLITS": 4, "LEAST": 32, "PROGRAMS": 5, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2,
    },
    (HEADS.shape(PREFILL), EVERY): {
        "BLOCK_M": 64, "BLOCK_N": 16, "num_warps": 8, "num_stages": 3,
    },
}  # fmt: skip


def case() -> Case:
    shape = AttentionShape(6, 2, 16, cache_dtype=torch.int8)
    return make_case([(1, 100), (40, 7), (1, 3)], shape)


def test_attention_runs_as_the_file_says(tmp_path) -> None:
    """Tiles and splits are those of the file, but for the rows of decodes; results stay right."""
    pinned, some = Pinned(tmp_path / "gpu.json", GPU, SMALL), case()
    rule = plan_for(some.q, some.k_cache, None)
    found = plan_for(some.q, some.k_cache, None, pinned)
    assert found.decode == Tile(rule.decode.block_m, 32, 4, 2)
    assert found.prefill == Tile(64, 16, 8, 3)
    assert (found.splits, found.least, found.programs, found.few) == (4, 32, 5, rule.few)
    expected = some.run(reference.paged_attention)
    actual = some.run(partial(paged_attention, tuning=pinned))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    nothing = Pinned(tmp_path / "gpu.json", GPU, {})
    caches = some.k_cache.clone(), some.v_cache.clone()
    wanted = r"attention_decode int8 KV in float32 \[2, 3, 16\]"
    with pytest.raises(KernelUnavailable, match=wanted):
        some.run_in_place(partial(paged_attention, tuning=nothing), *caches)
    assert torch.equal(caches[0].view(torch.uint8), some.k_cache.view(torch.uint8))


def test_every_way_to_attention_has_the_file(tmp_path, monkeypatch) -> None:
    """The op, and the fused forward pass that calls the kernel itself."""
    nothing, some = Pinned(tmp_path / "gpu.json", GPU, {}), case()
    monkeypatch.setattr(tuned, "find_tuning", lambda *_: nothing)
    ops = select_ops("cpu", "float32", "triton")
    with pytest.raises(KernelUnavailable, match="no tuned launch for attention_"):
        some.run(ops.paged_attention)
    assert ops.fused is not None
    stack = ops.fused.stack(StackParts(torch.zeros(8, 16), 1.0, torch.ones(16), 1e-5, False))
    with pytest.raises(KernelUnavailable, match="no tuned launch for attention_"):
        some.run(stack._attention)


@pytest.mark.parametrize(
    ("op", "change", "words"),
    [
        (DECODE, {"SPLITS": 64}, "64 parts"),
        (DECODE, {"SPLITS": 3}, "3 parts"),
        (DECODE, {"LEAST": 40}, "at least 40 tokens"),
        (DECODE, {"PROGRAMS": 0}, "0 programs a multiprocessor"),
        (PREFILL, {"BLOCK_M": 2}, "tiles of 2 rows for 3 query heads"),
        (PREFILL, {"BLOCK_N": None}, "lack 'BLOCK_N'"),
    ],
)
def test_a_launch_that_attention_cannot_have_does_not_start(op, change, words, tmp_path) -> None:
    key = (HEADS.shape(op), EVERY)
    launch = {name: value for name, value in (SMALL[key] | change).items() if value is not None}
    pinned = Pinned(tmp_path / "gpu.json", GPU, SMALL | {key: launch})
    with pytest.raises(ValueError, match=words):
        plan(HEADS, None, H200.shared_bytes, pinned)
    model = find_model(BUILTIN)
    layers = [replace(layer, num_kv_heads=2, head_dim=16) for layer in model.spec.layers]
    spec = replace(model.spec, num_heads=6, layers=tuple(layers))
    ops = replace(model.ops, tuning=pinned)
    with pytest.raises(KernelError, match=words):
        check_heads(BUILTIN, spec, "float32", ops, CPU)


@pytest.mark.parametrize("kind", ["float32", "int8 KV in bfloat16", "fp8 KV in float16"])
def test_the_heads_of_a_shape_are_its_own(kind) -> None:
    for sizes in ((2, 4, 64), (1, 16, 576, 512)):
        shape = LaunchShape(DECODE, kind, sizes)
        assert tuned_attention.heads_of(shape).shape(DECODE) == shape


@pytest.mark.parametrize("op", [DECODE, PREFILL])
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [("float32", (2, 3, 16)), ("fp8 KV in float32", (2, 3, 16)), ("float32", (1, 3, 24, 16))],
)
def test_attention_is_measured_with_each_launch(op, kind, sizes, monkeypatch) -> None:
    """The clock is made up; the kernels run, and the launch that is faster in sum is taken."""
    few = (tuned_attention.Rows(1, 1, 40), tuned_attention.Rows(3, 1, 20))
    more = (tuned_attention.Rows(1, 40, 40), tuned_attention.Rows(2, 20, 50))
    monkeypatch.setattr(tuned_attention, "DECODES", few)
    monkeypatch.setattr(tuned_attention, "PREFILLS", more)
    shape = LaunchShape(op, kind, sizes)
    rule, *others = tuned_attention.launches_to_measure(shape, KNOWN["h100"], 40)
    launches = [rule, *(next(x for x in others if x["BLOCK_N"] == size) for size in (16, 128))]
    cuts = {"SPLITS": (8,), "LEAST": (rule.get("LEAST", 0), 256), "PROGRAMS": (1,)}
    monkeypatch.setattr(tuned_attention, "ATTENTION_ALTERNATIVES", cuts)
    # The rule twice, tiles of 16 keys, of 128, and if contexts are cut the parts of the best one.
    clock = iter([10.0, 1.0, 9.0, 0.5, 20.0, 0.1, *[1.0, 1.0] * 2, *[10.0, 0.3] * 9])
    tried, compiled = [], []

    def seconds(call, copies) -> float:
        for copy in range(copies):
            call(copy)
        tried.append(copies)
        return next(clock)

    best, share = tuned_attention.tune_attention(shape, 16, CPU, launches, seconds, compiled.extend)
    tiles = {name: launches[1][name] for name in ("BLOCK_N", "num_warps", "num_stages")}
    assert best.items() >= tiles.items()
    if op == PREFILL:
        assert (compiled, tried) == ([], [1] * 6)
        assert share == pytest.approx((0.9 + 0.5) / 2)
        return
    assert best["SPLITS"] == 8, "the first change, which costs 0.55"
    assert share == pytest.approx((0.1 + 1) / 2)
    assert len(compiled) == 2
    assert all(launch.items() >= tiles.items() for launch in compiled)
    assert len({str(launch) for launch in compiled}) == len(compiled)


@pytest.mark.parametrize("op", [DECODE, PREFILL])
@pytest.mark.parametrize("kind", ["bfloat16", "int8 KV in bfloat16"])
@pytest.mark.parametrize("sizes", [(4, 7, 128), (8, 2, 256), (1, 71, 64), (1, 128, 576, 512)])
def test_few_launches_of_attention_are_worth_measuring(op, kind, sizes) -> None:
    """Those that fit the shared memory and the registers, the nearest to the rule's first."""
    shape, gpu = LaunchShape(op, kind, sizes), KNOWN["h100"]
    found = tuned_attention.launches_to_measure(shape, gpu)
    heads = tuned_attention.heads_of(shape)
    assert found[0] == launches(plan(heads, None, gpu.shared_bytes, major=9))[op]
    assert 10 < len(found) <= MOST
    assert len({str(sorted(launch.items())) for launch in found}) == len(found)
    assert len({(x["BLOCK_N"], x["num_warps"]) for x in found}) > 2
    rule, width = plan(heads, None, gpu.shared_bytes, major=9), sizes[-1]
    for launch in found:
        rows = launch.get("BLOCK_M", rule.decode.block_m)
        assert rule.group <= rows
        assert rows * width <= 128 * 32 * launch["num_warps"]
        row = heads.loaded * heads.cache_dtype.itemsize
        assert launch["BLOCK_N"] * row <= gpu.shared_bytes


def test_attention_is_compiled_before_it_is_measured(tmp_path) -> None:
    """In another process, for a GPU that is not here; all kernels of what is measured."""
    config, h100 = EngineConfig(kernel_cache=str(tmp_path)), KNOWN["h100"]
    asked = {}
    for op in (DECODE, PREFILL):
        shape = LaunchShape(op, "bfloat16", (2, 2, 64))
        asked[shape, EVERY] = tuned_attention.launches_to_measure(shape, h100, 2)
    wanted = {key: list(launches_) for key, launches_ in asked.items()}
    engine_tuning._compile(config, h100, asked)
    assert asked == wanted, "none fails"
    kept = [path.name for path in tmp_path.glob("*/__grp__*")]
    assert kept.count("__grp__decode_kernel.json") >= 2
    assert kept.count("__grp__prefill_kernel.json") >= 2
    assert kept.count("__grp__list_kernel.json") >= 1


def test_heads_that_nothing_serves_are_not_measured() -> None:
    shape = LaunchShape(DECODE, "float32", (1, 1, 1024))
    with pytest.raises(KernelUnavailable, match=r"no attention kernel for heads of size 1024"):
        tuned_attention.launches_to_measure(shape, KNOWN["h100"])
