"""Whole checkpoints of every quantised format with the kernels of GPUs, against plain torch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import CASES, prompt, randomise, save
from served import Truth, opened, serve, told
from test_models_blocks import FINE, MX, compressed, fine, mx_experts, refereed, restacked
from test_models_quant import (
    FORMATS,
    compressed_config,
    drawn,
    formula,
    packed,
    rewritten,
)
from torch import Tensor

from depth import deep_on_cpu
from weft.core.config import EngineConfig
from weft.core.errors import KernelError
from weft.core.types import SamplingParams
from weft.engine.model import find_model
from weft.engine.weights import check_launches, launch_shapes, product_shapes
from weft.kernels.triton.coded_matrix import CodedMatrix
from weft.kernels.tuning import Heuristic, LaunchShape, Pinned

GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, seed=0)
SCORED = replace(GREEDY, max_tokens=1, prompt_logprobs=0)
PROMPTS = [prompt(9, 1), prompt(3, 2)]
MULTIPLIED = ("qkv", "output", "gate_up", "down")
TOLERANCE = 5e-4  # of float32 logits
# Activations are rounded to codes: a number between two may go to either, by the last bit of a sum
# before it. The whole rounding loses about ten times as much.
BETWEEN_CODES = 0.05


def source(folder: Path, case: str) -> Path:
    """A checkpoint whose matrices are several groups wide."""
    config = CASES[case].config()
    sizes = {"num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    sizes |= {"moe_intermediate_size": 96, "layer_types": ["full_attention"]}
    for key, value in sizes.items():
        if hasattr(config, key):
            setattr(config, key, value)
    config._attn_implementation = "eager"
    model = CASES[case].model(config)
    randomise(model, 0)
    return save(model, folder)


def integers(original: Path, folder: Path, name: str) -> None:
    pack, bits, group, config = FORMATS[name]

    def store(module: str, weight: Tensor):
        values, zeros, scales = drawn(*weight.shape, bits, group)
        scales = (scales * (weight.std() / formula(values, zeros, scales, group).std())).half()
        return pack(module, values, zeros, scales, bits), weight

    rewritten(original, folder, {**config, "bits": bits, "group_size": group}, store)


def mx_dense(original: Path, folder: Path) -> None:
    config = compressed("mxfp4-pack-quantized", MX, None)
    rewritten(original, folder, config, partial(refereed, config))


def with_zero_points(original: Path, folder: Path) -> None:
    """As compressed-tensors writes int4."""

    def store(module: str, weight: Tensor):
        values, zeros, scales = drawn(*weight.shape, 4, 64)
        scales = (scales * (weight.std() / formula(values, zeros, scales, 64).std())).half()
        return packed(module, values, zeros, scales, 4), weight

    rewritten(original, folder, compressed_config("pack-quantized", 4, 64, symmetric=False), store)


STORED: dict[str, tuple[str, Any]] = {
    "awq": ("qwen3-full", partial(integers, name="awq-64")),
    "compressed-tensors int4": ("qwen3-full", with_zero_points),
    "gptq of experts": ("qwen3-moe", partial(integers, name="gptq-int8")),
    "fp8 in blocks": ("qwen3-full", lambda source, to: rewritten(source, to, FINE, fine)),
    "mxfp4": ("qwen3-full", mx_dense),
    "mxfp4 of experts": (
        "qwen3-moe",
        lambda source, to: restacked(
            source, to, {"quant_method": "mxfp4"}, mx_experts, layers=1, experts=6
        ),
    ),
}


@pytest.mark.parametrize("name", STORED)
def test_a_checkpoint_gives_the_logits_of_plain_torch(name, tmp_path) -> None:
    torch.manual_seed(0)
    case, store = STORED[name]
    folder = tmp_path / "stored"
    folder.mkdir()
    store(source(tmp_path / "source", case), folder)
    truth = Truth(folder)
    with opened(folder, kernels="triton", graphs=False, max_num_batched_tokens=16) as engine:
        weights = engine.executor._decoder.layers[0]
        coded = weights.expert_down if "experts" in name else weights.down
        assert isinstance(coded, CodedMatrix)
        answers = serve(engine, PROMPTS, [SCORED, GREEDY])
    room = BETWEEN_CODES if "fp8" in name else TOLERANCE
    assert truth.gap(PROMPTS[0], answers[0]) < room
    assert truth.miss(PROMPTS[1], answers[1]) < room


def test_products_of_layers_that_a_checkpoint_keeps_in_floats_are_tuned_as_well(tmp_path) -> None:
    """A file of launches would else lack one, which only a step would notice."""
    pack, bits, group, config = FORMATS["awq-64"]

    def store(module: str, weight: Tensor):
        if module.endswith("down_proj"):
            return {f"{module}.weight": weight}, weight
        codes = drawn(*weight.shape, bits, group)
        return pack(module, *codes, bits), weight

    folder, settings = tmp_path / "stored", {"bits": bits, "group_size": group}
    rewritten(source(tmp_path / "source", "qwen3-full"), folder, {**config, **settings}, store)
    engine = EngineConfig(model=str(folder), kernels="triton", dtype="bfloat16")
    model = find_model(engine)
    assert model.source == folder
    shapes = product_shapes(engine, model.spec, "bfloat16", folder)
    down = LaunchShape("gemm", "bfloat16", (128, 256))
    assert down in shapes
    assert LaunchShape("gemm", "int4/64 in bfloat16", (512, 128)) in shapes  # gate_up
    by_config = product_shapes(engine, model.spec, "bfloat16")
    assert set(by_config) ^ set(shapes) == {down, replace(down, kind="int4/64 in bfloat16")}
    rule = Heuristic(132, 227 * 1024)
    every = launch_shapes(engine, model.spec, "bfloat16")
    entries = {(shape, rows): rule.launch(shape, rows) for shape in every for rows in shape.buckets}
    ops = replace(model.ops, tuning=Pinned(tmp_path / "gpu.json", "any", entries))
    with pytest.raises(KernelError, match=r"no tuned launch for gemm bfloat16 \[128, 256\]"):
        check_launches(engine, model.spec, "bfloat16", ops, folder)


def test_weights_that_are_rounded_to_int4(tmp_path) -> None:
    """A tied head is looked up and multiplied with, by the same codes."""
    folder = source(tmp_path, "qwen2-full")
    settings = {"kernels": "triton", "quantize": "int4", "quantize_group": 32, "graphs": False}
    with opened(folder, max_num_batched_tokens=16, **settings) as engine:
        decoder = engine.executor._decoder
        assert isinstance(decoder.lm_head, CodedMatrix)
        answer = serve(engine, PROMPTS, [SCORED, GREEDY])[0]
        weights = decoder.layers[0]
    plain = Truth(folder)
    found = {name: getattr(weights, name).dequantize() for name in MULTIPLIED}
    plain._decoder.layers = [replace(plain._decoder.layers[0], **found)]
    plain._decoder.lm_head = plain._decoder.embedding = decoder.lm_head.dequantize()
    lost = Truth(folder).gap(PROMPTS[0], answer)
    assert plain.gap(PROMPTS[0], answer) < 0.01 * lost < 0.01


@deep_on_cpu
@pytest.mark.parametrize("name", ["awq", "fp8 in blocks"])
def test_captured_steps_are_uncaptured_ones(name, tmp_path) -> None:
    case, store = STORED[name]
    folder, found = tmp_path / "stored", []
    folder.mkdir()
    store(source(tmp_path / "source", case), folder)
    for graphs in (True, False):
        with opened(folder, kernels="triton", graphs=graphs, max_num_batched_tokens=16) as engine:
            assert (engine.executor.captured > 0) == graphs
            found.append(serve(engine, PROMPTS, [SCORED, GREEDY]))
    for one, other in zip(*found, strict=True):
        assert one.tokens == other.tokens
        assert torch.equal(told(one), told(other))
