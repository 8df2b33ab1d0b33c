"""How GGUF files store the mixtures of experts of ``moe_families``, by the names of these."""

from __future__ import annotations

from weft.models.gguf_form import (
    ATTENTION_BIAS,
    DEEPSEEK_EXPERTS,
    EXPERTS,
    GRANITE_SCALES,
    LOCAL_EXPERTS,
    PLAIN_SHARES,
    SHARED_EXPERT,
    GgufForm,
)
from weft.models.gguf_mixers import granite_attention

FORMS = {
    "glm4_moe": GgufForm(
        "glm4moe",
        biases={**ATTENTION_BIAS, "use_qk_norm": "attn_q_norm.weight"},
        partly_rotated=True,
        scoring="sigmoid",
        numbers=DEEPSEEK_EXPERTS,
        stated=PLAIN_SHARES,
    ),
    "minimax_m2": GgufForm(
        "minimax-m2",
        partly_rotated=True,
        scoring="sigmoid",
        numbers={"expert_feed_forward_length": "intermediate_size", **LOCAL_EXPERTS},
    ),
    "qwen2_moe": GgufForm(
        "qwen2moe",
        biases={"qkv_bias": "attn_q.bias"},
        numbers={**EXPERTS, **SHARED_EXPERT},
        stated={"norm_topk_prob": False},
    ),
    "ernie4_5_moe": GgufForm(
        "ernie4_5-moe",
        numbers={
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "moe_num_shared_experts",
            "interleave_moe_layer_step": "moe_layer_interval",
            "leading_dense_block_count": "moe_layer_start_index",
        },
        unused=("expert_shared_feed_forward_length",),  # the converter guesses it
    ),
    "olmoe": GgufForm(numbers=EXPERTS),
    "dots1": GgufForm(
        scoring="sigmoid",
        numbers=DEEPSEEK_EXPERTS,
        stated={**PLAIN_SHARES, "sliding_window": None},
    ),
    "granitemoe": GgufForm(
        rotated_by_pairs=True,
        biases=ATTENTION_BIAS,
        numbers={
            "expert_shared_feed_forward_length": "shared_intermediate_size",
            **LOCAL_EXPERTS,
            **GRANITE_SCALES,
        },
        more=granite_attention,
    ),
    "exaone_moe": GgufForm(
        "exaone-moe",
        scoring="sigmoid",
        numbers={
            **DEEPSEEK_EXPERTS,
            "expert_count": "num_experts",
            "expert_shared_count": "num_shared_experts",
            "attention.sliding_window": "sliding_window",
        },
        stated={"routed_scaling_factor": 1.0, "norm_topk_prob": False, "sliding_window": None},
        unused=("expert_shared_feed_forward_length",),  # that of the other experts
    ),
    "hunyuan_v1_moe": GgufForm(
        "hunyuan-moe",
        biases=ATTENTION_BIAS,
        numbers={
            "expert_count": "num_experts",
            "expert_used_count": "moe_topk",
            "expert_shared_count": "num_shared_expert",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        unused=("expert_shared_feed_forward_length",),  # that of the other experts
    ),
}
