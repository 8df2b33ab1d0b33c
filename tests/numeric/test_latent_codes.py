"""Quantised checkpoints of latent attention, whose K and V of all heads are one stored weight."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import VOCAB, edit_config, prompt, randomise, reference_logits, save
from paged import PagedRunner
from safetensors.torch import load_file, save_file
from test_models_blocks import FINE, blocks_of, load
from test_models_logits import assert_close
from test_models_quant import FORMATS, compressed_config, drawn, formula, words
from test_quantize import loaded_weights
from torch import Tensor
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

from weft.core.errors import CheckpointError
from weft.kernels.float8 import Float8
from weft.models.decoder import Decoder
from weft.models.layout import weight_bytes
from weft.models.spec_reader import read_spec
from weft.models.weight_files import SINGLE

HEADS, PLAIN, VALUE, RANK = 4, 40, 40, 160  # heads of kv_b_proj cut through its blocks
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 192,
    "intermediate_size": 224,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "max_position_embeddings": 256,
    "q_lora_rank": 160,
    "kv_lora_rank": RANK,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": PLAIN,
    "v_head_dim": VALUE,
    "moe_intermediate_size": 160,
    "n_routed_experts": 4,
    "num_experts_per_tok": 4,  # all of them, so that rounding changes no choice
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_mtp_layers": 0,
    "pad_token_id": None,
}

Store = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """A DeepSeek V3 in floats."""
    return save_original(tmp_path_factory.mktemp("original"))


def save_original(folder: Path) -> Path:
    config = transformers.DeepseekV3Config(**SIZES)
    model = transformers.DeepseekV3ForCausalLM(config).eval().requires_grad_(False)
    randomise(model, 0)
    return save(model, folder)


def stored(
    source: Path, folder: Path, config: dict[str, Any], store: Store, wanted: str = "proj"
) -> tuple[dict[str, Tensor], Any]:
    """Write the checkpoint with the weights of layers as ``store`` says: what they stand for."""
    tensors, expected = load_file(source / SINGLE), {}
    plain = folder / "plain"
    plain.mkdir()
    floats = dict(tensors)
    for name in list(tensors):
        module, _, kind = name.rpartition(".")
        if ".layers." in name and wanted in module and kind == "weight":
            parts, expected[module] = store(module, tensors.pop(name))
            tensors |= parts
            floats[name] = expected[module]
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / SINGLE)
    save_file({k: v.contiguous() for k, v in floats.items()}, plain / SINGLE, {"format": "pt"})
    for place in (folder, plain):
        (place / "config.json").write_text((source / "config.json").read_text())
    edit_config(folder, quantization_config=config)
    model = transformers.DeepseekV3ForCausalLM.from_pretrained(plain, attn_implementation="eager")
    return expected, model.eval()


def fine(module: str, weight: Tensor, scales_as: str = "float") -> tuple[dict[str, Tensor], Tensor]:
    """FP8 in blocks; scales in float32, powers of two in float32, or these as exponents."""
    codes, scales = blocks_of(weight, 128, 128)
    if scales_as != "float":
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
        wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        codes = (weight / wide[: len(weight), : weight.shape[1]]).to(torch.float8_e4m3fn)
    plain = _dequantize_fp8_weight(codes, scales, [128, 128], torch.float32)
    if scales_as == "exponents":
        scales = scales.to(torch.float8_e8m0fnu)
    return {f"{module}.weight": codes, f"{module}.weight_scale_inv": scales}, plain


def logits(decoder: Decoder, tokens: list[int]) -> Tensor:
    return PagedRunner(decoder).step([("a", tokens)])[0]


@pytest.mark.parametrize("scales_as", ["float", "powers", "exponents"])
def test_fp8_in_blocks(original, tmp_path, scales_as) -> None:
    config = FINE | ({} if scales_as == "float" else {"scale_fmt": "ue8m0"})
    expected, model = stored(original, tmp_path, config, partial(fine, scales_as=scales_as))
    tokens = prompt(40)
    truth = reference_logits(model, tokens)
    assert_close(logits(load(tmp_path, "cpu"), tokens), truth)

    decoder = load(tmp_path)
    home = "model.layers.1.self_attn"
    heads = expected[f"{home}.kv_b_proj"].reshape(HEADS, PLAIN + VALUE, RANK)
    layer = decoder.layers[1]
    assert torch.equal(layer.key_up, heads[:, :PLAIN].transpose(1, 2))
    assert torch.equal(layer.value_up, heads[:, PLAIN:])
    for kept in (layer.qkv, layer.query_up, layer.output, layer.gate_up, layer.expert_down):
        assert isinstance(kept, Float8)
    assert torch.equal(layer.output.dequantize(), expected[f"{home}.o_proj"])
    rank = SIZES["q_lora_rank"]
    assert torch.equal(layer.qkv.dequantize()[:rank], expected[f"{home}.q_a_proj"])
    turned = [*range(RANK), *range(RANK, RANK + 8, 2), *range(RANK + 1, RANK + 8, 2)]
    row = expected[f"{home}.kv_a_proj_with_mqa"][turned]
    assert torch.equal(layer.qkv.dequantize()[rank:], row)
    found = logits(decoder, tokens)  # its products round activations to FP8
    assert 0 < (found - truth).norm() / truth.norm() < 0.2
    foretold = weight_bytes(decoder.spec, "float32")
    assert foretold == sum(weight.nbytes for weight in loaded_weights(decoder))


def test_fp8_is_rounded_again_on_request(original, tmp_path) -> None:
    _, model = stored(original, tmp_path, FINE, fine)
    tokens = prompt(40)
    truth = reference_logits(model, tokens)
    decoder = load(tmp_path, "cpu", "int8")
    assert decoder.layers[1].query_up.format == "int8"
    assert 0 < (logits(decoder, tokens) - truth).norm() / truth.norm() < 0.1


def test_predictors_in_fp8_stay_unread(original, tmp_path) -> None:
    stored(original, tmp_path, FINE, fine)
    tensors = load_file(tmp_path / SINGLE)
    inside = "model.layers.2.self_attn.kv_b_proj"
    tensors |= fine(inside, torch.ones(HEADS * (PLAIN + VALUE), RANK))[0]
    save_file(tensors, tmp_path / SINGLE)
    edit_config(tmp_path, num_nextn_predict_layers=1)
    load(tmp_path, "cpu")


@pytest.mark.parametrize("damage", ["exponent", "missing"])
def test_damaged_scales_name_their_tensor(original, tmp_path, damage) -> None:
    stored(original, tmp_path, FINE, partial(fine, scales_as="exponents"))
    tensors = load_file(tmp_path / SINGLE)
    name = "model.layers.0.self_attn.kv_b_proj.weight_scale_inv"
    if damage == "missing":
        del tensors[name]
    else:
        tensors[name].view(torch.uint8)[1, 1] = 255
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.kv_b_proj"):
        load(tmp_path, "cpu")


def test_awq(original, tmp_path) -> None:
    pack, bits, group, config = FORMATS["awq-32"]

    def store(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        values, zeros, scales = drawn(*weight.shape, bits, group)
        scales = (scales * (weight.std() / formula(values, zeros, scales, group).std())).half()
        return pack(module, values, zeros, scales, bits), formula(values, zeros, scales, group)

    torch.manual_seed(0)
    config = config | {"bits": bits, "group_size": group}
    _, model = stored(original, tmp_path, config, store)
    tokens = prompt(40)
    truth = reference_logits(model, tokens)
    assert_close(logits(load(tmp_path), tokens), truth)
    native = load(tmp_path, "cpu")
    assert native.layers[0].query_up.format == "int4"
    assert (logits(native, tokens) - truth).norm() / truth.norm() < 0.1


def four_bits(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Integers of 4 bits in groups of 32 around 8, as Kimi K2 Thinking and K2.5 have them."""
    scales = (weight.unflatten(-1, (-1, 32)).abs().amax(-1) / 7).bfloat16()
    wide = scales.float().repeat_interleave(32, 1)
    values = (weight / wide).round().clamp(-8, 7) + 8
    parts = {
        f"{module}.weight_packed": words(values.long(), 4),
        f"{module}.weight_scale": scales,
        f"{module}.weight_shape": torch.tensor(weight.shape),
    }
    return parts, (values - 8) * wide


@pytest.mark.parametrize("name", ["KimiK25", "Kimi_K25"])
def test_experts_of_kimi(original, tmp_path, name) -> None:
    """Experts alone are quantised, and the text model stands within one that sees."""
    quantised = compressed_config("pack-quantized", 4, 32, symmetric=True)
    expected, model = stored(original, tmp_path, quantised, four_bits, wanted=".experts.")
    tensors = {f"language_model.{k}": v for k, v in load_file(tmp_path / SINGLE).items()}
    tensors["vision_tower.patch_embed.proj.weight"] = torch.ones(2, 2)
    tensors["mm_projector.proj.0.weight"] = torch.ones(2, 2)
    save_file(tensors, tmp_path / SINGLE)
    text = json.loads((tmp_path / "config.json").read_text())
    outside = {
        "architectures": [f"{name}ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "media_placeholder_token_id": 5,
        "text_config": text | {"model_type": "kimi_k2"},
        "tie_word_embeddings": False,
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|video|>",
        "vision_config": {"patch_size": 14},
    }
    (tmp_path / "config.json").write_text(json.dumps(outside))
    spec = read_spec(tmp_path)
    assert spec.family == "deepseek_v3"
    assert "int4" in str(spec.stored_weights)
    tokens = prompt(40)
    truth = reference_logits(model, tokens)
    assert_close(logits(load(tmp_path), tokens), truth)
    native = load(tmp_path, "cpu")
    assert native.layers[1].expert_down[3].format == "int4"
    assert native.layers[1].query_up.format == "float32"
    assert (logits(native, tokens) - truth).norm() / truth.norm() < 0.1
    assert len(expected) == 3 * SIZES["n_routed_experts"]
