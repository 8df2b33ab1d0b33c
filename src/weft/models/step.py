"""Step 3.5 and the text of Step 3.7: ``config.json`` -> ``ModelSpec``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from weft.models.bounds import MOST_NUMBER
from weft.models.config_reader import ConfigReader
from weft.models.family import (
    FULL,
    SLIDING,
    Family,
    Sizes,
    read_common,
    read_kinds,
    read_sizes,
    read_text_part,
    read_window,
)
from weft.models.gguf_form import GgufForm
from weft.models.gguf_mixers import step_layers
from weft.models.moe_families import DENSE, SPARSE, expert_layers
from weft.models.rope_config import read_layer_ropes
from weft.models.spec import CheckpointLayout, GateSpec, ModelSpec, MoeSpec, RopeSpec

_NAMES = {
    f"mlp.experts.{part}": f"moe.{part}.weight" for part in ("gate_proj", "up_proj", "down_proj")
}
_NAMES |= {
    f"mlp.shared_experts.{part}": f"share_expert.{part}"
    for part in ("gate_proj", "up_proj", "down_proj")
}
_NAMES |= {
    "mlp.gate": "moe.gate",
    "mlp.gate.e_score_correction_bias": "moe.router_bias",
    "self_attn.gate_proj": "self_attn.g_proj",
}
# Keys of published configs with those that transformers has for them.
_OTHER_KEYS = {
    "num_key_value_heads": "num_attention_groups",
    "n_routed_experts": "moe_num_experts",
    "num_experts_per_tok": "moe_top_k",
    "share_expert_dim": "share_expert_dims",
    "max_position_embeddings": "max_seq_len",
}
_SUPPORTED = {
    "att_impl_type": "GQA",
    "gating": True,
    "moe_every_n_layer": 1,
    "moe_router_activation": "sigmoid",
    "norm_expert_weight": True,
    "sink": False,
    "use_head_wise_attn_gate": True,
    "use_moe": True,
    "use_moe_router_bias": True,
    "use_qk_norm": True,
    "zero_centered": True,
}
# Of predictors, of images, and of kernels of others.
_UNUSED = """
image_token_len im_end_token im_patch_token im_start_token moe_layer_offset mtp_layer_types
mtp_mlp_layer_types need_fp32_gate patch_token_len per_layer_config projector_bias
understand_projector_stride use_mfa
"""
_TOWERS = r"(model\.)?(vision_model|vit_large_projector|multi_modal_projector)\..*"


def step3p5(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Step 3.5: gates by head, more heads in sliding layers, SwiGLU with limits in some layers."""
    for known, other in _OTHER_KEYS.items():
        if other in config:
            config.assume(**{known: config.value(other)})
    config.assume(rms_norm_eps=1e-5, head_dim=128)
    for key, value in _SUPPORTED.items():
        if (found := config.value(key, value)) != value:
            config.refuse(key, found, f"weft reads the models with {value}")
    config.ignore(*_UNUSED.split())
    sizes, window = read_sizes(config, limit), read_window(config)
    every = _each(config, "use_rope_layers", sizes, True)
    if not all(every):
        config.refuse("use_rope_layers", every, "weft reads the models that rotate in all layers")
    kinds = _kinds(config, "layer_types", sizes, [FULL] * sizes.layers, (FULL, SLIDING))
    if window is None and SLIDING in kinds:
        config.refuse("layer_types", kinds, "sliding layers need sliding_window")
    sparse = _kinds(config, "mlp_layer_types", sizes, _sparse(config, sizes), (DENSE, SPARSE))
    heads, limits = _sliding_heads(config, sizes), _limits(config, sizes)
    differences = [
        {"mlp_limit": of_mlp}
        | ({"expert_limit": of_experts} if feed == SPARSE else {})
        | ({"window": window, "rope": 1, "num_heads": heads} if kind == SLIDING else {})
        for kind, feed, (of_experts, of_mlp) in zip(kinds, sparse, limits, strict=True)
    ]
    moe = MoeSpec(
        num_experts=config.positive("n_routed_experts", 288),
        top_k=config.positive("num_experts_per_tok", 8),
        intermediate_size=config.positive("moe_intermediate_size", 1280),
        normalise=True,
        scoring="sigmoid",
        correction_bias=True,
        routed_scaling_factor=config.number("moe_router_scaling_factor", 1.0),
        shared=True,
    )
    shared = config.positive("share_expert_dim", 1280)
    bias = config.flag("attention_bias", False)
    return ModelSpec(
        layers=tuple(expert_layers(sizes, sparse, shared, differences)),
        ropes=_ropes(config, sizes, kinds),
        attention_scale=config.number("query_pre_attn_scalar", sizes.head_dim) ** -0.5,
        moe=moe,
        norm_plus_one=True,
        qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
        output_gate=GateSpec(by_head=True),
        layout=_layout(config, sizes),
        **read_common(config, sizes),
    )


def _layout(config: ConfigReader, sizes: Sizes) -> CheckpointLayout:
    """Names on disk; layers behind the last one predict further tokens and are left unread."""
    layout = CheckpointLayout(stacked_experts=True, split_experts=True, renamed=_NAMES)
    extra = config.count("num_nextn_predict_layers", 0)
    numbers = "|".join(str(sizes.layers + i) for i in range(max(extra, 1)))
    behind = rf"model\.(language_model\.)?layers\.({numbers})\..*"
    return replace(layout, ignored=(*layout.ignored, behind))


def _each(config: ConfigReader, key: str, sizes: Sizes, default: Any) -> list[Any]:
    """Read a list with an entry for each layer, behind which predictors may have theirs."""
    found = config.value(key, [default] * sizes.layers) or [default] * sizes.layers
    if not isinstance(found, list) or len(found) < sizes.layers:
        config.refuse(key, found, f"{sizes.layers} entries are needed, one a layer")
    return found[: sizes.layers]


def _kinds(
    config: ConfigReader, key: str, sizes: Sizes, default: Sequence[str], kinds: Sequence[str]
) -> list[str]:
    found = {key: _each(config, key, sizes, None)} if key in config else {}
    return read_kinds(ConfigReader(found), key, sizes, default, kinds)


def _sparse(config: ConfigReader, sizes: Sizes) -> list[str]:
    """Read which layers have experts: a list of numbers, or one with commas in between."""
    key = "moe_layers_enum"
    stated = config.value(key, list(range(3, sizes.layers)))
    found = stated.split(",") if isinstance(stated, str) else stated
    try:
        numbers = {int(number) for number in found}
    except (TypeError, ValueError):
        config.refuse(key, stated, "numbers of layers are needed")
    return [SPARSE if i in numbers else DENSE for i in range(sizes.layers)]


def _sliding_heads(config: ConfigReader, sizes: Sizes) -> int | None:
    """Read the query heads of sliding layers, None where they are those of all."""
    other = config.section("attention_other_setting") or ConfigReader({})
    other.choice("attention_type", SLIDING, (SLIDING,))
    same = {"num_attention_groups": sizes.kv_heads, "head_dim": sizes.head_dim}
    for key, value in (same | {"true_head_dim": sizes.head_dim}).items():
        if (found := other.value(key, value)) != value:
            other.refuse(key, found, f"that of other layers is supported, {value}")
    heads = other.positive("num_attention_heads", sizes.heads)
    other.finish()
    heads = config.positive("num_sliding_attention_heads", heads)
    if heads % sizes.kv_heads:
        why = f"a multiple of the {sizes.kv_heads} KV heads is needed"
        config.refuse("num_sliding_attention_heads", heads, why)
    return None if heads == sizes.heads else heads


def _limits(config: ConfigReader, sizes: Sizes) -> list[tuple[float | None, float | None]]:
    """Read the limits of each layer's routed experts, and of its MLP or shared ones; 0 is none."""
    found = []
    for key in ("swiglu_limits", "swiglu_limits_shared"):
        limits = _each(config, key, sizes, None)
        for one in limits:
            number = isinstance(one, int | float) and not isinstance(one, bool)
            if one is not None and not (number and 0 <= one < MOST_NUMBER):
                config.refuse(key, limits, "numbers are needed")
        found.append([float(one) if one else None for one in limits])
    return list(zip(*found, strict=True))


def _ropes(config: ConfigReader, sizes: Sizes, kinds: Sequence[str]) -> tuple[RopeSpec, RopeSpec]:
    """Read the rotation of full and of sliding layers; only that of full ones is scaled."""
    contexts = {kind: sizes.rope_context(partial=True) for kind in (FULL, SLIDING)}
    ropes: Mapping[str, RopeSpec]
    if "rope_parameters" in config:
        ropes = read_layer_ropes(config, contexts)
        return ropes[FULL], ropes[SLIDING]
    only = config.value("yarn_only_types", [FULL])
    if only not in ([], [FULL]):
        config.refuse("yarn_only_types", only, f"the rotation of {FULL} may be scaled")
    base = config.value("rope_theta", 10_000.0)
    bases = base if isinstance(base, list) else [base] * sizes.layers
    parts = _each(config, "partial_rotary_factors", sizes, None)
    stated: dict[str, dict[str, Any]] = {FULL: {}, SLIDING: {}}
    for kind, *own in zip(kinds, bases, parts, strict=False):
        named = dict(zip(("rope_theta", "partial_rotary_factor"), own, strict=True))
        if stated[kind] not in ({}, named):
            config.refuse("rope_theta", base, f"layers of {kind} with one rotation are supported")
        stated[kind] = named
    scaling = config.value("rope_scaling", {})
    if not isinstance(scaling, dict):
        config.refuse("rope_scaling", scaling, "an object is needed")
    stated[FULL] |= scaling
    ropes = read_layer_ropes(ConfigReader({"rope_parameters": stated}), contexts)
    return ropes[FULL], ropes[SLIDING]


def step3p7(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Step 3.7, whose images are left out, or Step 3.5, which has none."""
    if config.section("text_config") is None:
        return step3p5(config, limit)
    config.ignore(*_UNUSED.split())
    spec = read_text_part(step3p5, config, limit)
    return replace(spec, layout=replace(spec.layout, ignored=(*spec.layout.ignored, _TOWERS)))


STEP = (
    Family(
        "step3p5",
        "Step3p7ForConditionalGeneration",
        "step3p7",
        step3p7,
        aliases=("Step3p5ForCausalLM",),
        gguf=GgufForm(
            "step35",
            norms_plus_one=True,
            names={"attn_gate": "self_attn.gate_proj"},
            scoring="sigmoid",
            numbers={
                "attention.sliding_window": "sliding_window",
                "expert_count": "n_routed_experts",
                "expert_used_count": "num_experts_per_tok",
                "expert_feed_forward_length": "moe_intermediate_size",
                "expert_shared_feed_forward_length": "share_expert_dim",
                "expert_weights_norm": "norm_expert_weight",
                "expert_weights_scale": "moe_router_scaling_factor",
            },
            layout={"split_experts": False},
            unused=("leading_dense_block_count", "moe_every_n_layers"),  # the tensors tell
            more=step_layers,
        ),
    ),
)
