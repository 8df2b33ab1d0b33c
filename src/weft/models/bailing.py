"""Ling and Ring 2 and Sarvam: ``config.json`` -> ``ModelSpec``."""

from __future__ import annotations

from weft.models.config_reader import ConfigReader
from weft.models.family import Family, read_sizes
from weft.models.gguf_form import DEEPSEEK_EXPERTS, PLAIN_SHARES, GgufForm
from weft.models.llama_like import llama_like
from weft.models.moe_families import deepseek_moe, dense_first, expert_layers, without_predictors
from weft.models.spec import CheckpointLayout, ModelSpec

_NAMES = {
    "embed_tokens": "word_embeddings",
    "self_attn.qkv_proj": "attention.query_key_value",
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
    "mlp.gate.e_score_correction_bias": "mlp.gate.expert_bias",
}
_SUPPORTED = {
    "moe_router_enable_expert_bias": True,
    "moe_router_enable_shared_expert": True,
    "norm_head": False,
    "score_function": "sigmoid",
    "use_rmsnorm": True,
}
# Of training, and of what other models of the name have.
_UNUSED = "embedding_dropout max_window_layers norm_softmax output_dropout router_dtype rotary_dim"


def _bailing(config: ConfigReader, limit: int | None, part: float, theta: float) -> ModelSpec:
    """Read a model of which this part of a head rotates if nothing is said, by this base."""
    for key, value in _SUPPORTED.items():
        if (found := config.value(key, value)) != value:
            config.refuse(key, found, f"weft reads the models with {value}")
    config.ignore(*_UNUSED.split())
    if "num_mtp_layers" in config:
        config.assume(num_nextn_predict_layers=config.value("num_mtp_layers"))
    sizes = read_sizes(config, limit)
    experts = "num_experts" if "num_experts" in config else "n_routed_experts"
    others = "num_shared_experts" if "num_shared_experts" in config else "n_shared_experts"
    moe, shared = deepseek_moe(config, experts, others)
    stated = config.count("moe_shared_expert_intermediate_size", moe.intermediate_size)
    if shared and stated != moe.intermediate_size:
        config.refuse("moe_shared_expert_intermediate_size", stated, "that of routed ones is")
    return llama_like(
        config,
        sizes,
        expert_layers(sizes, dense_first(config, sizes, 1), shared),
        sizes.rope_context(theta=theta, partial=True, partial_rotary_factor=part),
        moe=moe,
        qk_norm=config.flag("use_qk_norm", True),
        qkv_bias=config.flag("use_qkv_bias", config.flag("attention_bias", False)),
        output_bias=config.flag("use_bias", False),
        layout=without_predictors(config, sizes, CheckpointLayout(fused_qkv=True, renamed=_NAMES)),
    )


def ling2(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Ling and Ring 2: routing of DeepSeek-V3 in groups, half of each head rotates."""
    return _bailing(config, limit, 0.5, 600_000.0)


def sarvam(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Sarvam: Ling 2 whose heads rotate as a whole."""
    return _bailing(config, limit, 1.0, 8_000_000.0)


BAILING = (
    Family(
        "bailing_moe",
        "BailingMoeV2ForCausalLM",
        "bailing_moe",
        ling2,
        gguf=GgufForm(
            "bailingmoe2",
            biases={"use_qkv_bias": "attn_q.bias", "use_qk_norm": "attn_q_norm.weight"},
            partly_rotated=True,
            scoring="sigmoid",
            numbers={
                **DEEPSEEK_EXPERTS,
                "expert_count": "num_experts",
                "expert_shared_count": "num_shared_experts",
                "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
            },
            stated={key: PLAIN_SHARES[key] for key in PLAIN_SHARES if not key.startswith("n_sh")},
        ),
    ),
    Family("sarvam_moe", "SarvamMoEForCausalLM", "sarvam_moe", sarvam),
)
