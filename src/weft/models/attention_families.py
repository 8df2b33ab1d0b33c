"""Families of experts with sinks or gates in attention: ``config.json`` -> ``ModelSpec``."""

from __future__ import annotations

from typing import Any

from weft.kernels.parts import SWIGLU_ALPHA, SWIGLU_LIMIT
from weft.models.bounds import MOST
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
    read_windows,
)
from weft.models.gguf_form import ATTENTION_BIAS, EXPERTS, LOCAL_EXPERTS, GgufForm
from weft.models.llama_like import llama_like
from weft.models.llama_variants import with_no_rope
from weft.models.moe_families import DENSE, QWEN_NAMES, SPARSE, expert_layers
from weft.models.rope_config import read_layer_ropes
from weft.models.spec import CheckpointLayout, GateSpec, ModelSpec, MoeSpec

_AFMOE_GROUPS = ("n_group", "topk_group", "num_expert_groups", "num_limited_groups")
_LAGUNA_NAMES = QWEN_NAMES | {
    "self_attn.gate_proj": "self_attn.g_proj",
    "mlp.gate.e_score_correction_bias": "mlp.experts.e_score_correction_bias",
}
_AFMOE_NAMES = {
    "mlp.gate": "mlp.router.gate",
    "mlp.gate.e_score_correction_bias": "mlp.expert_bias",
    "pre_feedforward_layernorm": "pre_mlp_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}


def afmoe(config: ConfigReader, limit: int | None) -> ModelSpec:
    """AFMoE (Trinity): gates of attention's output, windows in layers that alone are rotated."""
    config.assume(head_dim=128, rms_norm_eps=1e-5, sliding_window=1024)
    config.choice("score_func", "sigmoid", ("sigmoid",))
    for key, value in (("route_norm", True), *((key, 1) for key in _AFMOE_GROUPS)):
        if config.value(key, value) != value:
            config.refuse(key, config.value(key), f"weft reads the models with {value}")
    config.ignore("load_balance_coeff", "use_grouped_mm")
    sizes, window = read_sizes(config, limit), read_window(config)
    every = config.positive("global_attn_every_n_layers", 4)
    default = [SLIDING if (i + 1) % every else FULL for i in range(sizes.layers)]
    windows = read_windows(config, sizes, default, window)
    size = config.positive("moe_intermediate_size", 1408)
    shared = size * config.count("num_shared_experts", 2)
    moe = MoeSpec(
        num_experts=config.positive("num_experts", 64),
        top_k=config.positive("num_experts_per_tok", 6),
        intermediate_size=size,
        normalise=True,
        scoring="sigmoid",
        correction_bias=True,
        routed_scaling_factor=config.number("route_scale", 1.0),
        shared=shared > 0,
    )
    dense = config.count("num_dense_layers", 1)
    plain: dict[str, Any] = {}
    sparse = {"moe": True, "intermediate_size": shared or sizes.intermediate}
    bias = config.flag("attention_bias", False)
    spec = llama_like(
        config,
        sizes,
        [
            sizes.layer(
                window=window, rope=0 if window else 1, **(plain if number < dense else sparse)
            )
            for number, window in enumerate(windows)
        ],
        moe=moe,
        embedding_scale=sizes.hidden**0.5 if config.flag("mup_enabled", False) else 1.0,
        post_norms=True,
        qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
        output_gate=GateSpec("sigmoid"),
        layout=CheckpointLayout(renamed=_AFMOE_NAMES),
    )
    return with_no_rope(spec)


def gpt_oss(config: ConfigReader, limit: int | None) -> ModelSpec:
    """gpt-oss: sinks, a window in every other layer, biases, experts with a clamped SwiGLU."""
    config.assume(head_dim=64, rms_norm_eps=1e-5, sliding_window=128)
    config.ignore("experts_per_token", "initial_context_length")  # of old names
    for key, value in (("swiglu_alpha", SWIGLU_ALPHA), ("swiglu_limit", SWIGLU_LIMIT)):
        if (found := config.number(key, value)) != value:
            config.refuse(key, found, f"weft's kernels compute with {value}")
    sizes, window = read_sizes(config, limit), read_window(config)
    default = [FULL if i % 2 else SLIDING for i in range(sizes.layers)]
    windows = read_windows(config, sizes, default, window)
    bias = config.flag("attention_bias", True)
    moe = MoeSpec(
        num_experts=config.positive("num_local_experts", 128),
        top_k=config.positive("num_experts_per_tok", 4),
        intermediate_size=sizes.intermediate,
        normalise=True,
        router_bias=True,
        expert_bias=True,
    )
    return llama_like(
        config,
        sizes,
        [sizes.layer(window=window, moe=True, sinks=True) for window in windows],
        sizes.rope_context(theta=150_000.0),
        moe=moe,
        activation="swiglu_oai",
        qkv_bias=bias,
        output_bias=bias,
        layout=CheckpointLayout(
            stacked_experts=True,
            transposed_experts=True,
            interleaved_experts=True,
            renamed={"mlp.gate": "mlp.router"},
        ),
    )


def laguna(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Laguna: layers with unlike numbers of query heads, gates by softplus, routing of AFMoE."""
    config.assume(head_dim=128, sliding_window=512)
    if config.flag("moe_apply_router_weight_on_input", False):
        config.refuse("moe_apply_router_weight_on_input", True, "weft reads the models without")
    if config.value("moe_router_logit_softcapping", 0) != 0:
        found = config.value("moe_router_logit_softcapping")
        config.refuse("moe_router_logit_softcapping", found, "0 is")
    sizes, window = read_sizes(config, limit), read_window(config)
    windows = read_windows(config, sizes, [FULL] * sizes.layers, window)
    heads = _heads_of_layers(config, sizes)
    plain = [DENSE if i == 0 else SPARSE for i in range(sizes.layers)]
    kinds = read_kinds(config, "mlp_layer_types", sizes, plain, (DENSE, SPARSE))
    differences = [
        {"window": window, "rope": int(window is not None), "num_heads": count}
        for window, count in zip(windows, heads, strict=True)
    ]
    shared = config.positive("shared_expert_intermediate_size", 512)
    moe = MoeSpec(
        num_experts=config.positive("num_experts", 256),
        top_k=config.positive("num_experts_per_tok", 8),
        intermediate_size=config.positive("moe_intermediate_size", 512),
        normalise=True,
        scoring="sigmoid",
        correction_bias=True,
        routed_scaling_factor=config.number("moe_routed_scaling_factor", 1.0),
        shared=True,
    )
    gating = config.value("gating", True)
    if gating is not True and gating not in ("per-head", "per-element"):
        config.refuse("gating", gating, "supported: true, per-head, per-element")
    ropes = read_layer_ropes(
        config,
        {
            FULL: sizes.rope_context(theta=500_000.0, partial=True, partial_rotary_factor=0.5),
            SLIDING: sizes.rope_context(partial=True),
        },
    )
    bias = config.flag("attention_bias", False)
    return ModelSpec(
        layers=tuple(expert_layers(sizes, kinds, shared, differences)),
        ropes=(ropes[FULL], ropes[SLIDING]),
        attention_scale=sizes.head_dim**-0.5,
        moe=moe,
        qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
        output_gate=GateSpec("softplus", by_head=gating != "per-element"),
        layout=CheckpointLayout(renamed=_LAGUNA_NAMES),
        **read_common(config, sizes),
    )


def _heads_of_layers(config: ConfigReader, sizes: Sizes) -> list[int | None]:
    """Read the query heads of each layer, None where they are the model's."""
    key = "num_attention_heads_per_layer"
    found = config.integers(key) or (sizes.heads,) * sizes.layers
    if len(found) != sizes.layers:
        config.refuse(key, config.value(key), f"{sizes.layers} entries are needed, one a layer")
    for heads in found:
        if not 0 < heads <= MOST["num_attention_heads"] or heads % sizes.kv_heads:
            config.refuse(key, heads, f"a multiple of the {sizes.kv_heads} KV heads is needed")
    return [None if heads == sizes.heads else heads for heads in found]


ATTENTION_FAMILIES = (
    Family("laguna", "LagunaForCausalLM", "laguna", laguna),
    Family(
        "afmoe",
        "AfmoeForCausalLM",
        "afmoe",
        afmoe,
        gguf=GgufForm(
            post_norms=True,
            names={"attn_gate": "self_attn.gate_proj"},
            scoring="sigmoid",
            numbers={
                **EXPERTS,
                "expert_shared_count": "num_shared_experts",
                "expert_weights_norm": "route_norm",
                "expert_weights_scale": "route_scale",
                "expert_group_count": "n_group",
                "expert_group_used_count": "topk_group",
                "leading_dense_block_count": "num_dense_layers",
                "attention.sliding_window": "sliding_window",
            },
            stated={"mup_enabled": True},  # llama.cpp scales embeddings whatever the file says
        ),
    ),
    Family(
        "gpt_oss",
        "GptOssForCausalLM",
        "gpt_oss",
        gpt_oss,
        gguf=GgufForm(
            "gpt-oss",
            biases=ATTENTION_BIAS,
            numbers={
                "attention.sliding_window": "sliding_window",
                "expert_feed_forward_length": "intermediate_size",
                **LOCAL_EXPERTS,
            },
            scaling={"truncate": False},
        ),
    ),
)
