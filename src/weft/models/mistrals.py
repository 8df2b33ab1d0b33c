"""Ministral and Mistral Small 3 and 4: ``config.json`` -> ``ModelSpec``."""

from __future__ import annotations

from weft.models.config_reader import ConfigReader
from weft.models.family import (
    FULL,
    SLIDING,
    Family,
    Multimodal,
    read_layer_types,
    read_sizes,
    read_text_part,
    read_window,
)
from weft.models.gguf_form import GgufForm
from weft.models.gguf_mixers import scaled_queries
from weft.models.latent_families import latent_like, read_latent
from weft.models.llama_like import llama_like, mistral
from weft.models.moe_families import dense_first, expert_layers
from weft.models.spec import ModelSpec, MoeSpec


def ministral(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Ministral: Mistral with a window in some layers."""
    config.assume(sliding_window=4096)
    sizes = read_sizes(config, limit)
    window = read_window(config)
    default = [FULL if window is None else SLIDING] * sizes.layers
    kinds = read_layer_types(config, sizes, default)
    layers = [sizes.layer(window=window if kind == SLIDING else None) for kind in kinds]
    return llama_like(config, sizes, layers)


def ministral3(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Ministral 3: queries of far positions are scaled after their rotation."""
    config.assume(head_dim=128, rms_norm_eps=1e-5)
    sizes = read_sizes(config, limit)
    layers = [sizes.layer(window=read_window(config))] * sizes.layers
    context = sizes.rope_context(theta=1_000_000.0, scales_queries=True)
    return llama_like(config, sizes, layers, context)


def mistral4(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Mistral Small 4: softmax over experts in groups, queries of far positions are scaled."""
    config.assume(q_lora_rank=1024, kv_lora_rank=256, qk_nope_head_dim=64, num_experts_per_tok=4)
    config.ignore("head_dim")
    sizes = read_sizes(config, limit)
    size, count = (
        config.positive("moe_intermediate_size", 2048),
        config.count("n_shared_experts", 1),
    )
    moe = MoeSpec(
        num_experts=config.positive("n_routed_experts", config.value("num_local_experts", 128)),
        top_k=config.positive("num_experts_per_tok"),
        intermediate_size=size,
        normalise=config.flag("norm_topk_prob", True),
        n_group=config.positive("n_group", 1),
        topk_group=config.positive("topk_group", 1),
        routed_scaling_factor=config.number("routed_scaling_factor", 1.0),
        shared=count > 0,
    )
    layers = expert_layers(sizes, dense_first(config, sizes, 0), count * size)
    latent = read_latent(config)
    rope = {
        "head_dim": latent.query_dim,
        "partial": True,
        "partial_rotary_factor": latent.rotated_dim / latent.query_dim,
        "scales_queries": True,
    }
    spec = latent_like(config, sizes, layers, rope, moe=moe)
    if spec.ropes[0].rotary_dim != latent.rotated_dim:
        part = spec.ropes[0].rotary_dim / latent.query_dim
        config.refuse("partial_rotary_factor", part, "it must be qk_rope_head_dim of a head")
    return spec


def mistral3(config: ConfigReader, limit: int | None) -> ModelSpec:
    """The text model of a Mistral Small 3 or 4, or of a Ministral 3, that also reads images."""
    config.ignore("multimodal_projector_bias", "projector_hidden_act")
    config.ignore("spatial_merge_size", "vision_feature_layer")
    text = config.section("text_config") or ConfigReader({})
    kinds = {"mistral": mistral, "ministral3": ministral3, "mistral4": mistral4}
    return read_text_part(kinds[text.choice("model_type", "mistral", kinds)], config, limit)


MISTRALS = (
    Family(
        "ministral",
        "MinistralForCausalLM",
        "ministral",
        ministral,
        (Multimodal("Mistral3ForConditionalGeneration", "mistral3", mistral3),),
    ),
    Family(
        "ministral3",
        "Ministral3ForCausalLM",
        "ministral3",
        ministral3,
        gguf=GgufForm("mistral3", rotated_by_pairs=True, more=scaled_queries),
    ),
    Family("mistral4", "Mistral4ForCausalLM", "mistral4", mistral4),
)
