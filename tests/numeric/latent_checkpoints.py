"""Configurations of families with latent attention; see ``checkpoints``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SIZES = {
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "moe_intermediate_size": 32,
}


def latent_cases(case: Callable[..., Any], rope: Callable[..., Any]) -> dict[str, Any]:
    """Return the cases by their names."""
    deepseek = SIZES | {"n_routed_experts": 8, "num_experts_per_tok": 3}
    return {
        "youtu": case(
            "YoutuForCausalLM",
            "YoutuConfig",
            num_key_value_heads=4,
            q_lora_rank=40,
            kv_lora_rank=32,
            qk_rope_head_dim=8,
            qk_nope_head_dim=24,
            v_head_dim=20,
        ),
        "youtu-one-query-matrix": case(
            "YoutuForCausalLM",
            "YoutuConfig",
            num_key_value_heads=4,
            q_lora_rank=None,
            kv_lora_rank=48,
            qk_rope_head_dim=16,
            qk_nope_head_dim=16,
            v_head_dim=32,
            rope_interleave=False,
            tie_word_embeddings=False,
            rope_parameters=rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=64,
                mscale=1.0,
                mscale_all_dim=0.7,
            ),
        ),
        "deepseek-v3": case(
            "DeepseekV3ForCausalLM",
            "DeepseekV3Config",
            **deepseek,
            n_group=4,
            topk_group=2,
            first_k_dense_replace=1,
            n_shared_experts=2,
            num_mtp_layers=0,
        ),
        "deepseek-v3-yarn": case(
            "DeepseekV3ForCausalLM",
            "DeepseekV3Config",
            **deepseek | {"q_lora_rank": 24, "kv_lora_rank": 48},
            n_group=1,
            topk_group=1,
            first_k_dense_replace=0,
            routed_scaling_factor=1.5,
            attention_bias=True,
            rope_interleave=False,
            num_mtp_layers=0,
            rope_parameters=rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=64,
                mscale=1.0,
                mscale_all_dim=1.0,
            ),
        ),
        "deepseek-v2": case(
            "DeepseekV2ForCausalLM",
            "DeepseekV2Config",
            **deepseek,
            topk_method="group_limited_greedy",
            n_group=4,
            topk_group=2,
            first_k_dense_replace=1,
            routed_scaling_factor=4.0,
        ),
        "deepseek-v2-lite": case(
            "DeepseekV2ForCausalLM",
            "DeepseekV2Config",
            **deepseek | {"q_lora_rank": None},
            topk_method="greedy",
            n_shared_experts=1,
            first_k_dense_replace=1,
            tie_word_embeddings=True,
        ),
        "glm-flash": case("Glm4MoeLiteForCausalLM", "Glm4MoeLiteConfig", **deepseek),
        "glm-flash-groups": case(
            "Glm4MoeLiteForCausalLM",
            "Glm4MoeLiteConfig",
            **deepseek | {"v_head_dim": 32, "kv_lora_rank": 16},
            n_group=2,
            topk_group=1,
            mlp_layer_types=["sparse", "dense", "sparse"],
            norm_topk_prob=False,
        ),
    }
