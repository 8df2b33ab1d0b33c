"""Published configs of latent attention: what weft makes of them, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from weft.core.errors import UnsupportedModelError
from weft.models.layout import num_parameters
from weft.models.spec import ModelSpec
from weft.models.spec_reader import spec_from_config

FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": FP8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
KIMI_K2 = DEEPSEEK_V3 | {
    "aux_loss_alpha": 0.001,
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "model_type": "kimi_k2",
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": DEEPSEEK_V3["rope_scaling"] | {"beta_fast": 1.0, "factor": 32.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "seq_aux": True,
    "topk_group": 1,
    "vocab_size": 163840,
}
INT4 = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
HUB: dict[str, dict[str, Any]] = {
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-v3.1": DEEPSEEK_V3 | {"quantization_config": FP8 | {"scale_fmt": "ue8m0"}},
    "kimi-k2": KIMI_K2,
    "kimi-k2.5": {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
        "bos_token_id": 163584,
        "dtype": "bfloat16",
        "eos_token_id": 163585,
        "ignore_index": -100,
        "media_placeholder_token_id": 163605,
        "model_type": "kimi_k25",
        "pad_token_id": 163839,
        "text_config": KIMI_K2
        | {
            "_name_or_path": "",
            "max_position_embeddings": 262144,
            "quantization_config": INT4,
            "rms_norm_eps": 1e-05,
            "rope_scaling": DEEPSEEK_V3["rope_scaling"] | {"factor": 64.0},
            "top_k": 50,
        },
        "tie_word_embeddings": False,
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "vision_config": {"patch_size": 14, "vt_hidden_size": 1152},
    },
    "minicpm3-4b": {
        "architectures": ["MiniCPM3ForCausalLM"],
        "bos_token_id": 1,
        "dim_model_base": 256,
        "eos_token_id": [2, 73440],
        "hidden_act": "silu",
        "hidden_size": 2560,
        "initializer_range": 0.1,
        "intermediate_size": 6400,
        "kv_lora_rank": 256,
        "max_position_embeddings": 32768,
        "model_type": "minicpm3",
        "num_attention_heads": 40,
        "num_hidden_layers": 62,
        "num_key_value_heads": 40,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "type": "longrope",
            "long_factor": [1.0 + 0.01 * i for i in range(16)],
            "short_factor": [1.0 + 0.01 * i for i in range(16)],
            "original_max_position_embeddings": 32768,
        },
        "scale_depth": 1.4,
        "scale_emb": 12,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 73448,
    },
    "mistral-small-4": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "image_token_index": 10,
        "model_type": "mistral3",
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": 2,
        "text_config": {
            "eos_token_id": 2,
            "first_k_dense_replace": 0,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "kv_lora_rank": 256,
            "max_position_embeddings": 1048576,
            "model_type": "mistral4",
            "moe_intermediate_size": 2048,
            "n_group": 1,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 36,
            "num_key_value_heads": 32,
            "q_lora_rank": 1024,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64,
            "rope_parameters": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 128.0,
                "llama_4_scaling_beta": 0.1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 8192,
                "partial_rotary_factor": 0.5,
                "rope_theta": 10000.0,
                "type": "yarn",
            },
            "topk_group": 1,
            "v_head_dim": 128,
            "vocab_size": 131072,
        },
        "vision_config": {"model_type": "pixtral"},
    },
}
# As model cards state them, in billions.
BILLIONS = {
    "deepseek-v3": 671,
    "deepseek-v3.1": 671,
    "kimi-k2": 1026,
    "kimi-k2.5": 1026,
    "minicpm3-4b": 4,
    "mistral-small-4": 119,
}


def read(name: str) -> ModelSpec:
    return spec_from_config(HUB[name])


@pytest.mark.parametrize("name", HUB)
def test_hub_configs_and_their_parameter_counts(name) -> None:
    spec = read(name)
    assert spec.latent is not None
    assert round(num_parameters(spec) / 1e9) == BILLIONS[name]


def test_how_weights_are_stored_is_read() -> None:
    stored = {name: read(name).stored_weights for name in HUB}
    assert stored["deepseek-v3"] == stored["deepseek-v3.1"] == stored["kimi-k2"]
    assert str(stored["kimi-k2"]) == "fp8, blocks of 128 x 128"
    assert str(stored["kimi-k2.5"]) == "pack-quantized int4, groups of 32"
    assert stored["minicpm3-4b"] is None


def test_what_scales_is_read() -> None:
    small, mistral = read("minicpm3-4b"), read("mistral-small-4")
    assert (small.embedding_scale, small.logit_scale) == (12.0, 0.1)
    assert small.residual_scale == pytest.approx(1.4 / 62**0.5)
    assert small.tied_embeddings
    assert len(mistral.ropes[0].query_scales) == 128
    assert mistral.ropes[0].rotary_dim == 64
    assert mistral.attention_scale == pytest.approx(128**-0.5 * 1.485203**2, rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantization_config": FP8 | {"scale_fmt": "e5m2"}}, "supported: float, ue8m0"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quant_method"),
        ({"q_lora_rank": None, "attention_bias": True}, "supported with q_lora_rank"),
        ({"kv_lora_rank": 0}, "positive integer"),
    ],
)
def test_what_would_change_the_result_is_refused(changes, words) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        spec_from_config(DEEPSEEK_V3 | changes)


def test_a_part_of_rotated_numbers_is_refused() -> None:
    config = HUB["mistral-small-4"]["text_config"]
    rope = config["rope_parameters"] | {"partial_rotary_factor": 0.25}
    changed = config | {"rope_parameters": rope, "architectures": ["Mistral4ForCausalLM"]}
    with pytest.raises(UnsupportedModelError, match="qk_rope_head_dim"):
        spec_from_config(changed)
