"""Weights in FP8: rounded at load or stored so, computed by the reference, else refused."""

from __future__ import annotations

import logging
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FAMILY_CASES, build, prompt, reference_logits, save
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from paged import PagedRunner
from safetensors.torch import load_file, save_file
from test_models_quant import original, rewritten  # noqa: F401 - a fixture
from test_quantize import loaded_weights
from torch import Tensor

from weft.core.config import EngineConfig
from weft.core.errors import CheckpointError, ConfigError, UnsupportedModelError
from weft.engine.info import collect_info
from weft.engine.model import find_model
from weft.kernels.float8 import E4M3, linear, round_rows
from weft.kernels.kv_storage import KV_DTYPES
from weft.kernels.ops import select_ops
from weft.models.decoder import Decoder
from weft.models.families import FAMILIES
from weft.models.layout import storage_of, weight_bytes
from weft.models.loader import load_model
from weft.models.spec_reader import read_spec
from weft.models.weight_files import SINGLE

CPU = torch.device("cpu")


def load(folder: Path, quantize: str = "none", kernels: str = "reference") -> Decoder:
    rounding = partial(storage_of, quantize=quantize, group=64)
    ops = select_ops("cpu", "float32", kernels)
    return load_model(folder, "float32", None, ops, rounding)


@cache
def codes() -> Tensor:
    """Every number of E4M3, in ascending order, as its format is defined."""
    found = {0.0}
    for exponent in range(16):
        for mantissa in range(8):
            if (exponent, mantissa) != (15, 7):
                lead = 1 + mantissa / 8 if exponent else mantissa / 8
                found |= {sign * lead * 2.0 ** (max(exponent, 1) - 7) for sign in (1, -1)}
    return torch.tensor(sorted(found), dtype=torch.float64)


def test_numbers_are_rounded_to_the_nearest_code() -> None:
    torch.manual_seed(0)
    x = torch.randn(20, 100) * 10 ** torch.linspace(-6, 6, 20).unsqueeze(1)
    rounded = round_rows(x)
    assert rounded.codes.float().abs().amax(1).eq(448).all()
    scaled = (x.double() / rounded.scales.double().unsqueeze(1)).unsqueeze(-1)
    nearest = codes()[(scaled - codes()).abs().argmin(-1)]
    close = (scaled.squeeze(-1) - rounded.codes.double()).abs()
    assert (close <= (scaled.squeeze(-1) - nearest).abs() * (1 + 1e-5) + 1e-6).all()


CASES = ["llama-gqa", "llama-tied-biases", "phi3-plain", "qwen3-moe", "gemma3", "gemma4"]


@pytest.mark.parametrize("name", CASES)
def test_logits_stay_near_and_memory_is_foretold(tmp_path, name) -> None:
    model = build(name)
    folder, tokens = save(model, tmp_path), prompt(60)
    expected = reference_logits(model, tokens)
    decoder = load(folder, "fp8")
    found = PagedRunner(decoder).step([("a", tokens)])[0]
    assert found.dtype == torch.float32
    error = (found - expected).pow(2).mean().sqrt() / expected.std()
    assert 0 < error < 0.3
    assert isinstance(decoder.lm_head, Tensor)
    foretold = weight_bytes(decoder.spec, "float32", "fp8")
    assert foretold == sum(weight.nbytes for weight in loaded_weights(decoder))


def scheme_of(strategy: str, activations: str) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    given = {
        "token": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        "tensor": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
        "float": None,
    }
    return {
        "targets": ["Linear"],
        "weights": weights | {"strategy": strategy, "observer": "minmax"},
        "input_activations": given[activations],
        "output_activations": None,
    }


def compressed_config(strategy: str, activations: str) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": scheme_of(strategy, activations)},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def stored(folder: Path, source: Path, strategy: str, activations: str) -> dict[str, Tensor]:
    """Write a checkpoint by compressed-tensors' own compressor; what the weights stand for."""
    config = compressed_config(strategy, activations)
    args = QuantizationArgs(**config["config_groups"]["group_0"]["weights"])
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry("float-quantized")

    def store(module: str, weight: Tensor):
        largest = (
            weight.abs().amax(-1, keepdim=True) if strategy == "channel" else weight.abs().max()
        )
        scale = largest / 448 if strategy == "channel" else (largest / 448).reshape(1)
        state = {"weight": weight, "weight_scale": scale}
        parts = compressor.compress(state, scheme)
        plain = compressor.decompress(parts, scheme)["weight"]
        if activations == "tensor":
            parts["input_scale"] = torch.tensor([0.02 if "up_proj" in module else 0.01])
        return {f"{module}.{key}": value for key, value in parts.items()}, plain

    return rewritten(source, folder, config, store)


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
@pytest.mark.parametrize("activations", ["token", "tensor", "float"])
def test_what_compressed_tensors_writes(original, tmp_path, strategy, activations) -> None:  # noqa: F811
    expected = stored(tmp_path, original, strategy, activations)
    spec = read_spec(tmp_path)
    assert "fp8" in str(spec.stored_weights)
    decoder = load(tmp_path)
    layer = decoder.layers[0]
    qkv = torch.cat([expected[name] for name in ("q_proj", "k_proj", "v_proj")])
    torch.testing.assert_close(layer.qkv.dequantize(), qkv)
    torch.testing.assert_close(layer.down.dequantize(), expected["down_proj"])
    gate_up = layer.gate_up
    assert gate_up.values.dtype == E4M3
    if activations == "tensor":  # gate has 0.01, up 0.02: the larger holds the numbers of both
        assert gate_up.inputs == pytest.approx(0.02)
        assert layer.down.inputs == pytest.approx(0.01)
    else:
        assert gate_up.inputs == activations
    assert decoder.lm_head.dtype == torch.float32  # ignored by the checkpoint
    tokens = torch.randint(0, 96, (20,)).tolist()
    assert PagedRunner(decoder).step([("a", tokens)])[0].isfinite().all()


@pytest.mark.parametrize("scheme", ["dynamic", "static"])
def test_what_autofp8_writes(original, tmp_path, scheme) -> None:  # noqa: F811
    def store(module: str, weight: Tensor):
        scale = weight.abs().max() / 448
        parts = {"weight": (weight / scale).to(E4M3), "weight_scale": scale}
        if scheme == "static":
            parts["input_scale"] = torch.tensor(0.03)
        plain = parts["weight"].float() * scale
        return {f"{module}.{key}": value for key, value in parts.items()}, plain

    config = {"quant_method": "fp8", "activation_scheme": scheme, "ignored_layers": ["lm_head"]}
    expected = rewritten(original, tmp_path, config, store)
    layer = load(tmp_path).layers[0]
    torch.testing.assert_close(layer.output.dequantize(), expected["o_proj"])
    assert layer.output.inputs == ("token" if scheme == "dynamic" else pytest.approx(0.03))


def test_products_round_their_activations(original, tmp_path) -> None:  # noqa: F811
    """By row, by the stored scale, or not: three results, each that of its own formula."""
    x = torch.randn(6, 128) * 3
    for activations in ("token", "tensor", "float"):
        expected = stored(tmp_path / activations, original, "channel", activations)["o_proj"]
        weight = load(tmp_path / activations).layers[0].output
        if activations == "float":
            rows = x
        else:
            scale = x.abs().amax(1, keepdim=True) / 448 if activations == "token" else 0.01
            rows = (x / scale).clamp(-448, 448).to(E4M3).float() * scale
        error = (linear(x, weight, None) - rows @ expected.T).norm() / (x @ expected.T).norm()
        assert error < 1e-3


def damage(folder: Path, change) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors, "model.layers.0.mlp.down_proj")
    save_file(tensors, folder / SINGLE)


def test_numbers_that_are_none_are_refused(original, tmp_path) -> None:  # noqa: F811
    def to_nan(tensors, module):
        tensors[f"{module}.weight"].view(torch.uint8)[3, 4] = 0x7F

    stored(tmp_path, original, "channel", "token")
    damage(tmp_path, to_nan)
    with pytest.raises(CheckpointError, match=r"down_proj\.weight.*1 numbers are NaN"):
        load(tmp_path)


def test_scales_that_are_none_are_refused(original, tmp_path) -> None:  # noqa: F811
    def negative(tensors, module):
        tensors[f"{module}.weight_scale"][0] = -1.0

    stored(tmp_path, original, "channel", "token")
    damage(tmp_path, negative)
    with pytest.raises(CheckpointError, match=r"down_proj\.weight.*scale of FP8 is negative"):
        load(tmp_path)


def test_numbers_that_were_cut_off_are_told(original, tmp_path, caplog) -> None:  # noqa: F811
    def cut(tensors, module):
        values = tensors[f"{module}.weight"]
        tensors[f"{module}.weight"] = (values.float() * 2).clamp(-448, 448).to(E4M3)

    stored(tmp_path, original, "tensor", "token")
    with caplog.at_level(logging.WARNING, logger="weft"):
        load(tmp_path)
        assert not caplog.messages
        damage(tmp_path, cut)
        load(tmp_path)
    assert len(caplog.messages) == 1
    assert (
        "scales of 1 FP8 weights cut numbers off, most in 'model.layers.0.mlp.down_proj"
        in (caplog.messages[0])
    )


def test_the_reference_keeps_fp8_as_it_is_stored(original, tmp_path) -> None:  # noqa: F811
    stored(tmp_path, original, "channel", "token")
    info = collect_info(EngineConfig(model=str(tmp_path), kernels="reference"))
    assert (
        info["kernels"]["linear"]["kernel"]
        == "torch, float-quantized fp8, a scale a channel weights"
    )


REFUSED: dict[str, dict[str, Any]] = {
    "strategy": {
        **compressed_config("channel", "token"),
        "config_groups": {"a": {**scheme_of("group", "token")}},
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_ways_of_fp8_are_refused(original, tmp_path, name) -> None:  # noqa: F811
    rewritten(original, tmp_path, REFUSED[name], lambda m, w: ({f"{m}.weight": w}, w))
    with pytest.raises(UnsupportedModelError, match=name):
        read_spec(tmp_path)


@pytest.mark.parametrize(("family", "case"), FAMILY_CASES.items())
def test_each_family_takes_the_kv_that_is_declared_for_it(family, case, tmp_path) -> None:
    folder = save(build(case), tmp_path)
    assert read_spec(folder).family == family
    for kv_dtype in ("auto", "int8", "fp8"):
        config = EngineConfig(model=str(folder), kv_dtype=kv_dtype)
        if kv_dtype not in FAMILIES[family].unsound_kv:
            find_model(config)
            continue
        allowed = ", ".join(
            name for name in ("auto", *KV_DTYPES) if name not in FAMILIES[family].unsound_kv
        )
        with pytest.raises(ConfigError) as caught:
            find_model(config)
        assert caught.value.param == "kv_dtype"
        assert f"family {family}" in caught.value.message
        assert FAMILIES[family].unsound_kv[kv_dtype] in caught.value.message
        assert f"Allowed: {allowed}." in caught.value.message


def test_two_families_refuse_fp8() -> None:
    unsound = {name: row.unsound_kv for name, row in FAMILIES.items()}
    assert all(set(found) <= set(KV_DTYPES) for found in unsound.values())
    assert {name for name, found in unsound.items() if "fp8" in found} == {"qwen2", "gemma4"}
