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


def hybrid_cases(case: Callable[..., Any], rope: Callable[..., Any]) -> dict[str, Any]:
    """Return cases by name.

    Args:
        case: makes one of architecture, config class and values.
        rope: makes rope parameters.
    """
    return {
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
