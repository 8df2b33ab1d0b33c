"""Launches of products and attention: from a file for one GPU, by a rule, never by chance."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import triton
from triton.runtime.errors import OutOfResources

from weft.core.config import EngineConfig
from weft.core.errors import ConfigError, KernelError
from weft.engine import tuning as engine_tuning
from weft.engine.model import describe_kernels, find_model
from weft.engine.tuning import products_to_measure, tune_kernels
from weft.engine.weights import (
    check_heads,
    check_launches,
    head_shape,
    launch_shapes,
    product_shapes,
)
from weft.kernels import tuning
from weft.kernels.candidates import MOST
from weft.kernels.gpus import KNOWN
from weft.kernels.triton import matrix, tuned, tuned_attention
from weft.kernels.triton.matrix import pack, quantised
from weft.kernels.triton.tiles import launches, plan
from weft.kernels.tuning import (
    DECODE,
    EVERY,
    PREFILL,
    ROWS,
    Heuristic,
    LaunchShape,
    Pinned,
    load,
    save,
    search,
)
from weft.kernels.unavailable import KernelUnavailable
from weft.models.layout import storage_of

CPU = torch.device("cpu")
H200 = Heuristic(132, 227 * 1024)
GPU, COMPILER = "NVIDIA H200", "3.6.0"
BUILTIN = EngineConfig(kernels="triton", dtype="bfloat16", quantize="fp8", kv_dtype="int8")


def by_rule(shape: LaunchShape, rows: int):
    if rows != EVERY:
        return H200.launch(shape, rows)
    return launches(plan(tuned_attention.heads_of(shape), None, H200.shared_bytes))[shape.op]


def entries(shapes: list[LaunchShape]):
    return {(shape, rows): by_rule(shape, rows) for shape in shapes for rows in shape.buckets}


def model_shapes() -> list[LaunchShape]:
    model = find_model(BUILTIN)
    return launch_shapes(BUILTIN, model.spec, model.dtype)


def test_a_file_gives_back_what_was_measured(tmp_path) -> None:
    shapes = model_shapes()
    kinds = {"fp8 to bfloat16", "bfloat16", "int8 KV in bfloat16"}
    assert {shape.kind for shape in shapes} == kinds
    save(tmp_path / "gpu.json", GPU, COMPILER, entries(shapes))
    found = load(tmp_path / "gpu.json", GPU, COMPILER)
    attention = [shape for shape in shapes if shape.op in (DECODE, PREFILL)]
    assert [shape.op for shape in attention] == [DECODE, PREFILL]
    for shape in attention:
        assert found.attention(shape) == by_rule(shape, EVERY)
    for shape in set(shapes) - set(attention):
        for rows in (1, 16, 17, 64, 65, 4096):
            assert found.launch(shape, rows) == H200.launch(shape, rows)
    assert f"launches measured on {GPU}" in found.source


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 0}, "version is 0, not 1"),
        ({"hardware": "NVIDIA A100"}, "hardware is 'NVIDIA A100', not 'NVIDIA H200'"),
        ({"triton": "3.5.0"}, "triton is '3.5.0'"),
        ({"kernels": "1234"}, "kernels is '1234'"),
        ({"entries": None}, "cannot read"),
        ({"entries": [{"op": "gemm"}]}, "cannot read"),
    ],
)
def test_a_file_for_something_else_is_refused(tmp_path, change, words) -> None:
    path = tmp_path / "gpu.json"
    save(path, GPU, COMPILER, entries(model_shapes()))
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(KernelUnavailable, match=words):
        load(path, GPU, COMPILER)
    with pytest.raises(KernelUnavailable, match="cannot read"):
        load(tmp_path / "none.json", GPU, COMPILER)


def test_the_package_s_file_for_other_kernels_is_told_and_the_rule_is_used(
    tmp_path, monkeypatch, caplog
) -> None:
    """A file that is named must fit, as whoever names it counts on it."""
    path = tmp_path / "gpu.json"
    save(path, GPU, triton.__version__, entries(model_shapes()))
    monkeypatch.setattr(tuned, "artefact_path", lambda _: path)
    monkeypatch.setattr(tuned, "gpu_at", lambda _: replace(KNOWN["h100"], name=GPU))
    for fact in ("processors", "shared_bytes"):
        monkeypatch.setattr(tuned, fact, lambda _: 232_448)
    device = torch.device("cuda:0")
    assert isinstance(tuned.find_tuning("auto", device), Pinned)
    monkeypatch.setattr(tuning, "source_hash", lambda: "changed")
    found = tuned.find_tuning("auto", device)
    assert found.source == f"heuristic (the measured launches for {GPU} are of other kernels)"
    assert "kernels is " in caplog.text
    with pytest.raises(KernelUnavailable, match="kernels is "):
        tuned.find_tuning(str(path), device)


def test_changed_kernels_change_the_hash(tmp_path, monkeypatch) -> None:
    before = tuning.source_hash()
    for path in tuning.SOURCES.glob("*.py"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(tuning, "SOURCES", tmp_path)
    assert tuning.source_hash() == before
    (tmp_path / "gemm.py").write_text("changed")
    assert tuning.source_hash() != before


def test_files_that_weft_brings_along_are_for_its_kernels() -> None:
    for path in tuning.ARTEFACTS.glob("*.json"):
        content = json.loads(path.read_text())
        assert content["kernels"] == tuning.source_hash(), path
        assert path == tuning.artefact_path(content["hardware"])


@pytest.mark.parametrize(("at", "rows"), [(2, " with up to 16 rows"), (-1, ""), (-2, "")])
def test_a_shape_without_a_launch_does_not_start(tmp_path, at, rows) -> None:
    shapes, model = model_shapes(), find_model(BUILTIN)
    missing = shapes[at]
    pinned = Pinned(tmp_path / "gpu.json", GPU, entries([s for s in shapes if s != missing]))
    config = replace(BUILTIN, tuning=str(pinned.path))
    ops = replace(model.ops, tuning=pinned)
    with pytest.raises(KernelError) as caught:
        check_launches(config, model.spec, model.dtype, ops)
    assert f"gpu.json has no tuned launch for {missing}{rows};" in str(caught.value)
    assert "weft profile --tune" in str(caught.value)
    look_up = pinned.attention if at < 0 else partial(pinned.launch, rows=3)
    with pytest.raises(KernelUnavailable, match="no tuned launch"):
        look_up(missing)
    whole = replace(ops, tuning=replace(pinned, entries=entries(shapes)))
    check_launches(config, model.spec, model.dtype, whole)


def test_what_is_told_and_what_is_refused(tmp_path) -> None:
    model = find_model(BUILTIN)
    told = describe_kernels(BUILTIN, model)
    rule = "heuristic (kernels are interpreted)"
    assert told["paged_attention"] == {
        "kernel": "triton",
        "dtype": "bfloat16",
        "kv_dtype": "int8",
        "tuning": rule,
    }
    assert told["linear"]["tuning"] == rule
    assert told["rms_norm"] == {"kernel": "triton", "dtype": "bfloat16", "tuning": "fixed"}
    assert told["sample"]["dtype"] == "float32"
    with pytest.raises(ConfigError, match="for the kernels of a GPU"):
        find_model(EngineConfig(tuning=str(tmp_path / "gpu.json")))
    with pytest.raises(ConfigError, match="--tuning FILE"):
        tune_kernels(EngineConfig())
    with pytest.raises(ConfigError, match=r"folder .* does not exist"):
        tune_kernels(EngineConfig(tuning=str(tmp_path / "none" / "gpu.json")))
    with pytest.raises(KernelError, match="measured on a GPU"):
        tune_kernels(replace(BUILTIN, tuning=str(tmp_path / "gpu.json")))


def test_heads_that_no_kernel_serves_do_not_start() -> None:
    model = find_model(BUILTIN)
    layers = tuple(replace(layer, head_dim=1024) for layer in model.spec.layers)
    with pytest.raises(KernelError, match="no attention kernel for heads of size 1024"):
        check_heads(BUILTIN, replace(model.spec, layers=layers), "bfloat16", model.ops, CPU)


def test_the_rule_fills_a_device() -> None:
    """One wave of programs at the least, blocks that the memory holds, no part without inputs."""
    for outputs, inputs in ((4608, 3584), (3584, 18944), (152064, 3584), (64, 64)):
        for kind in ("bfloat16", "float32", "fp8 to bfloat16", "int8 weights in bfloat16"):
            for rows in ROWS:
                launch = H200.launch(LaunchShape("gemm", kind, (outputs, inputs)), rows)
                programs = -(-outputs // launch["BLOCK_N"]) * launch["SPLITS"]
                steps = -(-inputs // launch["BLOCK_K"])
                each = -(-steps // launch["SPLITS"])
                assert rows > 64 or programs >= 132 or launch["SPLITS"] == 1 or each < 4
                assert launch["SPLITS"] == 1 or inputs >= 2 * launch["SPLITS"] * launch["BLOCK_K"]
                assert (launch["SPLITS"] - 1) * each < steps, "a part is empty"
    found = {
        sizes: H200.launch(LaunchShape("gemm", "fp8 to bfloat16", sizes), 16)["SPLITS"]
        for sizes in ((4608, 3584), (3584, 3584), (3584, 18_944))
    }
    assert list(found.values()) == [4, 7, 4], "parts of 28, 28 and 148 steps that are alike"


@pytest.mark.parametrize(
    ("outputs", "inputs", "splits"),
    [(3584, 18944, 4), (4608, 3584, 4), (37888, 3584, 1), (3584, 3456, 3), (512, 128, 1)],
)
def test_inputs_of_codes_are_cut_into_equal_parts(outputs, inputs, splits) -> None:
    """148, 28, 28, 27 and 1 steps; 132 multiprocessors want 5, 4, 1, 5 and 33 parts."""
    shape = LaunchShape("gemm", "int4/128 in bfloat16", (outputs, inputs))
    assert H200.launch(shape, 1)["SPLITS"] == splits
    assert H200.launch(shape, 100)["SPLITS"] == 1
    assert "SPLITS" not in H200.launch(LaunchShape("moe_down", shape.kind, (8, 64, 256)), 1)


def test_the_search_finds_what_costs_least() -> None:
    def cost(launch) -> float:
        if launch["BLOCK_K"] * launch["num_stages"] > 512:
            return math.inf
        return abs(launch["BLOCK_N"] - 128) + abs(launch["SPLITS"] - 4) + 1 / launch["num_stages"]

    start = H200.launch(LaunchShape("gemm", "bfloat16", (4608, 3584)), 300)
    best, least = search(start, cost, tuning.ALTERNATIVES)
    assert (best["BLOCK_N"], best["SPLITS"], best["BLOCK_M"]) == (128, 4, start["BLOCK_M"])
    assert least == cost(best) < cost(start)
    few = {"BLOCK_N": 64, "num_stages": 2}
    assert "SPLITS" not in search(few, lambda _: 1.0, tuning.ALTERNATIVES)[0]


@pytest.mark.parametrize(
    "shape",
    [
        LaunchShape("gemm", "fp8 to bfloat16", (40, 64)),
        LaunchShape("moe_gate_up", "int8 weights in bfloat16", (3, 48, 32)),
        LaunchShape("moe_down", "bfloat16", (3, 32, 24)),
        LaunchShape("gemm", "int4/32 in bfloat16", (40, 64)),
        LaunchShape("gemm", "e4m3/64 to bfloat16", (40, 128)),
        LaunchShape("moe_down", "e2m1/32 in bfloat16", (3, 32, 64)),
    ],
)
def test_products_are_measured_with_each_launch(shape) -> None:
    """The clock is made up; the kernels run."""
    rule, tried = tuned.rule(CPU, "test").launch(shape, 16), []
    launches = [rule, {**rule, "BLOCK_N": 32}, {**rule, "BLOCK_K": 32}, {**rule, "num_warps": 8}]

    def seconds(call, copies) -> float:
        for copy in range(copies):
            call(copy)
        tried.append(copies)
        if len(tried) == 3:
            raise OutOfResources(300_000, 232_448, "shared memory")
        return [2.0, 1.0, None, 0.995][len(tried) - 1]

    assert tuned.tune(shape, 16, CPU, launches, seconds) == (launches[1], 1.0)
    assert tried == [1, 1, 1, 1]


QWEN = [
    *(
        LaunchShape("gemm", "fp8 to bfloat16", sizes)
        for sizes in ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944))
    ),
    LaunchShape("gemm", "bfloat16", (152064, 3584)),  # Qwen2.5-7B's output head
]
EXPERTS = [
    LaunchShape("moe_gate_up", "fp8 to bfloat16", (128, 1536, 2048)),
    LaunchShape("moe_down", "fp8 to bfloat16", (128, 2048, 768)),
]


def test_few_launches_are_worth_measuring() -> None:
    """A second or more to compile each: 15 measurements of a dense model, 8 of two of experts."""
    h100 = products_to_measure(QWEN + EXPERTS, KNOWN["h100"], QWEN[-1])
    assert max(map(len, h100.values())) <= MOST
    dense = [len(h100[key]) for key in h100 if key[0] in QWEN]
    assert sum(dense) <= 15 * MOST + 5, "none for more than 64 rows, which torch computes"
    assert sum(map(len, h100.values())) <= 23 * MOST + 5
    for (shape, rows), found in h100.items():
        assert found[0] == H200.launch(shape, rows), "the rule's is always among them"
        assert len(found) == len({str(sorted(launch.items())) for launch in found})
        computed = shape.op == "gemm" and rows > 64
        assert (len(found) == 1) == computed
        weight, row = tuning.item_bytes(shape.kind)
        for launch in found[1:]:
            gated = 1 + (shape.op == "moe_gate_up")
            stage = launch["BLOCK_K"] * (
                weight * launch["BLOCK_N"] * gated + row * launch["BLOCK_M"]
            )
            assert stage * launch["num_stages"] <= KNOWN["h100"].shared_bytes
            splits = launch.get("SPLITS", 1)
            steps = shape.sizes[-1] / launch["BLOCK_K"] / splits
            assert steps > 0.5
            assert splits == 1 or 8 * splits * rows <= weight * shape.sizes[-1] / 4
    older = products_to_measure(QWEN, KNOWN["a100"], QWEN[-1])
    assert len(older[QWEN[0], 256]) > 1, "FP8 is computed here where torch has no such product"


@pytest.mark.parametrize(
    ("quantize", "kind"), [("fp8", "bfloat16"), ("fp8-head", "fp8 to bfloat16")]
)
def test_heads_in_fp8_are_measured_with_many_rows(quantize, kind, monkeypatch) -> None:
    """Torch has no product of FP8 into the float32 of logits, as ``matrix`` knows."""
    config = replace(BUILTIN, quantize=quantize)
    spec = find_model(config).spec
    head = head_shape(config, spec, "bfloat16")
    assert (head.kind, head.sizes) == (kind, (spec.vocab_size, spec.hidden_size))
    products = products_to_measure(product_shapes(config, spec, "bfloat16"), KNOWN["h100"], head)
    storage = storage_of("lm_head", quantize, 0)
    matrix_ = pack("lm_head", torch.zeros(head.sizes, dtype=torch.bfloat16), H200)
    if storage is not None:
        asked = {"device": CPU, "tuning": H200}
        matrix_ = quantised("lm_head", head.sizes, "bfloat16", storage, **asked)
    monkeypatch.setattr(matrix, "capability", lambda _: (9, 0))
    monkeypatch.setattr(matrix, "_rowwise", lambda _: True)
    for rows in (row for row in ROWS if row > 64):
        by_torch = matrix._is_library(matrix_, CPU, torch.float32)
        assert (len(products[head, rows]) == 1) == by_torch == (quantize == "fp8")


def test_launches_are_compiled_before_they_are_measured(tmp_path, monkeypatch) -> None:
    """In another process, for a GPU that is not here; those that fail are left out."""
    config = EngineConfig(kernel_cache=str(tmp_path))
    shapes = [
        LaunchShape("gemm", "fp8 to bfloat16", (64, 128)),
        replace(EXPERTS[0], sizes=(2, 64, 32)),
    ]
    products = products_to_measure(shapes, KNOWN["h100"], QWEN[-1])
    short = {key: launches[:2] for key, launches in products.items() if key[1] in (16, 256)}
    assert [len(launches) for launches in short.values()] == [2, 1, 2, 2]
    engine_tuning._compile(config, KNOWN["h100"], short)
    assert [len(launches) for launches in short.values()] == [2, 1, 2, 2]
    kept = [path.name for path in tmp_path.glob("*/__grp__*")]
    assert kept.count("__grp__gemm.json") == 2
    assert kept.count("__grp___grouped.json") >= 4

    def fail(_, failed) -> None:
        failed += ["0 1 gemm for sm_90", "2 0 _grouped for sm_90"]

    monkeypatch.setattr(engine_tuning.Compilation, "wait", fail)
    wanted = [list(launches) for launches in short.values()]
    engine_tuning._compile(config, KNOWN["h100"], short)
    assert list(short.values()) == [wanted[0][:1], wanted[1], wanted[2], wanted[3][1:]]
