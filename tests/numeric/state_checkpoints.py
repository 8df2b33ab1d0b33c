"""Random checkpoints of the families with short convolutions or Mamba-2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MAMBA, FULL, MLP = "linear_attention", "full_attention", "mlp"
GRANITE = ("GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig")
MULTIPLIERS = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 0.5,
}
GRANITE_ATTENTION = {
    **MULTIPLIERS,
    "layer_types": [FULL] * 3,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 72,
    "position_embedding_type": "rope",
    "tie_word_embeddings": True,
}


def state_cases(case: Callable[..., Any], rope: Callable[..., Any]) -> dict[str, Any]:
    """Return cases by name.

    Args:
        case: makes one of architecture, config class and values.
        rope: makes rope parameters.
    """
    return _convolutions(case, rope) | _mamba(case)


def _convolutions(case: Callable[..., Any], rope: Callable[..., Any]) -> dict[str, Any]:
    return {
        "lfm2": case(
            "Lfm2ForCausalLM",
            "Lfm2Config",
            num_hidden_layers=4,
            layer_types=["conv", "conv", FULL, "conv"],
            block_multiple_of=8,
        ),
        "lfm2-biases": case(
            "Lfm2ForCausalLM",
            "Lfm2Config",
            full_attn_idxs=[1],
            conv_bias=True,
            conv_L_cache=4,
            block_auto_adjust_ff_dim=False,
            num_key_value_heads=1,
            norm_eps=1e-3,
            rope_parameters=rope("default"),
            tie_word_embeddings=False,
        ),
        "lfm2-moe": case(
            "Lfm2MoeForCausalLM",
            "Lfm2MoeConfig",
            layer_types=["conv", FULL, "conv"],
            num_dense_layers=1,
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
        ),
        "lfm2-moe-plain": case(
            "Lfm2MoeForCausalLM",
            "Lfm2MoeConfig",
            layer_types=[FULL, "conv", "conv"],
            num_dense_layers=0,
            num_experts=4,
            num_experts_per_tok=3,
            moe_intermediate_size=40,
            use_expert_bias=False,
            norm_topk_prob=False,
            routed_scaling_factor=1.5,
            conv_bias=True,
            tie_word_embeddings=False,
        ),
        "lfm3": case(
            "Lfm3ForCausalLM", "Lfm3Config", num_hidden_layers=5, head_dim=16, sliding_window=24
        ),
        "lfm3-plain": case(
            "Lfm3ForCausalLM",
            "Lfm3Config",
            head_dim=24,
            sliding_window=40,
            layer_types=["sliding_attention", "conv", FULL],
            conv_L_cache=2,
            use_sandwich_norm=False,
            use_attention_gate=False,
            attention_bias=True,
            num_key_value_heads=1,
            rope_parameters={
                "full_attention": rope("default"),
                "sliding_attention": rope("proportional", partial_rotary_factor=0.25),
            },
            tie_word_embeddings=False,
        ),
    }


def _mamba(case: Callable[..., Any]) -> dict[str, Any]:
    def nemotron(**values: Any) -> Any:
        # Below which transformers raises the time steps of prompts, but not those of output.
        return case("NemotronHForCausalLM", "NemotronHConfig", time_step_min=1e-9, **values)

    return {
        "granite-hybrid": case(
            *GRANITE,
            **MULTIPLIERS,
            layer_types=[MAMBA, FULL, MAMBA],
            num_local_experts=0,
            num_experts_per_tok=0,
            shared_intermediate_size=72,
            mamba_n_heads=4,
            mamba_d_state=16,
            tie_word_embeddings=True,
        ),
        "granite-hybrid-moe": case(
            *GRANITE,
            **(MULTIPLIERS | {"residual_multiplier": 1.0}),
            num_hidden_layers=4,
            layer_types=[MAMBA, MAMBA, FULL, MAMBA],
            num_local_experts=6,
            num_experts_per_tok=2,
            intermediate_size=24,
            shared_intermediate_size=40,
            mamba_n_heads=8,
            mamba_d_head=16,
            mamba_d_state=32,
            mamba_n_groups=2,
            mamba_d_conv=3,
            mamba_conv_bias=False,
            attention_bias=True,
            position_embedding_type="rope",
        ),
        "nemotron-h": nemotron(
            layers_block_type=[MAMBA, MLP, MAMBA, FULL, MLP, MAMBA, MLP],
            head_dim=16,
            mamba_num_heads=4,
            mamba_head_dim=32,
            ssm_state_size=16,
            n_groups=2,
        ),
        "nemotron-h-moe": nemotron(
            layers_block_type=[MAMBA, "moe", FULL, "moe", MAMBA, MLP],
            head_dim=16,
            mamba_num_heads=4,
            mamba_head_dim=16,
            ssm_state_size=32,
            n_groups=4,
            n_routed_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            moe_shared_expert_intermediate_size=40,
            n_group=2,
            topk_group=1,
            routed_scaling_factor=2.5,
        ),
        "nemotron-h-ends": nemotron(
            layers_block_type=[FULL, MAMBA, MLP, MAMBA],
            head_dim=24,
            num_key_value_heads=1,
            mamba_num_heads=6,
            mamba_head_dim=16,
            ssm_state_size=48,
            n_groups=1,
            conv_kernel=2,
            use_conv_bias=False,
            layer_norm_epsilon=1e-3,
        ),
    }
