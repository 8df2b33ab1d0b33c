"""Families of Kimi Delta Attention beside latent attention: ``config.json`` -> ``ModelSpec``."""

from __future__ import annotations

from dataclasses import replace

from weft.kernels.delta import DeltaShape
from weft.models.config_reader import ConfigReader
from weft.models.family import FULL, Family, Sizes, read_sizes
from weft.models.gguf_form import GgufForm
from weft.models.gguf_mixers import kda_layers
from weft.models.gguf_names import KDA_NAMES
from weft.models.hybrids import LINEAR, every_nth, read_mixers
from weft.models.latent_families import latent_like
from weft.models.llama_variants import no_rope
from weft.models.moe_families import (
    MIXTRAL_NAMES,
    deepseek_moe,
    dense_first,
    expert_layers,
    without_predictors,
)
from weft.models.spec import CheckpointLayout, GateSpec, LayerSpec, ModelSpec, MoeSpec, StateSpec

_KIMI_NAMES = MIXTRAL_NAMES | {
    f"mlp.shared_experts.{part}": f"block_sparse_moe.shared_experts.{part}"
    for part in ("gate_proj", "up_proj", "down_proj")
}
_KIMI_NAMES["mlp.gate.e_score_correction_bias"] = "block_sparse_moe.gate.e_score_correction_bias"
_KDA_PARTS = ("b_proj", "f_proj", "q_conv1d", "k_conv1d", "v_conv1d", "o_norm", "A_log", "dt_bias")
_LATENT_PARTS = (
    *("q_a_proj", "q_a_layernorm", "q_b_proj"),
    *("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"),
)
_LING_NAMES = {
    f"self_attn.{part}": f"attention.{part}"
    for part in ("q_proj", "k_proj", "v_proj", "g_proj", *_KDA_PARTS, *_LATENT_PARTS)
}
_LING_NAMES |= {
    "embed_tokens": "word_embeddings",
    "self_attn.o_proj": "attention.dense",
    "self_attn.gate_proj": "attention.g_proj",
    "mlp.gate.e_score_correction_bias": "mlp.gate.expert_bias",
}


def _kda(
    config: ConfigReader,
    *,
    heads: str = "linear_num_heads",
    dim: str = "linear_head_dim",
    taps: str = "linear_conv_kernel_dim",
) -> DeltaShape:
    """Read the sizes of recurrent layers, whose keys and values are alike, from these keys."""
    count, size = config.positive(heads), config.positive(dim)
    kernel = config.positive(taps)
    if kernel < 2:
        config.refuse(taps, kernel, "a convolution reads 2 inputs or more")
    return DeltaShape(count, count, size, size, kernel, by_channel=True)


def _numbered(config: ConfigReader, key: str, sizes: Sizes) -> set[int]:
    """Read the numbers of layers, which count from 1."""
    found = config.integers(key)
    if any(not 1 <= number <= sizes.layers for number in found):
        config.refuse(key, list(found), f"numbers from 1 to {sizes.layers} are needed")
    return set(found)


def _described(config: ConfigReader, sizes: Sizes) -> tuple[list[str], DeltaShape | None]:
    """Read the kinds of layers and their sizes that ``linear_attn_config`` gives, if there is one.

    Without one, every fourth layer behind the first one attends.
    """
    inside = config.section("linear_attn_config")
    if inside is None:
        return [FULL if i and i % 4 == 0 else LINEAR for i in range(sizes.layers)], None
    attending = _numbered(inside, "full_attn_layers", sizes)
    recurrent = _numbered(inside, "kda_layers", sizes)
    if attending & recurrent or len(attending | recurrent) != sizes.layers:
        why = "each layer must be in one of full_attn_layers and kda_layers"
        inside.refuse("kda_layers", sorted(recurrent), why)
    shape = _kda(inside, heads="num_heads", dim="head_dim", taps="short_conv_kernel_size")
    inside.finish()
    return [FULL if i + 1 in attending else LINEAR for i in range(sizes.layers)], shape


def _routing(config: ConfigReader) -> tuple[MoeSpec, int]:
    """Read the routing of DeepSeek-V3 under the names that these configs have for it."""
    names = {
        "num_experts_per_tok": "num_experts_per_token",
        "norm_topk_prob": "moe_renormalize",
        "n_group": "num_expert_group",
    }
    for known, own in names.items():
        if own in config:
            config.assume(**{known: config.value(own)})
    experts = "num_experts" if "num_experts" in config else "num_local_experts"
    shared = "num_shared_experts" if "num_shared_experts" in config else "n_shared_experts"
    return deepseek_moe(config, experts, shared)


def _layers(
    config: ConfigReader, sizes: Sizes, state: StateSpec, kinds: list[str], shared: int, dense: int
) -> list[LayerSpec]:
    """Return the layers, of which those from ``dense`` on have experts if nothing is said."""
    mixers = [{"state": state if kind == LINEAR else None} for kind in kinds]
    return expert_layers(sizes, dense_first(config, sizes, dense), shared, mixers)


def kimi_linear(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Kimi-Linear: three of four layers by KDA, latent attention that is not rotated, experts."""
    config.assume(
        rms_norm_eps=1e-5,
        num_experts_per_tok=8,
        num_local_experts=256,
        n_shared_experts=1,
        routed_scaling_factor=2.446,
        moe_intermediate_size=1024,
        linear_head_dim=128,
        linear_num_heads=32,
        linear_conv_kernel_dim=4,
        max_position_embeddings=config.value("model_max_length", 1_048_576),
    )
    config.choice("moe_router_activation_func", "sigmoid", ("sigmoid",))
    if not config.flag("mla_use_nope", True):
        config.refuse("mla_use_nope", False, "attention of Kimi-Linear is not rotated")
    if not config.switched_off("rope_scaling"):
        config.refuse("rope_scaling", config.value("rope_scaling"), "null is: nothing is rotated")
    config.ignore("head_dim")
    sizes = read_sizes(config, limit)
    moe, shared = _routing(config)
    if not config.flag("use_grouped_topk", True) and moe.n_group > 1:
        config.refuse("use_grouped_topk", False, "supported with num_expert_group 1")
    default, shape = _described(config, sizes)
    kinds = read_mixers(config, sizes, default)
    shape = shape or _kda(config)
    state = StateSpec("delta", shape, gate_rank=shape.value_dim)
    layers = _layers(config, sizes, state, kinds, shared, 1)
    layout = CheckpointLayout(decay_column=True, renamed=_KIMI_NAMES, other_mlp="block_sparse_moe")
    layout = without_predictors(config, sizes, layout)
    spec = latent_like(config, sizes, layers, moe=moe, layout=layout)
    return replace(spec, ropes=(no_rope(spec.ropes[0]),))


def _check_ling(config: ConfigReader, sizes: Sizes) -> None:
    """Refuse what published configs of Ling 3 could ask for beyond what its models have."""
    supported = {
        "gated_attention_proj_granularity_type": "head_wise",
        "linear_attention": "kda",
        "score_function": "sigmoid",
        "no_kda_lora": True,
        "use_kda_lora": False,
        "moe_router_enable_expert_bias": True,
        "rope_interleave": True,
        "rotary_dim": config.positive("qk_rope_head_dim", 64),
        "moe_shared_expert_intermediate_size": config.positive("moe_intermediate_size"),
    }
    off = ("use_qkv_bias", "use_bias", "use_mla_nope", "use_nGPT", "up_proj_norm", "value_norm")
    supported |= dict.fromkeys((*off, "scale_router_input"), False)
    for key, value in supported.items():
        if (found := config.value(key, value)) != value:
            config.refuse(key, found, f"supported: {value}")
    for key in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"):
        limits = config.value(key, [])
        if not isinstance(limits, list) or any(limits):
            config.refuse(key, limits, "MLPs with limits are not computed")
    last = sizes.layers % config.positive("layer_group_size", 6)
    if last and "layer_types" not in config:
        why = f"the last {last} of {sizes.layers} layers are no whole group; state layer_types"
        config.refuse("layer_group_size", config.value("layer_group_size"), why)
    # What the models do not read: of training, of predictors, and of Ling 2's kinds of layers.
    config.ignore("embedding_dropout", "output_dropout", "router_dtype", "seq_aux", "use_qk_norm")
    config.ignore("mtp_loss_scaling_factor", "mtp_use_kda", "max_window_layers", "linear_silu")
    config.ignore("group_norm_size", "num_kv_heads_for_linear_attn")


def bailing_hybrid(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Ling 3: five of six layers by KDA, whose decays have a floor, gated latent attention."""
    config.assume(
        head_dim=128,
        num_experts_per_tok=8,
        num_local_experts=512,
        n_shared_experts=1,
        n_group=8,
        topk_group=4,
        routed_scaling_factor=2.5,
        moe_intermediate_size=768,
        num_nextn_predict_layers=config.value("num_mtp_layers", 1),
        max_position_embeddings=config.value("model_max_length", 262_144),
    )
    sizes = read_sizes(config, limit)
    _check_ling(config, sizes)
    config.assume(
        linear_head_dim=sizes.head_dim,
        linear_num_heads=sizes.heads,
        linear_conv_kernel_dim=config.positive("short_conv_kernel_size", 4),
        rope_theta=6_000_000.0,
    )
    floor = None
    if config.flag("kda_safe_gate", True):
        floor = config.value("kda_lower_bound", -5.0)
        if isinstance(floor, bool) or not isinstance(floor, int | float) or not -80 <= floor < 0:
            config.refuse("kda_lower_bound", floor, "a number from -80 to below 0 is needed")
    config.ignore("kda_lower_bound")
    moe, shared = _routing(config)
    group = config.positive("layer_group_size", 6)
    kinds = read_mixers(config, sizes, every_nth(sizes, group))
    state = StateSpec("delta", _kda(config), floor=floor)
    layers = _layers(config, sizes, state, kinds, shared, 2)
    layout = CheckpointLayout(rotated_by_pairs=True, renamed=_LING_NAMES)
    layout = without_predictors(config, sizes, layout)
    gate = GateSpec(by_head=True)
    more = {"moe": moe, "output_gate": gate, "layout": layout}
    spec = latent_like(config, sizes, layers, {"partial": True}, **more)
    assert spec.latent is not None
    # Configs may name a part of heads that is rotated; what is rotated is a part of its own.
    whole = replace(spec.ropes[0], rotary_dim=spec.latent.rotated_dim)
    return replace(spec, ropes=(whole,))


KIMI = (
    Family(
        "kimi_linear",
        "KimiLinearForCausalLM",
        "kimi_linear",
        kimi_linear,
        gguf=GgufForm("kimi-linear", names=KDA_NAMES, scoring="sigmoid", more=kda_layers),
    ),
    Family(
        "bailing_hybrid",
        "BailingHybridForCausalLM",
        "bailing_hybrid",
        bailing_hybrid,
        aliases=("BailingMoeV3ForCausalLM",),
    ),
)
