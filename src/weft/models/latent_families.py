"""Families with multi-head latent attention: ``config.json`` -> ``ModelSpec``."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from weft.models.config_reader import ConfigReader
from weft.models.family import Family, Sizes, read_sizes
from weft.models.llama_like import llama_like
from weft.models.spec import CheckpointLayout, LatentSpec, LayerSpec, ModelSpec


def _read_latent(config: ConfigReader) -> LatentSpec:
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
    config: ConfigReader, sizes: Sizes, layers: list[LayerSpec], **differences: Any
) -> ModelSpec:
    """Return the spec of a model whose layers all have latent attention.

    Args:
        layers: of ``sizes``; their heads become the one cached row.
    """
    latent = _read_latent(config)
    bias = config.flag("attention_bias", False)
    scale = latent.query_dim**-0.5 * _yarn_scale(config)
    pairs = config.flag("rope_interleave", True)
    return llama_like(
        config,
        sizes,
        [replace(layer, num_kv_heads=1, head_dim=latent.row_dim) for layer in layers],
        replace(sizes.rope_context(), head_dim=latent.rotated_dim),
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


LATENT_FAMILIES = (Family("youtu", "YoutuForCausalLM", "youtu", youtu),)
