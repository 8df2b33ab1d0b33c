"""Published configs of mixtures of experts: what weft makes of them, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from checkpoints import build, save_with_tokenizer

from weft.core.config import EngineConfig
from weft.core.errors import UnsupportedModelError
from weft.engine.info import collect_info, format_info
from weft.models.layout import num_parameters, parameters
from weft.models.spec_reader import spec_from_config

HUB: dict[str, dict[str, Any]] = {
    "mimo-v2-flash": {
        "architectures": ["MiMoV2FlashForCausalLM"],
        "add_full_attention_sink_bias": False,
        "add_swa_attention_sink_bias": True,
        "attention_bias": False,
        "attention_chunk_size": 128,
        "attention_dropout": 0.0,
        "attention_value_scale": 0.707,
        "head_dim": 192,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "hybrid_block_size": None,
        "hybrid_layer_pattern": [0, *[1, 1, 1, 1, 0, 1] * 7, 1, 1, 1, 1, 0],
        "intermediate_size": 16384,
        "layernorm_epsilon": 1e-05,
        "max_position_embeddings": 262144,
        "model_type": "mimo_v2_flash",
        "moe_intermediate_size": 2048,
        "moe_layer_freq": [0] + [1] * 47,
        "n_group": 1,
        "n_routed_experts": 256,
        "n_shared_experts": None,
        "norm_topk_prob": True,
        "num_attention_heads": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "partial_rotary_factor": 0.334,
        "rope_theta": 5000000,
        "routed_scaling_factor": None,
        "scoring_func": "sigmoid",
        "sliding_window": 128,
        "sliding_window_size": 128,
        "swa_head_dim": 192,
        "swa_num_attention_heads": 64,
        "swa_num_key_value_heads": 8,
        "swa_rope_theta": 10000,
        "swa_v_head_dim": 128,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
        "vocab_size": 152576,
    },
    "laguna-xs": {
        "architectures": ["LagunaForCausalLM"],
        "attention_bias": False,
        "gating": True,
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "layer_types": ["full_attention", *["sliding_attention"] * 3] * 10,
        "max_position_embeddings": 131072,
        "model_type": "laguna",
        "moe_apply_router_weight_on_input": False,
        "moe_intermediate_size": 512,
        "moe_router_logit_softcapping": 0.0,
        "moe_routed_scaling_factor": 2.5,
        "num_attention_heads": 48,
        "num_attention_heads_per_layer": [48, 64, 64, 64] * 10,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "default",
                "rope_theta": 500000.0,
                "partial_rotary_factor": 0.5,
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 1.0,
            },
        },
        "shared_expert_intermediate_size": 512,
        "sliding_window": 512,
        "tie_word_embeddings": False,
        "vocab_size": 100352,
    },
    "step-3.5-flash": {
        "architectures": ["Step3p5ForCausalLM"],
        "att_impl_type": "GQA",
        "attention_other_setting": {
            "attention_type": "sliding_attention",
            "num_attention_heads": 96,
            "num_attention_groups": 8,
            "head_dim": 128,
            "true_head_dim": 128,
        },
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 11264,
        "layer_types": ["full_attention", *["sliding_attention"] * 3] * 12,
        "max_position_embeddings": 262144,
        "max_seq_len": 262144,
        "model_type": "step3p5",
        "moe_every_n_layer": 1,
        "moe_intermediate_size": 1280,
        "moe_layer_offset": 0,
        "moe_layers_enum": ",".join(map(str, range(3, 45))),
        "moe_num_experts": 288,
        "moe_router_activation": "sigmoid",
        "moe_router_scaling_factor": 3.0,
        "moe_top_k": 8,
        "need_fp32_gate": True,
        "norm_expert_weight": True,
        "num_attention_groups": 8,
        "num_attention_heads": 64,
        "num_hidden_layers": 45,
        "num_nextn_predict_layers": 3,
        "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0] * 12,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 2.0,
            "original_max_position_embeddings": 131072,
            "low_freq_factor": 1.0,
            "high_freq_factor": 32.0,
        },
        "rope_theta": [5000000.0, 10000.0, 10000.0, 10000.0] * 12,
        "share_expert_dim": 1280,
        "sink": False,
        "sliding_window": 512,
        "swiglu_limits": [*[0.0] * 43, 7, 7, *[0.0] * 3],
        "swiglu_limits_shared": [*[0.0] * 44, 16, *[0.0] * 3],
        "tie_word_embeddings": False,
        "use_head_wise_attn_gate": True,
        "use_moe": True,
        "use_moe_router_bias": True,
        "use_rope_layers": [],
        "vocab_size": 128896,
        "yarn_only_types": ["full_attention"],
        "zero_centered": True,
    },
    "ling-mini-2.0": {
        "architectures": ["BailingMoeV2ForCausalLM"],
        "attention_dropout": 0.0,
        "embedding_dropout": 0.0,
        "eos_token_id": 156892,
        "first_k_dense_replace": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "max_position_embeddings": 32768,
        "max_window_layers": 20,
        "model_type": "bailing_moe",
        "moe_intermediate_size": 512,
        "moe_router_enable_expert_bias": True,
        "moe_shared_expert_intermediate_size": 512,
        "n_group": 8,
        "norm_head": False,
        "norm_softmax": False,
        "norm_topk_prob": True,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 20,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 1,
        "output_dropout": 0.0,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 600000,
        "rotary_dim": 64,
        "routed_scaling_factor": 2.5,
        "router_dtype": "fp32",
        "score_function": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 4,
        "use_bias": False,
        "use_qk_norm": True,
        "use_qkv_bias": False,
        "use_rmsnorm": True,
        "vocab_size": 157184,
    },
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mixtral",
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 32000,
    },
    "qwen1.5-moe-a2.7b": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "max_position_embeddings": 8192,
        "max_window_layers": 21,
        "model_type": "qwen2_moe",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "num_key_value_heads": 16,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4,
        "num_experts": 60,
        "norm_topk_prob": False,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    },
    "glm-4.5-air": {
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": [151329, 151336, 151338],
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "partial_rotary_factor": 0.5,
        "intermediate_size": 10944,
        "max_position_embeddings": 131072,
        "model_type": "glm4_moe",
        "moe_intermediate_size": 1408,
        "norm_topk_prob": True,
        "num_attention_heads": 96,
        "n_group": 1,
        "topk_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 46,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_qk_norm": False,
        "vocab_size": 151552,
    },
    "minimax-m2": {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "attention_dropout": 0.0,
        "attn_type_list": [1] * 62,
        "bos_token_id": None,
        "eos_token_id": None,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "layernorm_full_attention_beta": 1.0,
        "layernorm_linear_attention_beta": 1.0,
        "layernorm_mlp_beta": 1.0,
        "max_position_embeddings": 196608,
        "mlp_intermediate_size": 8192,
        "model_type": "minimax_m2",
        "mtp_transformer_layers": 1,
        "num_attention_heads": 48,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 62,
        "num_key_value_heads": 8,
        "num_local_experts": 256,
        "num_mtp_modules": 3,
        "output_router_logits": False,
        "qk_norm_type": "per_layer",
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "float8_e4m3fn",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        },
        "rms_norm_eps": 1e-06,
        "rope_theta": 5000000,
        "rotary_dim": 64,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "shared_moe_mode": "sigmoid",
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_mtp": True,
        "use_qk_norm": True,
        "use_routing_bias": True,
        "vocab_size": 200064,
    },
    "olmoe-1b-7b": {
        "architectures": ["OlmoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "clip_qkv": None,
        "eos_token_id": 50279,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "max_position_embeddings": 4096,
        "model_type": "olmoe",
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 16,
        "num_key_value_heads": 16,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.01,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 50304,
    },
    "hunyuan-a13b": {
        "architectures": ["HunYuanMoEV1ForCausalLM"],
        "attention_bias": False,
        "attention_head_dim": 128,
        "bos_token_id": 1,
        "eod_token_id": 127967,
        "eos_token_id": 127960,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 3072,
        "max_position_embeddings": 32768,
        "mlp_bias": False,
        "model_type": "hunyuan_v1_moe",
        "moe_intermediate_size": [3072] * 32,
        "moe_topk": [8] * 32,
        "norm_type": "rms",
        "num_attention_heads": 32,
        "num_experts": 64,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_shared_expert": [1] * 32,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cla": False,
        "use_mixed_mlp_moe": True,
        "use_qk_norm": True,
        "vocab_size": 128167,
    },
}
# As model cards and safetensors headers state them, of the last two in billions.
PARAMETERS = {
    "mixtral-8x7b": 46_702_792_704,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "olmoe-1b-7b": 6_919_161_856,
}
BILLIONS = {"glm-4.5-air": 107, "minimax-m2": 229, "hunyuan-a13b": 80}
BILLIONS |= {"mimo-v2-flash": 309, "laguna-xs": 33, "step-3.5-flash": 197, "ling-mini-2.0": 16}


@pytest.mark.parametrize("name", HUB)
def test_hub_configs_and_their_parameter_counts(name) -> None:
    count = num_parameters(spec_from_config(HUB[name]))
    assert count == PARAMETERS.get(name, count)
    assert name in PARAMETERS or round(count / 1e9) == BILLIONS[name]


def test_layers_have_their_own_heads_values_and_ropes() -> None:
    mimo, laguna = (spec_from_config(HUB[name]) for name in ("mimo-v2-flash", "laguna-xs"))
    full, sliding = mimo.layers[0], mimo.layers[1]
    assert (full.num_kv_heads, full.window, full.sinks, full.moe) == (4, None, False, False)
    assert (sliding.num_kv_heads, sliding.window, sliding.sinks) == (8, 129, True)
    assert [i for i, layer in enumerate(mimo.layers) if layer.window is None][1:3] == [5, 11]
    assert (full.head_dim, mimo.value_dim, mimo.value_scale) == (192, 128, 0.707)
    assert [(rope.theta, rope.rotary_dim) for rope in mimo.ropes] == [(5e6, 64), (1e4, 64)]
    assert [laguna.heads(layer) for layer in laguna.layers[:4]] == [48, 64, 64, 64]
    assert [rope.rotary_dim for rope in laguna.ropes] == [64, 128]


def test_limits_of_swiglu_and_heads_of_step() -> None:
    step = spec_from_config(HUB["step-3.5-flash"])
    assert [(i, one.expert_limit) for i, one in enumerate(step.layers) if one.expert_limit] == [
        (43, 7.0),
        (44, 7.0),
    ]
    assert [(i, one.mlp_limit) for i, one in enumerate(step.layers) if one.mlp_limit] == [(44, 16)]
    assert [step.heads(layer) for layer in step.layers[:5]] == [64, 96, 96, 96, 64]
    assert [layer.moe for layer in step.layers[:4]] == [False, False, False, True]
    assert [(rope.kind, rope.theta, rope.rotary_dim) for rope in step.ropes] == [
        ("llama3", 5e6, 64),
        ("default", 1e4, 128),
    ]


def test_what_routes_is_read() -> None:
    glm, m2 = (spec_from_config(HUB[name]) for name in ("glm-4.5-air", "minimax-m2"))
    assert glm.moe is not None
    assert m2.moe is not None
    for moe in (glm.moe, m2.moe):
        assert (moe.scoring, moe.correction_bias, moe.normalise) == ("sigmoid", True, True)
    assert (glm.moe.shared, m2.moe.shared) == (True, False)
    assert [layer.moe for layer in glm.layers] == [False] + [True] * 45
    assert [layer.intermediate_size for layer in glm.layers[:2]] == [10944, 1408]
    assert (glm.ropes[0].rotary_dim, m2.ropes[0].rotary_dim) == (64, 64)
    assert m2.stored_weights is not None
    assert m2.stored_weights.block_rows == 128
    names = {piece.tensor for parameter in parameters(m2) for piece in parameter.pieces}
    inside = "layers.61.block_sparse_moe"
    assert f"{inside}.experts.255.w1.weight" in names
    assert f"{inside}.e_score_correction_bias" in names
    assert not any(".mlp." in name for name in names)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("glm-4.5-air", {"n_group": 3}, "128 experts cannot stand in 3 groups"),
        ("glm-4.5-air", {"n_group": 64}, "8 experts cannot be chosen from 1 of 64 groups of 2"),
        ("glm-4.5-air", {"scoring_func": "softmax"}, "supported: noaux_tc, sigmoid"),
        ("glm-4.5-air", {"topk_method": "greedy"}, "supported: noaux_tc"),
        ("glm-4.5-air", {"moe_layer_freq": 2}, "supported: 1"),
        ("glm-4.5-air", {"mlp_layer_types": ["sparse"]}, "46 entries are needed"),
        ("glm-4.5-air", {"mlp_layer_types": ["wet"] * 46}, "lists of dense and sparse"),
        ("glm-4.5-air", {"n_shared_experts": 65}, "at most 64"),
        ("laguna-xs", {"num_attention_heads_per_layer": [48] * 3}, "40 entries are needed"),
        ("laguna-xs", {"num_attention_heads_per_layer": [12] * 40}, "multiple of the 8 KV heads"),
        ("laguna-xs", {"moe_router_logit_softcapping": 30.0}, "0 is"),
        ("mimo-v2-flash", {"swa_num_key_value_heads": 4}, "weft reads the models with 8"),
        ("mimo-v2-flash", {"add_full_attention_sink_bias": True}, "weft reads the models with"),
        ("step-3.5-flash", {"swiglu_limits": [7] * 44}, "45 entries are needed"),
        ("step-3.5-flash", {"swiglu_limits_shared": [-1.0] * 45}, "numbers are needed"),
        ("step-3.5-flash", {"moe_layers_enum": "3,x"}, "numbers of layers are needed"),
        ("step-3.5-flash", {"use_head_wise_attn_gate": False}, "weft reads the models with True"),
        ("step-3.5-flash", {"rope_theta": [5e6, 1e4] * 24}, "with one rotation are supported"),
        ("step-3.5-flash", {"yarn_only_types": ["sliding_attention"]}, "may be scaled"),
        ("step-3.5-flash", {"num_sliding_attention_heads": 60}, "multiple of the 8 KV heads"),
        ("step-3.5-flash", {"attention_other_setting": {"head_dim": 64}}, "that of other layers"),
        ("ling-mini-2.0", {"score_function": "softmax"}, "weft reads the models with sigmoid"),
        ("ling-mini-2.0", {"norm_head": True}, "weft reads the models with False"),
        ("ling-mini-2.0", {"moe_shared_expert_intermediate_size": 8}, "that of routed ones is"),
        ("minimax-m2", {"attn_type_list": [0, 1] * 31}, "full attention"),
        ("minimax-m2", {"shared_intermediate_size": 8}, "shared_intermediate_size"),
        ("minimax-m2", {"layernorm_mlp_beta": 2.0}, "layernorm_mlp_beta"),
        ("minimax-m2", {"use_routing_bias": False}, "supported: true"),
        ("minimax-m2", {"num_experts_per_tok": 257}, "only 256 exist"),
        ("olmoe-1b-7b", {"clip_qkv": 8.0}, "does not cut off Q, K and V"),
        ("qwen1.5-moe-a2.7b", {"layer_types": ["sliding_attention"] * 24}, "use_sliding_window"),
        ("hunyuan-a13b", {"moe_topk": [8, 4] * 16}, "one number above zero for all layers"),
        ("hunyuan-a13b", {"num_shared_expert": 2}, "weft reads the models with 1"),
        ("hunyuan-a13b", {"use_cla": True}, "weft reads the models without"),
        ("mixtral-8x7b", {"num_local_experts": 4097}, "at most 4096"),
    ],
)
def test_what_would_change_the_result_is_refused(name, changes, words) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        spec_from_config(HUB[name] | changes)


def test_info_says_how_experts_are_routed(tmp_path) -> None:
    folder = save_with_tokenizer(build("glm4-moe-groups"), tmp_path)
    lines = format_info(collect_info(EngineConfig(model=str(folder))))
    assert (
        "12 experts of 24 in 3 layers, 3 a token by sigmoid and a correction bias, from 2 of 4 "
        "groups; shared ones of 48" in lines
    )
