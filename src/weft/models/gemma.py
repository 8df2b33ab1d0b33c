"""The Gemma families: ``config.json`` -> ``ModelSpec``. Torch-free."""

from __future__ import annotations

from dataclasses import replace

from weft.core.errors import UnsupportedModelError
from weft.models.config_reader import ConfigReader
from weft.models.encoder_spec import EncoderSpec
from weft.models.family import (
    FULL,
    SLIDING,
    Family,
    Multimodal,
    Reader,
    Sizes,
    read_common,
    read_layer_types,
    read_sizes,
    read_text_part,
    read_window,
)
from weft.models.gguf_form import GgufForm
from weft.models.gguf_mixers import gemma4 as gemma4_metadata
from weft.models.gguf_names import GEMMA4_NAMES
from weft.models.pooling import as_encoder
from weft.models.rope_config import read_layer_ropes, read_rope
from weft.models.spec import LayerSpec, ModelSpec, MoeSpec
from weft.models.vision import read_siglip

# What the text part of a multimodal config may leave out, alike in Gemma 3 and 4.
TEXT_DEFAULTS = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
}
GEMMA4_ROPES = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}
_GLOBAL_HEADS = "its attention loses its precision (Zheng et al. 2026, rvLLM, section 8.10)"


def gemma2(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Gemma 2: alternating windows, soft caps, four norms a layer, scaled embeddings."""
    config.assume(
        hidden_activation="gelu_pytorch_tanh",
        tie_word_embeddings=True,
        head_dim=256,
        sliding_window=4096,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    )
    sizes, window = read_sizes(config, limit), read_window(config)
    kinds = read_layer_types(config, sizes, [(SLIDING, FULL)[i % 2] for i in range(sizes.layers)])
    bias = config.flag("attention_bias", False)
    config.ignore("hidden_act")  # stands beside hidden_activation, which is the one in use
    return ModelSpec(
        layers=tuple(sizes.layer(window=window if kind == SLIDING else None) for kind in kinds),
        ropes=(read_rope(config, sizes.rope_context()),),
        attention_scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        norm_plus_one=True,
        post_norms=True,
        qkv_bias=bias,
        output_bias=bias,
        attention_softcap=config.optional_number("attn_logit_softcapping"),
        logit_softcap=config.optional_number("final_logit_softcapping"),
        embedding_scale=sizes.hidden**0.5,
        **read_common(config, sizes, activation="hidden_activation"),
    )


def gemma3(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Gemma 3 text: a global layer after every five local ones, QK norm, two rotary bases.

    With attention in both directions it gives vectors (EmbeddingGemma, Schechter Vera et al. 2025).
    """
    config.assume(
        **TEXT_DEFAULTS,
        vocab_size=262_208,
        num_hidden_layers=26,
        sliding_window=4096,
    )
    sizes, window = read_sizes(config, limit), read_window(config)
    pattern = config.positive("sliding_window_pattern", 6)
    default = [SLIDING if (i + 1) % pattern else FULL for i in range(sizes.layers)]
    kinds = read_layer_types(config, sizes, default)
    both_ways = config.flag("use_bidirectional_attention", False)
    if both_ways and window is not None:  # it counts what a query sees before itself and behind
        window = window // 2 + 1
    contexts = {FULL: sizes.rope_context(theta=1_000_000.0), SLIDING: sizes.rope_context()}
    ropes = read_layer_ropes(config, contexts)
    bias = config.flag("attention_bias", False)
    config.ignore("hidden_act")
    spec = ModelSpec(
        layers=tuple(
            sizes.layer(window=window, rope=1) if kind == SLIDING else sizes.layer()
            for kind in kinds
        ),
        ropes=(ropes[FULL], ropes[SLIDING]),
        attention_scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        norm_plus_one=True,
        post_norms=True,
        qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
        logit_softcap=config.optional_number("final_logit_softcapping"),
        embedding_scale=sizes.hidden**0.5,
        **read_common(config, sizes, activation="hidden_activation"),
    )
    return as_encoder(spec, EncoderSpec()) if both_ways else spec


def gemma4(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Gemma 4 text: larger global heads, KV shared by the last layers, per-layer embeddings."""
    config.assume(
        **TEXT_DEFAULTS,
        vocab_size=262_144,
        num_hidden_layers=30,
        sliding_window=512,
        rope_parameters=GEMMA4_ROPES,
    )
    sizes, window = read_sizes(config, limit), read_window(config)
    layers = _gemma4_layers(config, sizes, window)
    contexts = {
        FULL: sizes.rope_context(head_dim=layers[-1].head_dim),
        SLIDING: sizes.rope_context(),
    }
    ropes = read_layer_ropes(config, contexts)
    bias = config.flag("attention_bias", False)
    if config.value("use_bidirectional_attention", None) == "all":
        config.refuse("use_bidirectional_attention", "all", "text must be attended causally")
    return ModelSpec(
        layers=layers,
        ropes=(ropes[FULL], ropes[SLIDING]),
        attention_scale=1.0,
        post_norms=True,
        qk_norm=True,
        value_norm=True,
        qkv_bias=bias,
        output_bias=bias,
        logit_softcap=config.optional_number("final_logit_softcapping"),
        embedding_scale=sizes.hidden**0.5,
        moe=_gemma4_moe(config),
        per_layer_input_size=config.count("hidden_size_per_layer_input", 256),
        per_layer_vocab_size=config.positive("vocab_size_per_layer_input", 262_144),
        layer_scalars=True,
        **read_common(config, sizes, activation="hidden_activation"),
    )


def _gemma4_layers(config: ConfigReader, sizes: Sizes, window: int | None) -> tuple[LayerSpec, ...]:
    """Return the layers; those from ``num_kv_shared_layers`` before the end on share KV."""
    default = [SLIDING if (i + 1) % 6 else FULL for i in range(sizes.layers - 1)] + [FULL]
    kinds = read_layer_types(config, sizes, default)
    if kinds[-1] != FULL:
        config.refuse("layer_types", kinds, f"the last layer must be {FULL}")
    first_shared = sizes.layers - config.count("num_kv_shared_layers", 0)
    wide = config.flag("use_double_wide_mlp", False)
    routed = config.flag("enable_moe_block", False)
    value_is_key = config.flag("attention_k_eq_v", False)
    shapes = _gemma4_shapes(config, sizes, kinds, value_is_key)
    layers = []
    for i, kind in enumerate(kinds):
        source = None
        if i >= first_shared:
            if kind not in kinds[:first_shared]:
                config.refuse("num_kv_shared_layers", sizes.layers - first_shared, f"no {kind} KV")
            source = first_shared - 1 - kinds[:first_shared][::-1].index(kind)
        layer = sizes.layer(
            **shapes[i],
            window=window if kind == SLIDING else None,
            rope=1 if kind == SLIDING else 0,
            moe=routed,
            kv_source=source,
            value_is_key=value_is_key and kind == FULL,
        )
        if wide and source is not None:
            layer = replace(layer, intermediate_size=2 * sizes.intermediate)
        layers.append(layer)
    return tuple(layers)


def _gemma4_shapes(
    config: ConfigReader, sizes: Sizes, kinds: list[str], value_is_key: bool
) -> list[dict[str, int]]:
    """Return each layer's head_dim and KV heads: ``per_layer_config``, or the older global keys."""
    overrides = config.section("per_layer_config")
    global_dim = config.positive("global_head_dim", 512)
    global_heads = config.count("num_global_key_value_heads", 0) if value_is_key else 0
    config.ignore("num_global_key_value_heads")
    shapes = []
    for i, kind in enumerate(kinds):
        head_dim, kv_heads = sizes.head_dim, sizes.kv_heads
        if overrides is not None:
            layer = overrides.section(str(i)) or ConfigReader({})
            head_dim = layer.positive("head_dim", head_dim)
            kv_heads = layer.positive("num_key_value_heads", kv_heads)
            layer.finish()
        elif kind == FULL:
            head_dim, kv_heads = global_dim, global_heads or kv_heads
        if sizes.heads % kv_heads:
            config.refuse("num_key_value_heads", kv_heads, f"it must divide {sizes.heads}")
        shapes.append({"head_dim": head_dim, "num_kv_heads": kv_heads})
    if overrides is not None:
        overrides.finish()
    dims = {(kind, shape["head_dim"]) for kind, shape in zip(kinds, shapes, strict=True)}
    if len(dims) > len(set(kinds)) or (SLIDING in kinds and (SLIDING, sizes.head_dim) not in dims):
        config.refuse("per_layer_config", sorted(dims), "one head_dim a layer type is supported")
    return shapes


def _gemma4_moe(config: ConfigReader) -> MoeSpec | None:
    if not config.flag("enable_moe_block", False):
        config.ignore("num_experts", "top_k_experts", "moe_intermediate_size")
        return None
    return MoeSpec(
        num_experts=config.positive("num_experts"),
        top_k=config.positive("top_k_experts"),
        intermediate_size=config.positive("moe_intermediate_size"),
        normalise=True,
        beside_mlp=True,
    )


def _text_part(read: Reader, config: ConfigReader, limit: int | None) -> ModelSpec:
    """Return the text model of a multimodal checkpoint, whose other towers are left unread."""
    config.assume(tie_word_embeddings=True)
    config.ignore("audio_config", "mm_tokens_per_image", "vision_soft_tokens_per_image")
    return read_text_part(read, config, limit)


def gemma3_multimodal(config: ConfigReader, limit: int | None) -> ModelSpec:
    """A Gemma 3 that also reads images."""
    spec = _text_part(gemma3, config, limit)
    try:
        vision = read_siglip(config, spec.hidden_size)
    except UnsupportedModelError as error:
        return replace(spec, no_vision=error.message)
    narrow = [
        layer.window for layer in spec.layers if layer.window and layer.window < vision.tokens
    ]
    if narrow:
        why = f"an image has {vision.tokens} tokens, more than the window of {narrow[0]}"
        return replace(spec, no_vision=why)
    return replace(spec, vision=vision)


def gemma4_multimodal(config: ConfigReader, limit: int | None) -> ModelSpec:
    """The text model of a Gemma 4 that also reads images and sound."""
    return _text_part(gemma4, config, limit)


GEMMA = (
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        "gemma2",
        gemma2,
        gguf=GgufForm(norms_plus_one=True, post_norms=True, scaled_by_width=46),
    ),
    Family(
        "gemma3",
        "Gemma3ForCausalLM",
        "gemma3_text",
        gemma3,
        (Multimodal("Gemma3ForConditionalGeneration", "gemma3", gemma3_multimodal),),
        GgufForm(
            norms_plus_one=True,
            post_norms=True,
            scaled_by_width=62,
            numbers={"rope.freq_base_swa": "rope_local_base_freq"},
        ),
    ),
    Family(
        "gemma4",
        "Gemma4ForCausalLM",
        "gemma4_text",
        gemma4,
        (Multimodal("Gemma4ForConditionalGeneration", "gemma4", gemma4_multimodal),),
        GgufForm(post_norms=True, names=GEMMA4_NAMES, more=gemma4_metadata),
        unsound_kv={"fp8": _GLOBAL_HEADS},
    ),
)
