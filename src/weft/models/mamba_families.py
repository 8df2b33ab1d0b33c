"""Families with Mamba-2 beside attention: ``config.json`` -> ``ModelSpec``."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from weft.kernels.mamba2 import Mamba2Shape
from weft.models.config_reader import ConfigReader
from weft.models.family import FULL, Family, Sizes, read_kinds, read_sizes
from weft.models.gguf_form import (
    ATTENTION_BIAS,
    DEEPSEEK_EXPERTS,
    GRANITE_SCALES,
    GgufForm,
)
from weft.models.gguf_mixers import granite_mamba, one_op_layers
from weft.models.gguf_names import MAMBA_NAMES
from weft.models.llama_like import llama_like
from weft.models.llama_variants import granite, no_rope
from weft.models.moe_families import GRANITE_NAMES
from weft.models.spec import CheckpointLayout, LayerSpec, ModelSpec, MoeSpec, StateSpec

LINEAR = "linear_attention"
_OLD_KINDS = {"mamba": LINEAR, "attention": FULL}
_DENSE_NAMES = {"mlp.gate_up_proj": "shared_mlp.input_linear"}
_DENSE_NAMES |= {"mlp.down_proj": "shared_mlp.output_linear"}
_ONE_OP_NAMES = {
    "embed_tokens": "embeddings",
    "norm": "norm_f",
    "input_layernorm": "norm",
    "post_attention_layernorm": "norm",
    "mamba": "mixer",
    "mlp.gate": "mixer.gate",
}
_ONE_OP_NAMES |= {f"self_attn.{part}_proj": f"mixer.{part}_proj" for part in "qkvo"}
_ONE_OP_NAMES |= {
    f"mlp.{place}{part}_proj": f"mixer.{place}{part}_proj"
    for place in ("", "shared_experts.", "experts.", "experts.*.")
    for part in ("up", "down")
}
_ONE_OP_NAMES |= {
    f"mamba.{part}": f"mixer.{part}" for part in ("in_proj", "conv1d", "norm", "out_proj")
}
DENSE, SPARSE = "mlp", "moe"
_PATTERN = {"M": LINEAR, "*": FULL, "-": DENSE, "E": SPARSE}


def _time_limits(config: ConfigReader) -> tuple[float, float]:
    """Read the least and the largest time step, of which the second is mostly infinite."""
    found = config.value("time_step_limit", [0.0, math.inf])

    def number(entry: Any) -> float:
        if entry == {"__float__": "Infinity"}:  # as transformers writes it
            return math.inf
        good = isinstance(entry, int | float) and not isinstance(entry, bool) and entry >= 0
        return float(entry) if good else math.nan

    limits = [number(entry) for entry in found] if isinstance(found, list) else []
    if len(limits) != 2 or not limits[0] <= limits[1]:
        config.refuse("time_step_limit", found, "two numbers are needed, the smaller one first")
    return limits[0], limits[1]


def _mamba(config: ConfigReader, shape: Mamba2Shape, groups: str) -> StateSpec:
    """Return layers of a shape whose number of groups stands under a key."""
    if shape.heads % shape.groups:
        config.refuse(groups, shape.groups, f"it must divide the {shape.heads} heads")
    if shape.taps < 2:
        config.refuse("conv_kernel", shape.taps, "a convolution reads 2 inputs or more")
    return StateSpec("mamba2", shape, _time_limits(config))


def _granite_mamba(config: ConfigReader, hidden: int) -> StateSpec:
    if config.flag("mamba_proj_bias", False):
        config.refuse("mamba_proj_bias", True, "weft reads the models without")
    heads, width = (
        config.positive("mamba_n_heads", 128),
        config.positive("mamba_expand", 2) * hidden,
    )
    size = config.value("mamba_d_head", "auto")
    size = width // heads if size == "auto" else config.positive("mamba_d_head")
    if size * heads != width:
        config.refuse("mamba_d_head", size, f"{heads} heads must have {width} numbers together")
    shape = Mamba2Shape(
        heads,
        size,
        groups=config.positive("mamba_n_groups", 1),
        state_dim=config.positive("mamba_d_state", 256),
        taps=config.positive("mamba_d_conv", 4),
        conv_bias=config.flag("mamba_conv_bias", True),
    )
    return _mamba(config, shape, "mamba_n_groups")


def _granite_experts(config: ConfigReader, size: int) -> MoeSpec | None:
    count = config.count("num_local_experts", 8)
    if not count:
        config.ignore("num_experts_per_tok")
        return None
    return MoeSpec(
        num_experts=count,
        top_k=config.positive("num_experts_per_tok", 2),
        intermediate_size=size,
        normalise=True,
        shared=True,
    )


def granite_hybrid(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Granite 4: Granite's multipliers, mostly Mamba-2, experts beside a shared one or none."""
    config.choice("normalization_function", "rmsnorm", ("rmsnorm",))
    config.ignore("init_method", "mamba_chunk_size")
    spec, sizes = granite(config, limit), read_sizes(config, limit)
    kinds = read_kinds(config, "layer_types", sizes, [], (*_OLD_KINDS, *_OLD_KINDS.values()))
    kinds = [_OLD_KINDS.get(kind, kind) for kind in kinds]
    if FULL not in kinds:
        config.refuse("layer_types", kinds, "at least one layer must attend")
    if LINEAR in kinds:
        state = _granite_mamba(config, sizes.hidden)
    else:
        state = None
        config.ignore(*(f"mamba_{key}" for key in ("n_heads", "n_groups", "d_state", "d_head")))
        config.ignore(*(f"mamba_{key}" for key in ("d_conv", "expand", "conv_bias", "proj_bias")))
        config.ignore("time_step_limit")
    moe = _granite_experts(config, sizes.intermediate)
    width = config.positive("shared_intermediate_size", 1024)
    layers = [
        sizes.layer(
            state=state if kind == LINEAR else None, moe=moe is not None, intermediate_size=width
        )
        for kind in kinds
    ]
    position = config.value("position_embedding_type", "nope")
    if position not in ("nope", "rope"):
        config.refuse("position_embedding_type", position, "supported: nope, rope")
    names = GRANITE_NAMES if moe is not None else _DENSE_NAMES
    layout = CheckpointLayout(stacked_experts=moe is not None, fused_gate_up=True, renamed=names)
    ropes = spec.ropes if position == "rope" else (no_rope(spec.ropes[0]),)
    return replace(spec, layers=tuple(layers), moe=moe, ropes=ropes, layout=layout)


def _one_op_kinds(config: ConfigReader) -> list[str]:
    """Read what each layer of Nemotron-H is: one of the values of ``_PATTERN``."""
    pattern = config.value("hybrid_override_pattern", "")
    if isinstance(pattern, str) and pattern:
        if set(pattern) - set(_PATTERN):
            config.refuse("hybrid_override_pattern", pattern, "supported: M, *, - and E")
        found: Any = [_PATTERN[letter] for letter in pattern]
        config.ignore("layers_block_type", "layer_types")
    else:
        found = config.value("layers_block_type", config.value("layer_types", []))
        known = (*_OLD_KINDS, *_PATTERN.values())
        if not isinstance(found, list) or not found or any(kind not in known for kind in found):
            config.refuse("layers_block_type", found, f"supported: lists of {', '.join(known)}")
        found = [_OLD_KINDS.get(kind, kind) for kind in found]
    stated = config.positive("num_hidden_layers", len(found))
    if stated != len(found):
        config.refuse("num_hidden_layers", stated, f"there are kinds of {len(found)} layers")
    return list(found)


def _paired(config: ConfigReader, sizes: Sizes, kinds: list[str], shared: int) -> list[LayerSpec]:
    """Return layers of a mixer and of the MLP or the experts behind it, if there are any.

    Args:
        shared: the width of shared experts.
    """
    for needed in (LINEAR, FULL):
        if needed not in kinds:
            config.refuse("layers_block_type", kinds, f"at least one {needed} is needed")
    shape = Mamba2Shape(
        config.positive("mamba_num_heads", 128),
        config.positive("mamba_head_dim", 64),
        groups=config.positive("n_groups", 8),
        state_dim=config.positive("ssm_state_size", 128),
        taps=config.positive("conv_kernel", 4),
        conv_bias=config.flag("use_conv_bias", True),
    )
    state, layers = _mamba(config, shape, "n_groups"), []
    for number, kind in enumerate(kinds):
        if kind not in (DENSE, SPARSE):
            mixer = state if kind == LINEAR else None
            layers.append(sizes.layer(state=mixer, intermediate_size=0, stored=(number, number)))
        elif layers and not layers[-1].has_feed_forward:
            pair, sparse = (number - 1, number), kind == SPARSE
            width = shared if sparse else sizes.intermediate
            layers[-1] = replace(layers[-1], moe=sparse, intermediate_size=width, stored=pair)
        else:
            config.refuse("layers_block_type", kinds, f"no mixer stands before MLP {number}")
    return layers


def _ungated_experts(config: ConfigReader, kinds: list[str]) -> tuple[MoeSpec | None, int]:
    """Read experts and the width of the shared one, whatever the config says without any."""
    config.ignore("moe_shared_expert_overlap")
    if SPARSE not in kinds:
        config.ignore("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "n_group")
        config.ignore("topk_group", "norm_topk_prob", "routed_scaling_factor", "moe_latent_size")
        config.ignore("moe_intermediate_size", "moe_shared_expert_intermediate_size")
        return None, 0
    if not config.switched_off("moe_latent_size"):
        why = "weft has no projection in front of experts"
        config.refuse("moe_latent_size", config.value("moe_latent_size"), why)
    if config.positive("n_shared_experts", 1) != 1:
        config.refuse("n_shared_experts", config.value("n_shared_experts"), "supported: 1")
    moe = MoeSpec(
        num_experts=config.positive("n_routed_experts", 8),
        top_k=config.positive("num_experts_per_tok", 2),
        intermediate_size=config.positive("moe_intermediate_size", 7688),
        normalise=config.flag("norm_topk_prob", True),
        scoring="sigmoid",
        correction_bias=True,
        n_group=config.positive("n_group", 1),
        topk_group=config.positive("topk_group", 1),
        routed_scaling_factor=config.number("routed_scaling_factor", 1.0),
        shared=True,
    )
    return moe, config.positive("moe_shared_expert_intermediate_size", 7688)


def nemotron_h(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Nemotron-H: one op a layer, MLPs and experts without a gate, attention without positions."""
    config.assume(intermediate_size=21_504, num_key_value_heads=8, num_attention_heads=32)
    config.assume(head_dim=config.positive("attention_head_dim", 128))
    config.choice("mlp_hidden_act", "relu2", ("relu2",))
    config.choice("mamba_hidden_act", "silu", ("silu",))
    for key in ("use_bias", "mamba_proj_bias", "mlp_bias", "attention_bias", "residual_in_fp32"):
        if config.flag(key, False):
            config.refuse(key, True, "supported: false")
    config.ignore("num_logits_to_keep", "use_mamba_kernels", "mamba_ssm_cache_dtype", "expand")
    config.ignore("rescale_prenorm_residual", "chunk_size", "norm_eps", "rms_norm_eps")
    config.ignore(*(f"time_step_{key}" for key in ("min", "max", "floor", "rank")))
    config.ignore(
        "num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern"
    )
    kinds = _one_op_kinds(config)
    moe, shared = _ungated_experts(config, kinds)
    config.assume(num_hidden_layers=len(kinds))
    sizes = read_sizes(config, limit)
    layout = CheckpointLayout(prefixes=("backbone.", "model."), renamed=_ONE_OP_NAMES)
    spec = llama_like(
        config,
        sizes,
        _paired(config, sizes, kinds, shared),
        moe=moe,
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        activation="relu2",
        layout=replace(layout, ignored=(*layout.ignored, r"mtp\..*")),
    )
    return replace(spec, ropes=(no_rope(spec.ropes[0]),))


MAMBA_FAMILIES = (
    Family(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        granite_hybrid,
        gguf=GgufForm(
            "granitehybrid",
            biases=ATTENTION_BIAS,
            rotated_by_pairs=True,
            names=MAMBA_NAMES,
            numbers=GRANITE_SCALES,
            more=granite_mamba,
        ),
    ),
    Family(
        "nemotron_h",
        "NemotronHForCausalLM",
        "nemotron_h",
        nemotron_h,
        gguf=GgufForm(
            aliases=("nemotron_h_moe",),
            names=MAMBA_NAMES,
            scoring="sigmoid",
            numbers={
                **DEEPSEEK_EXPERTS,
                "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
            },
            unused=("attention.layer_norm_epsilon",),
            more=one_op_layers,
        ),
    ),
)
