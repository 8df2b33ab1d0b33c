"""Random checkpoints of the families with recurrent layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

HYBRID = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
LATENT = {
    "bos_token_id": 0,
    "eos_token_id": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
}
KDA = {"linear_num_heads": 4, "linear_head_dim": 16}


def hybrid_cases(case: Callable[..., Any], rope: Callable[..., Any]) -> dict[str, Any]:
    """Return cases by name.

    Args:
        case: makes one of architecture, config class and values.
        rope: makes rope parameters.
    """
    kimi = KDA | LATENT | {"moe_intermediate_size": 24}
    ling = LATENT | {"head_dim": 16, "moe_intermediate_size": 24}
    return {
        "kimi-linear": case(
            "KimiLinearForCausalLM",
            "KimiLinearConfig",
            **kimi,
            num_local_experts=6,
            num_experts_per_tok=2,
            n_shared_experts=2,
            num_hidden_layers=4,
            layer_types=["linear_attention"] * 3 + ["full_attention"],
        ),
        "kimi-linear-groups": case(
            "KimiLinearForCausalLM",
            "KimiLinearConfig",
            **kimi | {"linear_num_heads": 2, "linear_head_dim": 32, "q_lora_rank": 20},
            num_local_experts=8,
            num_experts_per_tok=3,
            n_group=4,
            topk_group=2,
            norm_topk_prob=False,
            linear_conv_kernel_dim=3,
            layer_types=["full_attention", "linear_attention", "linear_attention"],
            mlp_layer_types=["sparse", "sparse", "dense"],
        ),
        "bailing-hybrid": case(
            "BailingHybridForCausalLM",
            "BailingHybridConfig",
            **ling,
            num_local_experts=8,
            num_experts_per_tok=3,
            n_group=4,
            topk_group=2,
            num_mtp_layers=0,
            num_hidden_layers=4,
            layer_group_size=4,
        ),
        "bailing-hybrid-plain-gate": case(
            "BailingHybridForCausalLM",
            "BailingHybridConfig",
            **ling | {"q_lora_rank": 24, "head_dim": 32},
            num_local_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            num_mtp_layers=0,
            kda_safe_gate=False,
            short_conv_kernel_size=2,
            first_k_dense_replace=1,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
        ),
        "qwen3.5": case("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", head_dim=32, **HYBRID),
        "qwen3.5-layers": case(
            "Qwen3_5ForCausalLM",
            "Qwen3_5TextConfig",
            **(HYBRID | {"num_hidden_layers": 3, "linear_num_value_heads": 2}),
            head_dim=64,
            layer_types=["full_attention", "linear_attention", "linear_attention"],
            linear_conv_kernel_dim=3,
            num_key_value_heads=1,
            rope_parameters=rope("default", partial_rotary_factor=0.25)
            | {"mrope_section": [3, 3, 2], "mrope_interleaved": True},
            tie_word_embeddings=True,
        ),
        "qwen3-next": case(
            "Qwen3NextForCausalLM",
            "Qwen3NextConfig",
            head_dim=32,
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=40,
            **HYBRID,
        ),
        "qwen3-next-mixed": case(
            "Qwen3NextForCausalLM",
            "Qwen3NextConfig",
            **(HYBRID | {"linear_num_value_heads": 6}),
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=24,
            decoder_sparse_step=2,
            mlp_only_layers=[3],
            norm_topk_prob=False,
            rope_parameters=rope("default", partial_rotary_factor=0.5),
            tie_word_embeddings=True,
        ),
        "qwen3.5-moe": case(
            "Qwen3_5MoeForCausalLM",
            "Qwen3_5MoeTextConfig",
            head_dim=32,
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=40,
            **HYBRID,
        ),
        "qwen3.5-moe-layers": case(
            "Qwen3_5MoeForCausalLM",
            "Qwen3_5MoeTextConfig",
            **(HYBRID | {"num_hidden_layers": 3, "linear_num_key_heads": 4}),
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=3,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            num_key_value_heads=1,
            tie_word_embeddings=True,
        ),
    }
