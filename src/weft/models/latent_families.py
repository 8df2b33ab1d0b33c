"""Families with multi-head latent attention: ``config.json`` -> ``ModelSpec``."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from weft.models.config_reader import ConfigReader
from weft.models.family import Family, Multimodal, Sizes, read_sizes, read_text_part
from weft.models.gguf_form import GgufForm
from weft.models.gguf_mixers import latent_attention
from weft.models.llama_like import llama_like
from weft.models.moe_families import (
    deepseek_moe,
    dense_first,
    expert_layers,
    without_predictors,
)
from weft.models.spec import CheckpointLayout, LatentSpec, LayerSpec, ModelSpec, MoeSpec


def read_latent(config: ConfigReader) -> LatentSpec:
    """Read the sizes of latent attention."""
    whole = config.switched_off("q_lora_rank")
    config.ignore("qk_head_dim")  # the sum of the next two
    return LatentSpec(
        query_rank=None if whole else config.positive("q_lora_rank"),
        rank=config.positive("kv_lora_rank", 512),
        rotated_dim=config.positive("qk_rope_head_dim", 64),
        plain_dim=config.positive("qk_nope_head_dim", 128),
        value_dim=config.positive("v_head_dim", 128),
    )


def _yarn_scale(config: ConfigReader) -> float:
    """The factor of scores that goes with an extended context (DeepSeek-V2's ``mscale``)."""
    rope = config.section("rope_scaling") or config.section("rope_parameters")
    if rope is None or rope.value("rope_type", rope.value("type", "default")) == "default":
        return 1.0
    magnitude, factor = rope.optional_number("mscale_all_dim"), rope.number("factor", 1.0)
    if not magnitude or factor <= 1:
        return 1.0
    return (0.1 * magnitude * math.log(factor) + 1.0) ** 2


def latent_like(
    config: ConfigReader,
    sizes: Sizes,
    layers: list[LayerSpec],
    rope: dict[str, Any] | None = None,
    **differences: Any,
) -> ModelSpec:
    """Return the spec of a model whose layers all have latent attention, but for recurrent ones.

    Args:
        layers: of ``sizes``; their heads become the one cached row.
        rope: how its rotary embedding's context differs.
    """
    latent = read_latent(config)
    bias = config.flag("attention_bias", False)
    if bias and latent.query_rank is None:
        config.refuse("attention_bias", True, "supported with q_lora_rank")
    scale = latent.query_dim**-0.5 * _yarn_scale(config)
    pairs = config.flag("rope_interleave", True)
    return llama_like(
        config,
        sizes,
        [replace(layer, num_kv_heads=1, head_dim=latent.row_dim) for layer in layers],
        sizes.rope_context(**({"head_dim": latent.rotated_dim} | (rope or {}))),
        latent=latent,
        attention_scale=scale,
        qkv_bias=bias,
        output_bias=bias,
        **({"layout": CheckpointLayout(rotated_by_pairs=pairs)} | differences),
    )


def youtu(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Youtu-LLM: DeepSeek-V3's attention with dense MLPs."""
    config.assume(q_lora_rank=1536, tie_word_embeddings=True)
    config.ignore("embedding_initializer_range", "head_dim")
    sizes = read_sizes(config, limit)
    return latent_like(config, sizes, [sizes.layer()] * sizes.layers)


def _with_experts(config: ConfigReader, limit: int | None, dense: int) -> ModelSpec:
    """Routing and shared experts of DeepSeek-V3.

    Args:
        dense: layers before the first one with experts, where the config names no number.
    """
    sizes = read_sizes(config, limit)
    moe, shared = deepseek_moe(config, "n_routed_experts", "n_shared_experts")
    layers = expert_layers(sizes, dense_first(config, sizes, dense), shared)
    spec = latent_like(config, sizes, layers, moe=moe)
    return replace(spec, layout=without_predictors(config, sizes, spec.layout))


def deepseek_v3(config: ConfigReader, limit: int | None) -> ModelSpec:
    """DeepSeek V3, R1 and V3.1, and Kimi K2."""
    config.assume(
        q_lora_rank=1536,
        n_shared_experts=1,
        n_group=8,
        topk_group=4,
        num_experts_per_tok=8,
        routed_scaling_factor=2.5,
    )
    config.ignore("head_dim")
    return _with_experts(config, limit, 3)


def glm4_moe_lite(config: ConfigReader, limit: int | None) -> ModelSpec:
    """GLM 4.7 Flash."""
    config.assume(
        q_lora_rank=768,
        qk_nope_head_dim=192,
        v_head_dim=256,
        rms_norm_eps=1e-5,
        n_shared_experts=1,
        num_experts_per_tok=4,
        routed_scaling_factor=1.8,
    )
    config.ignore("head_dim", "partial_rotary_factor")
    return _with_experts(config, limit, 1)


def minicpm3(config: ConfigReader, limit: int | None) -> ModelSpec:
    """MiniCPM 3: dense MLPs; embeddings, residuals and logits are scaled by the model's sizes."""
    config.assume(
        q_lora_rank=768,
        kv_lora_rank=256,
        qk_rope_head_dim=32,
        qk_nope_head_dim=64,
        rms_norm_eps=1e-5,
        rope_interleave=False,
        tie_word_embeddings=True,
    )
    config.ignore("head_dim")
    sizes = read_sizes(config, limit)
    config.assume(v_head_dim=sizes.hidden // sizes.heads)
    return latent_like(
        config,
        sizes,
        [sizes.layer()] * sizes.layers,
        embedding_scale=config.number("scale_emb", 12),
        residual_scale=config.number("scale_depth", 1.4) / math.sqrt(sizes.layers),
        logit_scale=config.number("dim_model_base", 256) / sizes.hidden,
    )


def kimi_k25(config: ConfigReader, limit: int | None) -> ModelSpec:
    """The text model of a Kimi K2.5, which is a DeepSeek V3."""
    config.ignore("ignore_index", "use_unified_vision_chunk")
    config.ignore("media_placeholder_token_id", "video_placeholder")
    config.ignore("projection_hidden_size", "projection_layer_norm_eps")
    return read_text_part(deepseek_v3, config, limit)


def deepseek_v2(config: ConfigReader, limit: int | None) -> ModelSpec:
    """DeepSeek V2, Coder V2 and their Lite ones: softmax, and groups by their best expert."""
    config.assume(
        q_lora_rank=1536, n_shared_experts=2, num_experts_per_tok=6, moe_intermediate_size=1407
    )
    config.ignore("head_dim", "aux_loss_alpha", "seq_aux", "ep_size", "pretraining_tp")
    config.choice("scoring_func", "softmax", ("softmax",))
    method = config.choice("topk_method", "greedy", ("greedy", "group_limited_greedy"))
    if config.positive("moe_layer_freq", 1) != 1:
        config.refuse("moe_layer_freq", config.value("moe_layer_freq"), "supported: 1")
    if config.flag("norm_topk_prob", False):
        config.refuse("norm_topk_prob", True, "DeepSeek V2 does not normalise shares")
    sizes = read_sizes(config, limit)
    groups, chosen = config.positive("n_group", 1), config.positive("topk_group", 1)
    grouped = method == "group_limited_greedy"
    size, count = config.positive("moe_intermediate_size"), config.count("n_shared_experts")
    moe = MoeSpec(
        num_experts=config.positive("n_routed_experts", 64),
        top_k=config.positive("num_experts_per_tok"),
        intermediate_size=size,
        normalise=False,
        n_group=groups if grouped else 1,
        topk_group=chosen if grouped else 1,
        group_best=1,
        routed_scaling_factor=config.number("routed_scaling_factor", 1.0),
        shared=count > 0,
    )
    layers = expert_layers(sizes, dense_first(config, sizes, 0), count * size)
    return latent_like(config, sizes, layers, moe=moe)


LATENT_FAMILIES = (
    Family("youtu", "YoutuForCausalLM", "youtu", youtu),
    Family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        deepseek_v3,
        (Multimodal("KimiK25ForConditionalGeneration", "kimi_k25", kimi_k25),),
        GgufForm("deepseek2", scoring="", more=latent_attention),
    ),
    Family("deepseek_v2", "DeepseekV2ForCausalLM", "deepseek_v2", deepseek_v2),
    Family("glm4_moe_lite", "Glm4MoeLiteForCausalLM", "glm4_moe_lite", glm4_moe_lite),
    Family("minicpm3", "MiniCPM3ForCausalLM", "minicpm3", minicpm3),
)
