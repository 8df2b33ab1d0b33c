"""Families that move, drop or scale parts of Llama's layers: ``config.json`` -> ``ModelSpec``."""

from __future__ import annotations

from dataclasses import replace

from weft.models.config_reader import ConfigReader
from weft.models.family import (
    FULL,
    SLIDING,
    Family,
    Sizes,
    read_common,
    read_layer_bases,
    read_layer_types,
    read_sizes,
    read_text_part,
    read_window,
    read_windows,
)
from weft.models.gguf_form import ATTENTION_BIAS, FUSED_MLP, GRANITE_SCALES, GgufForm
from weft.models.gguf_mixers import granite_attention, olmo3_windows
from weft.models.llama_like import llama_like
from weft.models.rope_config import read_layer_ropes, read_rope
from weft.models.spec import CheckpointLayout, GateSpec, ModelSpec, RopeSpec

_APERTUS_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def no_rope(rope: RopeSpec) -> RopeSpec:
    """Return a rotary embedding of the same size that rotates by nothing."""
    return RopeSpec("none", rope.theta, rope.rotary_dim)


def with_no_rope(spec: ModelSpec) -> ModelSpec:
    """Return a model of one rotary embedding with a second one, which rotates by nothing."""
    return replace(spec, ropes=(*spec.ropes, no_rope(spec.ropes[0])))


def smollm3(config: ConfigReader, limit: int | None) -> ModelSpec:
    """SmolLM 3: every fourth layer is not rotated (NoPE)."""
    config.assume(tie_word_embeddings=True)
    sizes = read_sizes(config, limit)
    interval = config.positive("no_rope_layer_interval", 4)
    default = [int((i + 1) % interval != 0) for i in range(sizes.layers)]
    rotated = config.value("no_rope_layers", default)
    if not isinstance(rotated, list) or any(flag not in (0, 1) for flag in rotated):
        config.refuse("no_rope_layers", rotated, "a list of 0 and 1 is needed")
    if len(rotated) < sizes.layers:
        config.refuse("no_rope_layers", rotated, f"{sizes.layers} entries are needed")
    window = read_window(config) if config.flag("use_sliding_window", False) else None
    config.ignore("sliding_window", "max_window_layers")
    plain = [FULL if window is None or rotated[i] else SLIDING for i in range(sizes.layers)]
    kinds = read_layer_types(config, sizes, plain)
    layers = [
        sizes.layer(window=window if kinds[i] == SLIDING else None, rope=0 if rotated[i] else 1)
        for i in range(sizes.layers)
    ]
    bias = config.flag("attention_bias", False)
    spec = llama_like(
        config,
        sizes,
        layers,
        sizes.rope_context(theta=2_000_000.0),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
    )
    return with_no_rope(spec)


def apertus(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Apertus: xIELU in MLPs without a gate, norms on each head of Q and K."""
    config.assume(rms_norm_eps=1e-5, rope_parameters=_APERTUS_ROPE)
    if not config.flag("qk_norm", True):
        config.refuse("qk_norm", False, "weft reads the models with norms of Q and K")
    if config.flag("post_norm", False):
        config.refuse("post_norm", True, "weft reads the models without")
    if config.flag("mlp_bias", False):
        config.refuse("mlp_bias", True, "weft reads the models without")
    sizes = read_sizes(config, limit)
    bias = config.flag("attention_bias", False)
    return ModelSpec(
        layers=(sizes.layer(),) * sizes.layers,
        ropes=(read_rope(config, sizes.rope_context(theta=12_000_000.0)),),
        attention_scale=sizes.head_dim**-0.5,
        qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
        layout=CheckpointLayout(
            renamed={
                "input_layernorm": "attention_layernorm",
                "post_attention_layernorm": "feedforward_layernorm",
            }
        ),
        **read_common(config, sizes, known={"xielu": "xielu"}),
    )


def seed_oss(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Seed-OSS: biases on Q, K and V."""
    config.assume(head_dim=128)
    config.ignore("residual_dropout")
    sizes = read_sizes(config, limit)
    return llama_like(
        config,
        sizes,
        [sizes.layer()] * sizes.layers,
        qkv_bias=config.flag("attention_bias", True),
        output_bias=config.flag("attention_out_bias", False),
        mlp_bias=config.flag("mlp_bias", False),
    )


def ernie4_5(config: ConfigReader, limit: int | None) -> ModelSpec:
    """ERNIE 4.5, dense: rotates neighbouring dimensions."""
    config.assume(head_dim=128, tie_word_embeddings=True, rms_norm_eps=1e-5)
    sizes = read_sizes(config, limit)
    bias = config.flag("use_bias", False)
    return llama_like(
        config,
        sizes,
        [sizes.layer()] * sizes.layers,
        sizes.rope_context(theta=500_000.0),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        layout=CheckpointLayout(rotated_by_pairs=True),
    )


def hunyuan(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Hunyuan, dense: Q and K are normalised after their rotation."""
    config.assume(rms_norm_eps=1e-5)
    config.ignore("eod_token_id", "add_classification_head", "attention_head_dim")
    if not config.flag("use_qk_norm", True):
        config.refuse("use_qk_norm", False, "weft reads the models with norms of Q and K")
    sizes = read_sizes(config, limit)
    bias = config.flag("attention_bias", False)
    names = {"self_attn.q_norm": "self_attn.query_layernorm"}
    names["self_attn.k_norm"] = "self_attn.key_layernorm"
    return llama_like(
        config,
        sizes,
        [sizes.layer()] * sizes.layers,
        sizes.rope_context(aliases={"dynamic": "ntk_alpha"}),
        qk_norm=True,
        qk_norm_rotated=True,
        qkv_bias=bias,
        output_bias=bias,
        layout=CheckpointLayout(renamed=names),
    )


def granite(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Granite, dense: multipliers of embeddings, scores, residual sums and logits."""
    sizes = read_sizes(config, limit)
    bias = config.flag("attention_bias", False)
    return llama_like(
        config,
        sizes,
        [sizes.layer()] * sizes.layers,
        attention_scale=config.number("attention_multiplier", 1.0),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        residual_scale=config.number("residual_multiplier", 1.0),
        logit_scale=1.0 / config.number("logits_scaling", 1.0),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
    )


def granite_swa(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Granite with sinks, a window in most layers, and a rotary base of each layer's own."""
    config.assume(rms_norm_eps=1e-5, tie_word_embeddings=True, sliding_window=128)
    spec, sizes, window = granite(config, limit), read_sizes(config, limit), read_window(config)
    default = [SLIDING if i % 4 else FULL for i in range(sizes.layers)]
    windows = read_windows(config, sizes, default, window)
    rope = spec.ropes[0]
    bases = read_layer_bases(config, sizes, [rope.theta] * sizes.layers)
    ropes = {base: replace(rope, theta=base) if base else no_rope(rope) for base in bases}
    return replace(
        spec,
        ropes=tuple(ropes.values()),
        layers=tuple(
            sizes.layer(window=window, rope=list(ropes).index(base), sinks=True)
            for window, base in zip(windows, bases, strict=True)
        ),
    )


def olmo2(config: ConfigReader, limit: int | None) -> ModelSpec:
    """OLMo 2: norms only after attention and MLP, and over all heads of Q and of K."""
    config.assume(rms_norm_eps=1e-5)
    sizes = read_sizes(config, limit)
    bias = config.flag("attention_bias", False)
    return llama_like(
        config,
        sizes,
        [sizes.layer()] * sizes.layers,
        pre_norms=False,
        post_norms=True,
        qk_norm=True,
        qk_norm_whole=True,
        qkv_bias=bias,
        output_bias=bias,
    )


def olmo3(config: ConfigReader, limit: int | None) -> ModelSpec:
    """OLMo 3: as OLMo 2, with a window in three of four layers, whose rotation is not scaled."""
    config.assume(rms_norm_eps=1e-5, sliding_window=4096)
    sizes = read_sizes(config, limit)
    window = read_window(config)
    default = [SLIDING if (i + 1) % 4 else FULL for i in range(sizes.layers)]
    kinds = read_layer_types(config, sizes, default)
    context = sizes.rope_context(theta=config.number("rope_theta", 500_000.0))
    ropes = read_layer_ropes(config, {FULL: context, SLIDING: context})
    bias = config.flag("attention_bias", False)
    return ModelSpec(
        layers=tuple(
            sizes.layer(window=window, rope=1) if kind == SLIDING else sizes.layer()
            for kind in kinds
        ),
        ropes=(ropes[FULL], ropes[SLIDING]),
        attention_scale=sizes.head_dim**-0.5,
        pre_norms=False,
        post_norms=True,
        qk_norm=True,
        qk_norm_whole=True,
        qkv_bias=bias,
        output_bias=bias,
        **read_common(config, sizes),
    )


def exaone4_kinds(config: ConfigReader, sizes: Sizes, window: int | None) -> list[str]:
    """Read which layers have the window: all but every n-th, or those of a word such as LLLG."""
    pattern = config.value("sliding_window_pattern", 4 if window is not None else 0)
    if isinstance(pattern, str):
        if not pattern or set(pattern) - {"L", "G"}:
            config.refuse("sliding_window_pattern", pattern, "a number or a word of L and G")
        local = [pattern[i % len(pattern)] == "L" for i in range(sizes.layers - 1)] + [False]
    else:
        every = config.count("sliding_window_pattern", pattern) or 1
        local = [window is not None and (i + 1) % every > 0 for i in range(sizes.layers)]
    return read_layer_types(config, sizes, [SLIDING if flag else FULL for flag in local])


def exaone4(config: ConfigReader, limit: int | None) -> ModelSpec:
    """EXAONE 4: norms after attention and MLP; beside windows, global layers are not rotated."""
    config.assume(rms_norm_eps=1e-5, sliding_window=4096)
    sizes = read_sizes(config, limit)
    window = read_window(config)
    kinds = exaone4_kinds(config, sizes, window)
    if window is None and SLIDING in kinds:
        config.refuse("layer_types", kinds, "sliding layers need sliding_window")
    layers = [
        sizes.layer(window=window)
        if kind == SLIDING
        else sizes.layer(rope=0 if window is None else 1)
        for kind in kinds
    ]
    spec = llama_like(config, sizes, layers, pre_norms=False, post_norms=True, qk_norm=True)
    return spec if window is None else with_no_rope(spec)


def glm(config: ConfigReader, limit: int | None) -> ModelSpec:
    """GLM 4 of 2024: rotates neighbouring dimensions in half of each head."""
    config.assume(head_dim=128, rms_norm_eps=1.5625e-7)
    sizes = read_sizes(config, limit)
    return llama_like(
        config,
        sizes,
        [sizes.layer()] * sizes.layers,
        sizes.rope_context(partial=True, partial_rotary_factor=0.5),
        qkv_bias=config.flag("attention_bias", True),
        layout=CheckpointLayout(rotated_by_pairs=True, fused_gate_up=True),
    )


def glm4(config: ConfigReader, limit: int | None) -> ModelSpec:
    """GLM 4 0414, dense: as GLM, with norms also after attention and MLP."""
    spec = glm(config, limit)
    names = {
        "post_attention_layernorm": "post_self_attn_layernorm",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
    }
    return replace(spec, post_norms=True, layout=replace(spec.layout, renamed=names))


def _muse_text(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Gates of attention's output, norms of embeddings, Q and K without weights, layers without
    rotation."""
    config.assume(head_dim=128, rms_norm_eps=1e-5, sliding_window=2048)
    sizes, window = read_sizes(config, limit), read_window(config)
    last = sizes.layers - 1
    default = [SLIDING if (last - i) % 4 else FULL for i in range(sizes.layers)]
    kinds = read_layer_types(config, sizes, default)
    rope = read_rope(config, sizes.rope_context())
    bases = read_layer_bases(
        config, sizes, [rope.theta if (last - i) % 4 else 0.0 for i in range(sizes.layers)]
    )
    bias = config.flag("attention_bias", False)
    fields = read_common(config, sizes, activation="hidden_activation")
    return ModelSpec(
        layers=tuple(
            sizes.layer(window=window if kind == SLIDING else None, rope=0 if base else 1)
            for kind, base in zip(kinds, bases, strict=True)
        ),
        ropes=(rope, no_rope(rope)),
        attention_scale=sizes.head_dim**-0.5 * config.number("qk_scale_factor", 3.87),
        norm_plus_one=True,
        plain_final_norm=True,
        post_norms=True,
        post_norm_eps=config.number("post_norm_eps", 1e-8),
        embedding_norm=True,
        qk_norm=True,
        qk_norm_weighted=False,
        qkv_bias=bias,
        output_bias=bias,
        output_gate=GateSpec("sigmoid"),
        logit_scale=config.number("output_multiplier", 0.19611613513818404),
        logit_softcap=config.number("final_logit_softcapping", 20.0),
        **fields,
    )


def muse_glimmer(config: ConfigReader, limit: int | None) -> ModelSpec:
    """The text model of Muse Glimmer, which also reads images and videos."""
    config.ignore("out_hidden_size", "projector_hidden_size", "projector_hidden_act")
    return read_text_part(_muse_text, config, limit)


LLAMA_VARIANTS = (
    Family(
        "smollm3",
        "SmolLM3ForCausalLM",
        "smollm3",
        smollm3,
        gguf=GgufForm(biases=ATTENTION_BIAS, rotated_by_pairs=True),
    ),
    Family(
        "seed_oss",
        "SeedOssForCausalLM",
        "seed_oss",
        seed_oss,
        gguf=GgufForm(biases={**ATTENTION_BIAS, "attention_out_bias": "attn_output.bias"}),
    ),
    Family(
        "ernie4_5",
        "Ernie4_5ForCausalLM",
        "ernie4_5",
        ernie4_5,
        gguf=GgufForm(biases={"use_bias": "attn_q.bias"}),
    ),
    Family(
        "hunyuan_v1_dense",
        "HunYuanDenseV1ForCausalLM",
        "hunyuan_v1_dense",
        hunyuan,
        gguf=GgufForm("hunyuan-dense", biases=ATTENTION_BIAS),
    ),
    Family(
        "granite",
        "GraniteForCausalLM",
        "granite",
        granite,
        gguf=GgufForm(
            biases=ATTENTION_BIAS,
            rotated_by_pairs=True,
            numbers=GRANITE_SCALES,
            more=granite_attention,
        ),
    ),
    Family("apertus", "ApertusForCausalLM", "apertus", apertus),
    Family("granite_swa", "GraniteSWAForCausalLM", "granite_swa", granite_swa),
    Family(
        "olmo2",
        "Olmo2ForCausalLM",
        "olmo2",
        olmo2,
        gguf=GgufForm(biases=ATTENTION_BIAS, post_norms=True, more=olmo3_windows),
    ),
    Family("olmo3", "Olmo3ForCausalLM", "olmo3", olmo3),
    Family(
        "exaone4",
        "Exaone4ForCausalLM",
        "exaone4",
        exaone4,
        gguf=GgufForm(
            post_norms=True,
            numbers={"attention.sliding_window": "sliding_window"},
            stated={"sliding_window": None},
        ),
    ),
    Family("glm", "GlmForCausalLM", "glm", glm),
    Family("muse_glimmer", "MuseGlimmerForConditionalGeneration", "muse_glimmer", muse_glimmer),
    Family(
        "glm4",
        "Glm4ForCausalLM",
        "glm4",
        glm4,
        gguf=GgufForm(
            biases=ATTENTION_BIAS,
            partly_rotated=True,
            post_norms=True,
            names=FUSED_MLP,
        ),
    ),
)
