"""Families with short convolutions beside attention: ``config.json`` -> ``ModelSpec``."""

from __future__ import annotations

from weft.kernels.conv import ConvShape
from weft.models.config_reader import ConfigReader
from weft.models.family import (
    FULL,
    SLIDING,
    Family,
    Sizes,
    read_common,
    read_kinds,
    read_sizes,
    read_window,
)
from weft.models.gguf_form import EXPERTS, GgufForm
from weft.models.gguf_mixers import short_convolutions
from weft.models.gguf_names import CONV_NAMES
from weft.models.llama_like import llama_like
from weft.models.moe_families import DENSE, SPARSE, expert_layers
from weft.models.rope_config import read_layer_ropes
from weft.models.spec import CheckpointLayout, GateSpec, ModelSpec, MoeSpec, StateSpec

CONV = "conv"
_NAMES = {
    "norm": "embedding_norm",
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}
_LFM2_NAMES = _NAMES | {
    "self_attn.o_proj": "self_attn.out_proj",
    "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm",
    "mlp.gate": "feed_forward.gate",
    "mlp.gate.e_score_correction_bias": "feed_forward.expert_bias",
    "mlp.experts.*.gate_proj": "feed_forward.experts.*.w1",
    "mlp.experts.*.up_proj": "feed_forward.experts.*.w3",
    "mlp.experts.*.down_proj": "feed_forward.experts.*.w2",
    "mlp.experts.gate_up_proj": "feed_forward.experts.gate_up_proj",
    "mlp.experts.down_proj": "feed_forward.experts.down_proj",
}
_SANDWICH_NAMES = {
    "post_attention_layernorm": "post_operator_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffn_norm",
}
_LFM3_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
}


def _read_sizes(config: ConfigReader, limit: int | None) -> Sizes:
    """Read the sizes and what all of these models call otherwise than others."""
    tied = config.flag("tie_word_embeddings", True)
    config.assume(
        rms_norm_eps=config.number("norm_eps", 1e-5),
        tie_word_embeddings=config.flag("tie_embedding", tied),
    )
    return read_sizes(config, limit)


def _convolution(config: ConfigReader, sizes: Sizes, taps: int) -> StateSpec:
    shape = ConvShape(
        sizes.hidden, config.positive("conv_L_cache", taps), config.flag("conv_bias", False)
    )
    if shape.taps < 2:
        config.refuse("conv_L_cache", shape.taps, "a convolution reads 2 inputs or more")
    return StateSpec(CONV, shape)


def _kinds(config: ConfigReader, sizes: Sizes, default: list[str], *more: str) -> list[str]:
    found = read_kinds(config, "layer_types", sizes, default, (FULL, CONV, *more))
    if FULL not in found:
        config.refuse("layer_types", found, "at least one layer must attend to everything")
    return found


def _adjusted_width(config: ConfigReader, width: int) -> int:
    """Read how LFM2 makes the width of its MLPs of what its configs state."""
    config.assume(block_ffn_dim_multiplier=1.0)
    multiple = config.positive("block_multiple_of", 256)
    plain = config.switched_off("block_ffn_dim_multiplier")
    factor = 1.0 if plain else config.number("block_ffn_dim_multiplier")
    if not config.flag("block_auto_adjust_ff_dim", True):
        return width
    width = int(factor * int(2 * width / 3))
    return width if plain else multiple * -(-width // multiple)


def lfm2(config: ConfigReader, limit: int | None) -> ModelSpec:
    """LFM2: short convolutions, and in a few layers attention with norms on heads of Q and K."""
    for key in ("block_use_swiglu", "use_pos_enc"):
        if not config.flag(key, True):
            config.refuse(key, False, "supported: true")
    config.ignore("block_dim", "block_norm_eps", "conv_dim", "conv_dim_out", "num_heads")
    config.ignore("block_mlp_init_scale", "block_out_init_scale")
    config.ignore("block_use_xavier_init", "conv_use_xavier_init")
    config.assume(intermediate_size=12_288)
    sizes = _read_sizes(config, limit)
    width = _adjusted_width(config, config.positive("block_ff_dim", sizes.intermediate))
    state = _convolution(config, sizes, 3)
    attending = config.integers("full_attn_idxs")
    default = [FULL if i in attending else CONV for i in range(sizes.layers)]
    kinds = _kinds(config, sizes, default)
    return llama_like(
        config,
        sizes,
        [sizes.layer(state=state if k == CONV else None, intermediate_size=width) for k in kinds],
        sizes.rope_context(theta=1_000_000.0),
        qk_norm=True,
        layout=CheckpointLayout(renamed=_LFM2_NAMES),
    )


def lfm2_moe(config: ConfigReader, limit: int | None) -> ModelSpec:
    """LFM2 with experts in all layers but the first ones: sigmoid with a correction bias."""
    config.assume(intermediate_size=7168)
    sizes = _read_sizes(config, limit)
    state = _convolution(config, sizes, 3)
    dense = config.count("num_dense_layers", 2)
    moe = MoeSpec(
        num_experts=config.positive("num_experts", 32),
        top_k=config.positive("num_experts_per_tok", 4),
        intermediate_size=config.positive("moe_intermediate_size", 1792),
        normalise=config.flag("norm_topk_prob", True),
        scoring="sigmoid",
        correction_bias=config.flag("use_expert_bias", True),
        routed_scaling_factor=config.number("routed_scaling_factor", 1.0),
    )
    states = [{"state": state if k == CONV else None} for k in _kinds(config, sizes, [])]
    sparse = [DENSE if i < dense else SPARSE for i in range(sizes.layers)]
    return llama_like(
        config,
        sizes,
        expert_layers(sizes, sparse, 0, states),
        sizes.rope_context(theta=1_000_000.0),
        moe=moe,
        qk_norm=True,
        layout=CheckpointLayout(renamed=_LFM2_NAMES),
    )


def lfm3(config: ConfigReader, limit: int | None) -> ModelSpec:
    """LFM3: LFM2 with windows, a gate for each head, and norms behind attention and MLP, too."""
    config.assume(sliding_window=256, head_dim=128, rope_parameters=_LFM3_ROPES)
    sizes = _read_sizes(config, limit)
    window, state = read_window(config), _convolution(config, sizes, 7)
    every = {0: SLIDING, 2: FULL}  # of each four layers; the first one of all is a convolution
    default = [every.get(i % 4, CONV) if i else CONV for i in range(sizes.layers)]
    kinds = _kinds(config, sizes, default, SLIDING)
    if window is None and SLIDING in kinds:
        config.refuse("layer_types", kinds, "sliding layers need sliding_window")
    ropes = read_layer_ropes(config, dict.fromkeys((FULL, SLIDING), sizes.rope_context()))
    sandwich, bias = config.flag("use_sandwich_norm", True), config.flag("attention_bias", False)
    of_kind = {
        FULL: sizes.layer(),
        SLIDING: sizes.layer(window=window, rope=1),
        CONV: sizes.layer(state=state),
    }
    return ModelSpec(
        layers=tuple(of_kind[kind] for kind in kinds),
        ropes=(ropes[FULL], ropes[SLIDING]),
        attention_scale=sizes.head_dim**-0.5,
        qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
        post_norms=sandwich,
        output_gate=GateSpec(by_head=True) if config.flag("use_attention_gate", True) else None,
        layout=CheckpointLayout(renamed=_NAMES | (_SANDWICH_NAMES if sandwich else {})),
        **read_common(config, sizes),
    )


CONV_FAMILIES = (
    Family(
        "lfm2",
        "Lfm2ForCausalLM",
        "lfm2",
        lfm2,
        gguf=GgufForm(
            names=CONV_NAMES, stated={"block_auto_adjust_ff_dim": False}, more=short_convolutions
        ),
    ),
    Family(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        "lfm2_moe",
        lfm2_moe,
        gguf=GgufForm(
            "lfm2moe",
            biases={"use_expert_bias": "exp_probs_b.bias"},
            names=CONV_NAMES,
            scoring="sigmoid",
            numbers={**EXPERTS, "leading_dense_block_count": "num_dense_layers"},
            more=short_convolutions,
        ),
    ),
    Family("lfm3", "Lfm3ForCausalLM", "lfm3", lfm3),
)
