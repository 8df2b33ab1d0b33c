"""Published configs with KDA: what weft makes of them, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from checkpoints import build, prompt, reference_logits, save, save_with_tokenizer
from paged import PagedRunner
from safetensors.torch import load_file, save_file

from weft.core.config import EngineConfig
from weft.core.errors import UnsupportedModelError
from weft.engine.info import collect_info, format_info
from weft.kernels.ops import select_ops
from weft.models.layout import num_parameters
from weft.models.loader import load_model
from weft.models.spec_reader import spec_from_config

KIMI: dict[str, Any] = {  # Kimi-Linear-48B-A3B
    "architectures": ["KimiLinearForCausalLM"],
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [i for i in range(1, 27) if i % 4],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "pad_token_id": 163839,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_cache": True,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}
LING: dict[str, Any] = {  # Edge0-8B-A1B, of Ling 3's architecture
    "architectures": ["BailingMoeV3ForCausalLM"],
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "embedding_dropout": 0.0,
    "eos_token_id": 156895,
    "expert_swiglu_limit_list": None,
    "first_k_dense_replace": 1,
    "gated_attention_proj_granularity_type": "head_wise",
    "group_norm_size": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "intermediate_size": 4608,
    "kda_lower_bound": -5,
    "kda_safe_gate": True,
    "kv_lora_rank": 512,
    "layer_group_size": 4,
    "linear_silu": True,
    "max_position_embeddings": 131072,
    "max_window_layers": 20,
    "moe_intermediate_size": 512,
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 512,
    "mtp_loss_scaling_factor": 0,
    "mtp_use_kda": False,
    "n_group": 8,
    "no_kda_lora": True,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "num_kv_heads_for_linear_attn": 0,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "output_dropout": 0.0,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 256,
    "qk_head_dim": 192,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_interleave": True,
    "rope_parameters": {
        "partial_rotary_factor": 0.5,
        "rope_theta": 6000000,
        "rope_type": "default",
    },
    "rope_theta": 6000000,
    "rotary_dim": 64,
    "routed_scaling_factor": 2.5,
    "router_dtype": "fp32",
    "scale_router_input": False,
    "score_function": "sigmoid",
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "share_expert_swiglu_limit_list": None,
    "short_conv_kernel_size": 4,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "up_proj_norm": False,
    "use_bias": False,
    "use_kda_lora": False,
    "use_mla_nope": False,
    "use_nGPT": False,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "v_head_dim": 128,
    "value_norm": False,
    "vocab_size": 157184,
}


@pytest.mark.parametrize(
    ("config", "attending", "slot_mib", "billions"),
    [(KIMI, [3, 7, 11, 15, 19, 23, 26], 42.8, 49.1), (LING, [3, 7, 11, 15, 19, 23], 19.3, 7.9)],
)
def test_published_configurations_are_read(config, attending, slot_mib, billions):
    spec = spec_from_config(config)
    assert spec.states is not None
    assert [i for i, layer in enumerate(spec.layers) if layer.state is None] == attending
    assert spec.states.slot_bytes / 2**20 == pytest.approx(slot_mib, abs=0.1)
    assert num_parameters(spec) / 1e9 == pytest.approx(billions, abs=0.1)
    (group,) = spec.kv_groups
    assert (group.layers, group.head_dim, group.arrays) == (tuple(attending), 576, 1)
    assert group.bytes_per_token(2) == len(attending) * 1152
    assert [layer.moe for layer in spec.layers] == [False] + [True] * (spec.num_layers - 1)
    assert spec.ropes[0].rotary_dim == 64


def test_what_differs_is_read():
    kimi, ling = spec_from_config(KIMI), spec_from_config(LING)
    assert (kimi.ropes[0].kind, ling.ropes[0].kind) == ("none", "default")
    assert ling.ropes[0].theta == 6e6
    assert kimi.output_gate is None
    assert ling.output_gate is not None
    assert ling.output_gate.by_head
    states = [spec.layers[0].state for spec in (kimi, ling)]
    assert [(state.gate_rank, state.floor) for state in states] == [(128, None), (None, -5)]
    assert spec_from_config(LING | {"kda_safe_gate": False}).layers[0].state.floor is None
    assert (kimi.moe.n_group, ling.moe.n_group, ling.moe.topk_group) == (1, 8, 4)


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (KIMI, {"mla_use_nope": False}, "mla_use_nope"),
        (KIMI, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling"),
        (KIMI, {"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
        (KIMI, {"use_grouped_topk": False, "num_expert_group": 4}, "use_grouped_topk"),
        (KIMI, {"linear_attn_config": {"gate_lower_bound": -5.0}}, "gate_lower_bound"),
        (KIMI, {"linear_attn_config": {"kda_layers": [1, 2]}}, "each layer must be in one"),
        (KIMI, {"linear_attn_config": {"kda_layers": [28]}}, "numbers from 1 to 27"),
        (KIMI, {"linear_attn_config": {"short_conv_kernel_size": 1}}, "2 inputs or more"),
        (KIMI, {"attention_bias": True}, "q_lora_rank"),
        (KIMI, {"attn_res_block_size": 12}, "attn_res_block_size"),
        (LING, {"kda_lower_bound": 0.5}, "below 0"),
        (LING, {"kda_lower_bound": float("nan")}, "below 0"),
        (LING, {"use_kda_lora": True}, "use_kda_lora"),
        (LING, {"rotary_dim": 32}, "rotary_dim"),
        (LING, {"expert_swiglu_limit_list": [0.0] * 23 + [7.0]}, "with limits"),
        (LING, {"moe_shared_expert_intermediate_size": 1024}, "supported: 512"),
        (LING, {"num_hidden_layers": 26}, "no whole group"),
        (LING, {"layer_group_size": 25, "num_hidden_layers": 24}, "layer_group_size"),
    ],
)
def test_what_would_change_the_result_is_refused(config, changes, words):
    inner = changes.get("linear_attn_config")
    if inner is not None:
        changes = {"linear_attn_config": config["linear_attn_config"] | inner}
    with pytest.raises(UnsupportedModelError, match=words):
        spec_from_config(config | changes)


def test_an_older_kind_of_ling_is_refused_by_what_it_needs():
    with pytest.raises(UnsupportedModelError, match="weft lacks its kind of recurrent layers"):
        spec_from_config(LING | {"architectures": ["BailingMoeLinearV2ForCausalLM"]})


def test_dense_layers_are_found_by_both_names(tmp_path):
    """Published checkpoints call them ``mlp``; those that transformers writes do not."""
    model, tokens = build("kimi-linear"), prompt(20)
    file = save(model, tmp_path) / "model.safetensors"
    stored = load_file(file)
    of_dense = [name for name in stored if "layers.0.block_sparse_moe." in name]
    assert len(of_dense) == 3
    for name in of_dense:
        stored[name.replace("block_sparse_moe", "mlp")] = stored.pop(name)
    save_file(stored, file, {"format": "pt"})
    decoder = load_model(tmp_path, "float32", None, select_ops("cpu", "float32"))
    found = PagedRunner(decoder).step([("a", tokens)])[0]
    assert (found - reference_logits(model, tokens)).abs().max() < 1e-4


def test_info_tells_of_recurrent_layers_and_of_the_cache(tmp_path):
    folder = save_with_tokenizer(build("kimi-linear"), tmp_path)
    lines = format_info(collect_info(EngineConfig(model=str(folder), device="cpu")))
    assert "yes, as kimi_linear" in lines
    assert "4 layers of 64: 1 full (1 KV heads of 40), 3 recurrent" in lines
    assert "18.75 KiB a slot in float32" in lines  # 3 * 4 * (4 * 16 * 16 + 3 * 192)
    assert "160 B a token in float32" in lines  # one row of 40 numbers in one layer
    assert "6 experts of 24 in 3 layers, 2 a token by sigmoid" in lines


@pytest.mark.parametrize("name", ["kimi-linear", "bailing-hybrid"])
def test_how_fast_states_decay_stays_in_float32(name, tmp_path):
    decoder = load_model(
        save(build(name), tmp_path), "bfloat16", None, select_ops("cpu", "bfloat16")
    )
    first = decoder.layers[0]
    assert {str(part.dtype) for part in (first.forget_rate, first.forget_bias)} == {"float32"}
    assert str(first.qkv.dtype) == str(decoder.dtype) == "bfloat16"
