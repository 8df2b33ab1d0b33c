"""Checkpoints in block-scaled FP8 and MXFP4, and quantised experts: each format's own formula."""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import build, edit_config, prompt, save
from paged import PagedRunner
from safetensors.torch import load_file, save_file
from test_models_quant import (
    FORMATS,
    LINEARS,
    check,
    drawn,
    formula,
    original,  # noqa: F401 - a fixture
    rewritten,
)
from torch import Tensor
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from weft.core.config import EngineConfig
from weft.core.errors import CheckpointError, ConfigError, UnsupportedModelError
from weft.engine.info import collect_info, format_info
from weft.engine.model import find_model
from weft.kernels import float8
from weft.kernels.cpu.matrix import gather
from weft.kernels.float4 import Float4
from weft.kernels.float8 import E4M3
from weft.kernels.ops import select_ops
from weft.models.decoder import Decoder
from weft.models.layout import storage_of, weight_bytes
from weft.models.loader import load_model
from weft.models.spec_reader import read_spec
from weft.models.weight_files import SINGLE

FINE = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def load(folder: Path, kernels: str = "reference", quantize: str = "none") -> Decoder:
    rounding = partial(storage_of, quantize=quantize, group=64)
    return load_model(folder, "float32", None, select_ops("cpu", "float32", kernels), rounding)


def blocks_of(weight: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """FP8 codes of a weight [.., N, K] and a scale for each block, as DeepSeek-V3 rounds them."""
    *_, height, width = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -width % columns, 0, -height % rows))
    cut = padded.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
    scales = cut.abs().amax((-3, -1)) / 448
    wide = scales.repeat_interleave(rows, -2).repeat_interleave(columns, -1)
    return (weight / wide[..., :height, :width]).to(E4M3), scales


def fine(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    codes, scales = blocks_of(weight, 128, 128)
    plain = _dequantize_fp8_weight(codes, scales, [128, 128], torch.float32)
    return {f"{module}.weight": codes, f"{module}.weight_scale_inv": scales}, plain


def compressed(layout: str, weights: dict[str, Any], activations: Any) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
    }


BLOCK = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
BY_GROUP = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128}
BY_GROUP |= {"dynamic": True}
MX = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
MX |= {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}


def refereed(config: dict[str, Any], module: str, weight: Tensor) -> tuple[Any, Tensor]:
    """What compressed-tensors' own compressor writes, and its decompressor reads."""
    pytest.importorskip("compressed_tensors")  # machines with GPUs may lack it
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = dict(config["config_groups"]["group_0"]["weights"])
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
    if args["strategy"] == "block":
        scales = blocks_of(weight, 128, 128)[1]
    else:
        scales = 2.0 ** torch.floor(torch.log2(weight.unflatten(-1, (-1, 32)).abs().amax(-1)) - 2)
    stored = compressor.compress({"weight": weight, "weight_scale": scales}, scheme)
    plain = compressor.decompress(stored, scheme)["weight"].float()
    assert 0 < (plain - weight).norm() < 0.2 * weight.norm()
    return {f"{module}.{key}": value for key, value in stored.items()}, plain


def test_blocks_of_fp8_are_those_of_transformers(original, tmp_path) -> None:  # noqa: F811
    expected = rewritten(original, tmp_path, FINE, fine)
    layer = load(tmp_path).layers[0]
    assert layer.down.values.dtype == E4M3
    assert layer.down.inputs == "group"
    assert torch.equal(layer.down.dequantize(), expected["down_proj"])
    qkv = torch.cat([expected[name] for name in ("q_proj", "k_proj", "v_proj")])
    assert torch.equal(layer.qkv.dequantize(), qkv)
    x = torch.randn(3, 256) * torch.tensor([1e-3, 1.0, 50.0]).unsqueeze(1)
    rows = []
    for cut in x.split(128, 1):
        scale = cut.abs().amax(1, keepdim=True) / 448
        rows.append((cut / scale).to(E4M3).float() * scale)
    found = float8.linear(x, layer.down, None)
    torch.testing.assert_close(found, torch.cat(rows, 1) @ expected["down_proj"].T)


@pytest.mark.parametrize(
    ("layout", "weights", "activations"),
    [
        ("float-quantized", BLOCK, BY_GROUP),
        ("float-quantized", BLOCK, None),
        ("mxfp4-pack-quantized", MX, None),
    ],
)
def test_what_compressed_tensors_writes(
    original,  # noqa: F811
    tmp_path,
    layout,
    weights,
    activations,
) -> None:
    config = compressed(layout, weights, activations)
    expected = rewritten(original, tmp_path, config, partial(refereed, config))
    layer = load(tmp_path).layers[0]
    if layout != "float-quantized":
        check(tmp_path, expected)
        return
    assert layer.down.inputs == ("float" if activations is None else "group")
    torch.testing.assert_close(layer.down.dequantize(), expected["down_proj"])
    torch.testing.assert_close(
        layer.gate_up.dequantize(), torch.cat([expected["gate_proj"], expected["up_proj"]])
    )


def test_a_cpu_computes_fp8_as_floats_and_says_so(original, tmp_path, caplog) -> None:  # noqa: F811
    expected = rewritten(original, tmp_path, FINE, fine)
    with caplog.at_level(logging.WARNING, logger="weft"):
        native = load(tmp_path, "cpu")
    told = [m for m in caplog.messages if "fp8" in m and "computed as float32" in m]
    assert told[0].endswith("with quantize int8 they take less")
    down = native.layers[0].down
    assert down.format == "float32"
    assert torch.equal(gather(down, torch.arange(128)), expected["down_proj"])
    config = EngineConfig(model=str(tmp_path), dtype="float32")
    info = collect_info(config)
    assert "stored as fp8, blocks of 128 x 128, else float32, computed in" in format_info(info)
    kernel = info["kernels"]["linear"]["kernel"]
    assert kernel == "cpu, float32 (stored as fp8, blocks of 128 x 128) weights"
    facts = find_model(config).facts
    plain = weight_bytes(read_spec(original), "float32")
    assert facts.weight_bytes == plain
    rounded = load(tmp_path, "cpu", "int8")
    assert rounded.layers[0].down.format == "int8"
    smaller = find_model(EngineConfig(model=str(tmp_path), dtype="float32", quantize="int8"))
    assert smaller.facts.weight_bytes < 0.5 * plain


def test_a_cpu_computes_mxfp4_as_int8(original, tmp_path, caplog) -> None:  # noqa: F811
    config = compressed("mxfp4-pack-quantized", MX, None)
    expected = rewritten(original, tmp_path, config, partial(refereed, config))
    with caplog.at_level(logging.WARNING, logger="weft"):
        native = load(tmp_path, "cpu")
    assert [m for m in caplog.messages if "mxfp4 (groups of 32) are computed as int8" in m]
    down = native.layers[0].down
    assert down.format == "int8"
    assert torch.equal(gather(down, torch.arange(128)), expected["down_proj"])
    info = collect_info(EngineConfig(model=str(tmp_path)))
    assert "int8 (groups of 32) (stored as mxfp4" in info["kernels"]["linear"]["kernel"]


def test_every_code_of_mxfp4_is_that_of_the_specification() -> None:
    codes, scales = torch.arange(16, dtype=torch.uint8).repeat(2), [1, 127, 240]
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for scale in scales:
        weight = Float4(codes.numpy()[None], torch.tensor([[scale]], dtype=torch.uint8).numpy())
        found = torch.from_numpy(weight.dequantize())[0]
        truth = torch.cat((numbers, -numbers)).double().repeat(2) * 2.0 ** (scale - 127)
        assert torch.equal(found.double(), truth)


SCALES_OF_KV = ("self_attn.k_scale", "self_attn.v_scale", "self_attn.k_proj.k_scale")


def test_scales_of_kv_are_taken_and_told(original, tmp_path, caplog) -> None:  # noqa: F811
    def store(module: str, weight: Tensor):
        scale = weight.abs().max() / 448
        parts = {"weight": (weight / scale).to(E4M3), "weight_scale": scale}
        parts["input_scale"] = torch.tensor(0.03)
        return {f"{module}.{key}": value for key, value in parts.items()}, weight

    config = {"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static"}
    rewritten(original, tmp_path, config, store)
    tensors = load_file(tmp_path / SINGLE)
    tensors |= {f"model.layers.0.{name}": torch.tensor(0.02) for name in SCALES_OF_KV}
    save_file(tensors, tmp_path / SINGLE)
    with caplog.at_level(logging.INFO, logger="weft"):
        load(tmp_path)
    assert [m for m in caplog.messages if "scales of KV are not used" in m]
    edit_config(tmp_path, quantization_config={"quant_method": "modelopt", "quant_algo": "FP8"})
    assert load(tmp_path).layers[0].down.inputs == pytest.approx(0.03)
    # Older ones say so in a file of their own.
    edit_config(tmp_path, quantization_config=...)
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    assert load(tmp_path).layers[0].down.inputs == pytest.approx(0.03)
    beside["quantization"]["quant_algo"] = "NVFP4"
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    with pytest.raises(UnsupportedModelError, match="Blackwell"):
        load(tmp_path)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> Path:
    model = build("qwen3-moe")
    return save(model, tmp_path_factory.mktemp("mixture"))


def experts_of(folder: Path, layers: int, experts: int) -> dict[str, Tensor]:
    """The weights of all experts of each layer, stacked, by the names of stacked tensors."""
    tensors, found = load_file(folder / SINGLE), {}
    for number in range(layers):
        home = f"model.layers.{number}.mlp.experts"
        sides = {
            side: torch.stack([tensors[f"{home}.{e}.{side}_proj.weight"] for e in range(experts)])
            for side in ("gate", "up", "down")
        }
        found[f"{home}.gate_up_proj"] = torch.cat((sides["gate"], sides["up"]), 1)
        found[f"{home}.down_proj"] = sides["down"]
    return found


def restacked(
    source: Path,
    folder: Path,
    config: dict[str, Any],
    store: Any,
    layers: int = 3,
    experts: int = 6,
) -> dict[str, Tensor]:
    """Write a mixture with the experts of a layer as one tensor, stored as ``store`` says."""
    tensors = {k: v for k, v in load_file(source / SINGLE).items() if ".experts." not in k}
    expected = {}
    for name, weight in experts_of(source, layers, experts).items():
        parts, expected[name] = store(weight)
        tensors |= {name + ending: value for ending, value in parts.items()}
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / SINGLE)
    (folder / "config.json").write_text((source / "config.json").read_text())
    edit_config(folder, quantization_config=config)
    return expected


def mx_experts(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Random blocks; what they stand for says transformers' own function for gpt-oss."""
    count, rows, columns = weight.shape
    shape = (count, rows, -(-columns // 32))
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
    scales = torch.randint(120, 124, shape, dtype=torch.uint8)
    plain = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    return {"_blocks": blocks, "_scales": scales}, plain[..., :columns]


def fine_experts(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    codes, scales = blocks_of(weight, 128, 128)
    pairs = zip(codes, scales, strict=True)
    plain = [_dequantize_fp8_weight(*one, [128, 128], torch.float32) for one in pairs]
    return {"": codes, "_scale_inv": scales}, torch.stack(plain)


@pytest.mark.parametrize("name", ["mxfp4", "fp8"])
def test_experts_stored_as_one_tensor(mixture, tmp_path, name) -> None:
    torch.manual_seed(0)
    config, store = ({"quant_method": "mxfp4"}, mx_experts)
    if name == "fp8":
        config, store = FINE, fine_experts
    expected = restacked(mixture, tmp_path, config, store)
    plain, native = load(tmp_path), load(tmp_path, "cpu")
    layer, home = plain.layers[1], "model.layers.1.mlp.experts"
    for found, key in ((layer.expert_gate_up, "gate_up_proj"), (layer.expert_down, "down_proj")):
        numbers = found.dequantize() if name == "fp8" else found
        assert torch.equal(numbers, expected[f"{home}.{key}"])
    assert native.layers[1].expert_down[0].format == ("int8" if name == "mxfp4" else "float32")
    tokens = prompt(40)
    runs = (PagedRunner(decoder).step([("a", tokens)])[0] for decoder in (plain, native))
    exact, found = runs
    assert 0 < (found - exact).norm() / exact.norm() < (0.2 if name == "fp8" else 0.05)


@pytest.mark.parametrize("name", ["awq-32", "gptq-int8"])
def test_experts_in_integers_stay_integers(tmp_path, name) -> None:
    """On a CPU; in plain torch they are the numbers of the formula."""
    import transformers
    from checkpoints import CASES, randomise

    pack, bits, group, config = FORMATS[name]
    case = CASES["qwen3-moe"].config()
    case.moe_intermediate_size, case.hidden_size = 96, 128
    case._attn_implementation = "eager"
    model = transformers.Qwen3MoeForCausalLM(case).eval().requires_grad_(False)
    randomise(model, 0)
    source = save(model, tmp_path / "source")

    def store(module: str, weight: Tensor):
        numbers = drawn(*weight.shape, bits, group)
        scale = weight.std() / formula(*numbers, group).std()
        numbers = (*numbers[:2], (numbers[2] * scale).half())
        return pack(module, *numbers, bits), formula(*numbers, group)

    folder = tmp_path / "stored"
    config = {**config, "bits": bits, "group_size": group}
    expected = rewritten(source, folder, config, store)
    assert set(expected) == set(LINEARS)
    plain, native = load(folder), load(folder, "cpu")
    last = native.layers[2].expert_down[5]
    assert last.format == f"int{bits}"
    assert torch.equal(gather(last, torch.arange(128)), expected["down_proj"])
    assert torch.equal(plain.layers[2].expert_down[5], expected["down_proj"])
    tokens = prompt(40)
    exact, found = (PagedRunner(d).step([("a", tokens)])[0] for d in (plain, native))
    assert 0 < (found - exact).norm() / exact.norm() < 0.1


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nvfp4": (
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        "Blackwell",
    ),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "Blackwell.*bfloat16"),
    "rows": (FINE | {"weight_block_size": [0, 128]}, "weight_block_size"),
    "wide": (FINE | {"weight_block_size": [128, 256]}, "32, 64, 128 inputs"),
    "static": (FINE | {"activation_scheme": "static"}, "activation_scheme"),
    "e5m3": (FINE | {"scale_fmt": "e5m3"}, "scale_fmt"),
    "tokens": (compressed("float-quantized", BLOCK, BY_GROUP | {"strategy": "token"}), "strategy"),
    "groups": (compressed("float-quantized", BLOCK, BY_GROUP | {"group_size": 64}), "group_size"),
    "mx 16": (compressed("mxfp4-pack-quantized", MX | {"group_size": 16}, None), "group_size"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(original, tmp_path, name) -> None:  # noqa: F811
    config, words = REFUSED[name]
    values = json.loads((original / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
    with pytest.raises(UnsupportedModelError, match=words):
        read_spec(tmp_path)


def test_a_scale_of_mxfp4_that_is_none_is_refused(mixture, tmp_path) -> None:
    def store(weight: Tensor):
        parts, plain = mx_experts(weight)
        parts["_scales"][2, 3, 0] = 255
        return parts, plain

    restacked(mixture, tmp_path, {"quant_method": "mxfp4"}, store)
    with pytest.raises(CheckpointError, match=r"gate_up_proj.*scale of MXFP4"):
        load(tmp_path)


def test_integers_are_not_rounded_again(original, tmp_path) -> None:  # noqa: F811
    pack, bits, group, config = FORMATS["awq-64"]

    def store(module: str, weight: Tensor):
        numbers = drawn(*weight.shape, bits, group)
        return pack(module, *numbers, bits), weight

    rewritten(original, tmp_path, {**config, "bits": bits, "group_size": group}, store)
    with pytest.raises(ConfigError, match="quantised already"):
        find_model(EngineConfig(model=str(tmp_path), quantize="int8"))
