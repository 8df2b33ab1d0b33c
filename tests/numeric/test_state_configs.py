"""Published configs of models with short convolutions or Mamba-2, and what weft refuses of them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from weft.core.errors import UnsupportedModelError
from weft.cost.shape import ModelShape, model_shape
from weft.models.layout import num_parameters, parameters
from weft.models.spec_reader import spec_from_config


def attending(layers: int, numbers: tuple[int, ...], kind: str, other: str) -> list[str]:
    return [kind if number in numbers else other for number in range(layers)]


HUB: dict[str, dict[str, Any]] = {
    "lfm2-700m": {
        "architectures": ["Lfm2ForCausalLM"],
        "block_auto_adjust_ff_dim": True,
        "block_dim": 1536,
        "block_ff_dim": 10240,
        "block_ffn_dim_multiplier": 1.0,
        "block_mlp_init_scale": 1.0,
        "block_multiple_of": 256,
        "block_norm_eps": 1e-05,
        "block_out_init_scale": 1.0,
        "block_use_swiglu": True,
        "block_use_xavier_init": True,
        "bos_token_id": 1,
        "conv_L_cache": 3,
        "conv_bias": False,
        "conv_dim": 1536,
        "conv_dim_out": 1536,
        "conv_use_xavier_init": True,
        "eos_token_id": 7,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "hidden_size": 1536,
        "max_position_embeddings": 128000,
        "model_type": "lfm2",
        "norm_eps": 1e-05,
        "num_attention_heads": 24,
        "num_heads": 24,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "rope_theta": 1000000.0,
        "torch_dtype": "bfloat16",
        "use_pos_enc": True,
        "vocab_size": 65536,
    },
    "lfm2-8b-a1b": {
        "architectures": ["Lfm2MoeForCausalLM"],
        "bos_token_id": 1,
        "conv_L_cache": 3,
        "conv_bias": False,
        "dtype": "bfloat16",
        "eos_token_id": 7,
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "layer_types": attending(24, (2, 6, 10, 14, 18, 21), "full_attention", "conv"),
        "max_position_embeddings": 128000,
        "model_type": "lfm2_moe",
        "moe_intermediate_size": 1792,
        "norm_eps": 1e-05,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        "routed_scaling_factor": 1.0,
        "use_expert_bias": True,
        "vocab_size": 65536,
    },
    "granite-4.0-h-tiny": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_multiplier": 0.0078125,
        "bos_token_id": 100257,
        "embedding_multiplier": 12,
        "eos_token_id": 100257,
        "hidden_act": "silu",
        "hidden_size": 1536,
        "init_method": "mup",
        "intermediate_size": 512,
        "layer_types": attending(40, (5, 15, 25, 35), "attention", "mamba"),
        "logits_scaling": 6,
        "mamba_chunk_size": 256,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 48,
        "mamba_proj_bias": False,
        "max_position_embeddings": 131072,
        "model_type": "granitemoehybrid",
        "normalization_function": "rmsnorm",
        "num_attention_heads": 12,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 40,
        "num_key_value_heads": 4,
        "num_local_experts": 64,
        "position_embedding_type": "nope",
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000,
        "router_aux_loss_coef": 0.01,
        "shared_intermediate_size": 1024,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 100352,
    },
    "nemotron-h-56b": {
        "architectures": ["NemotronHForCausalLM"],
        "attention_bias": False,
        "attention_head_dim": 128,
        "bos_token_id": 1,
        "chunk_size": 128,
        "conv_kernel": 4,
        "eos_token_id": 2,
        "expand": 2,
        "hidden_size": 8192,
        "hybrid_override_pattern": "M-M-M-M*-" + 9 * "M-M-M-M-M*-" + "M-M-M-M-M-",
        "intermediate_size": 32768,
        "layer_norm_epsilon": 1e-05,
        "mamba_head_dim": 64,
        "mamba_hidden_act": "silu",
        "mamba_num_heads": 256,
        "mamba_proj_bias": False,
        "max_position_embeddings": 8192,
        "mlp_bias": False,
        "mlp_hidden_act": "relu2",
        "model_type": "nemotron_h",
        "n_groups": 8,
        "num_attention_heads": 64,
        "num_hidden_layers": 118,
        "num_key_value_heads": 8,
        "num_logits_to_keep": 1,
        "rescale_prenorm_residual": True,
        "residual_in_fp32": False,
        "rms_norm_eps": 1e-05,
        "sliding_window": None,
        "ssm_state_size": 256,
        "tie_word_embeddings": False,
        "time_step_floor": 0.0001,
        "time_step_limit": [0.0, math.inf],
        "time_step_max": 0.1,
        "time_step_min": 0.001,
        "time_step_rank": 512,
        "torch_dtype": "bfloat16",
        "use_bias": False,
        "use_conv_bias": True,
        "use_mamba_kernels": True,
        "vocab_size": 131072,
    },
}
NANO = {  # where it differs from its larger and older relative
    "attention_head_dim": None,
    "head_dim": 128,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "intermediate_size": 1856,
    "mamba_num_heads": 64,
    "mamba_ssm_cache_dtype": "float32",
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 1.0,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "ssm_state_size": 128,
    "topk_group": 1,
}
HUB["nemotron-3-nano"] = HUB["nemotron-h-56b"] | NANO


@pytest.mark.parametrize(
    ("name", "recurrent", "attend", "slot_mib", "billions"),
    [
        ("lfm2-700m", 10, 6, 0.117, 0.742),
        ("lfm2-8b-a1b", 18, 6, 0.281, 8.34),
        ("granite-4.0-h-tiny", 36, 4, 55.4, 6.94),
        ("nemotron-h-56b", 54, 10, 876.7, 56.3),
        ("nemotron-3-nano", 23, 6, 47.6, 31.6),
    ],
)
def test_published_configurations_are_read(name, recurrent, attend, slot_mib, billions):
    spec = spec_from_config(HUB[name])
    assert spec.states is not None
    assert len(spec.states.layers) == recurrent
    assert spec.num_layers - recurrent == attend
    assert spec.states.slot_bytes / 2**20 == pytest.approx(slot_mib, rel=0.01)
    assert num_parameters(spec) / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize("name", ["lfm2-8b-a1b", "granite-4.0-h-tiny"])
def test_costs_are_of_the_states_and_weights_that_the_model_has(name):
    """Of LFM2's first layers, which are dense, costs know nothing: the others are taken for all."""
    spec, shape = spec_from_config(HUB[name]), ModelShape.from_config(HUB[name])
    assert spec.states is not None
    assert shape.state_bytes == spec.states.slot_bytes
    assert shape.attention_layers == spec.num_layers - len(spec.states.layers)
    near = 0.08 if "lfm" in name else 1e-3
    assert shape.parameters == pytest.approx(num_parameters(spec), rel=near)


@pytest.mark.parametrize("name", ["nemotron-h-56b", "nemotron-3-nano"])
def test_kinds_whose_costs_are_not_known_are_refused(name):
    with pytest.raises(UnsupportedModelError, match="recurrent layers of nemotron_h"):
        ModelShape.from_config(HUB[name])


def test_a_shape_without_a_size_is_refused():
    config = {"model_type": "qwen3_5_text", "num_hidden_layers": 4, "hidden_size": 64}
    config |= {"num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 512}
    with pytest.raises(UnsupportedModelError, match="linear_num_value_heads"):
        ModelShape.from_config(config)
    catalogued = model_shape("qwen3.6-27b")
    assert catalogued.parameters / 1e9 == pytest.approx(26.9, abs=0.1)
    assert catalogued.state_bytes / 2**20 == pytest.approx(149.6, abs=0.1)
    sparse = model_shape("qwen3.6-35b-a3b")
    assert sparse.parameters / 1e9 == pytest.approx(34.7, abs=0.1)
    assert sparse.state_bytes / 2**20 == pytest.approx(62.8, abs=0.1)


def test_layers_of_one_op_are_paired_and_keep_their_numbers_on_disk():
    spec = spec_from_config(HUB["nemotron-h-56b"])
    assert [layer.stored for layer in spec.layers[:5]] == [(0, 1), (2, 3), (4, 5), (6, 6), (7, 8)]
    tensors = {piece.tensor for p in parameters(spec) for piece in p.pieces}
    assert {f"layers.{number}.norm.weight" for number in range(118)} <= tensors
    assert {"layers.1.mixer.up_proj.weight", "layers.7.mixer.q_proj.weight"} <= tensors
    assert {"embeddings.weight", "norm_f.weight", "layers.6.mixer.A_log"} <= tensors


def test_granite_4_without_recurrent_layers_is_read():
    """As its Micro is published, with sizes of Mamba-2 that mean nothing."""
    config = HUB["granite-4.0-h-tiny"] | {
        "layer_types": ["attention"] * 40,
        "position_embedding_type": "rope",
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
    }
    spec = spec_from_config(config)
    assert spec.states is None
    assert spec.moe is None
    assert spec.ropes[0].kind == "default"
    assert spec_from_config(HUB["granite-4.0-h-tiny"]).ropes[0].kind == "none"


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "one tap": ("lfm2-700m", {"conv_L_cache": 1}, "conv_L_cache"),
    "no attention": ("lfm2-700m", {"full_attn_idxs": []}, "layer_types"),
    "unknown kind": ("lfm2-8b-a1b", {"layer_types": ["conv"] * 23 + ["mamba"]}, "layer_types"),
    "no gate in MLPs": ("lfm2-700m", {"block_use_swiglu": False}, "block_use_swiglu"),
    "biases": ("granite-4.0-h-tiny", {"mamba_proj_bias": True}, "mamba_proj_bias"),
    "heads": ("granite-4.0-h-tiny", {"mamba_d_head": 32}, "mamba_d_head"),
    "groups": ("granite-4.0-h-tiny", {"mamba_n_groups": 5}, "mamba_n_groups"),
    "positions": (
        "granite-4.0-h-tiny",
        {"position_embedding_type": "alibi"},
        "position_embedding_type",
    ),
    "limits": ("nemotron-h-56b", {"time_step_limit": [1.0, 0.5]}, "time_step_limit"),
    "limits of the wrong type": ("nemotron-h-56b", {"time_step_limit": "all"}, "time_step_limit"),
    "letters": ("nemotron-h-56b", {"hybrid_override_pattern": "MX*-"}, "hybrid_override_pattern"),
    "projected experts": ("nemotron-3-nano", {"moe_latent_size": 1024}, "moe_latent_size"),
    "no attention but mixers": (
        "nemotron-3-nano",
        {"hybrid_override_pattern": 26 * "ME"},
        "layers_block_type",
    ),
    "MLP without mixer": (
        "nemotron-h-56b",
        {"hybrid_override_pattern": "M--*" + 57 * "M-"},
        "layers_block_type",
    ),
    "count": ("nemotron-h-56b", {"hybrid_override_pattern": "M*-"}, "num_hidden_layers"),
    "activation": ("nemotron-h-56b", {"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_weft_does_not_compute_is_refused(name):
    model, change, key = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=key) as caught:
        spec_from_config(HUB[model] | change)
    assert caught.value.param == key
