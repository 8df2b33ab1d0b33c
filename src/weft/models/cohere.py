"""Cohere's families: ``config.json`` -> ``ModelSpec``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from weft.models.config_reader import ConfigReader
from weft.models.family import (
    FULL,
    SLIDING,
    Family,
    Multimodal,
    Sizes,
    read_sizes,
    read_text_part,
    read_window,
    read_windows,
)
from weft.models.gguf_form import GgufForm
from weft.models.llama_like import llama_like
from weft.models.llama_variants import with_no_rope
from weft.models.rope_config import RopeContext
from weft.models.spec import CheckpointLayout, LayerSpec, ModelSpec

_ONE_NORM = {"post_attention_layernorm": "input_layernorm"}  # of attention and the MLP


def _cohere_like(
    config: ConfigReader,
    sizes: Sizes,
    layers: Sequence[LayerSpec],
    context: RopeContext | None = None,
    **differences: Any,
) -> ModelSpec:
    """Cohere's models: LayerNorm, one for attention and MLP, which stand beside each other."""
    config.assume(tie_word_embeddings=True)
    config.choice("position_embedding_type", "rope_gptj", ("rope_gptj",))
    for part in ("parallel_block", "gated_activation"):
        if not config.flag(f"use_{part}", True):
            config.refuse(f"use_{part}", False, "Cohere's published models have it")
    config.ignore("use_parallel_embedding", "use_embedding_sharing")
    bias = config.flag("attention_bias", False)
    return llama_like(
        config,
        sizes,
        layers,
        context,
        norm_eps=config.number("layer_norm_eps", 1e-5),
        norm_centred=True,
        parallel_block=True,
        logit_scale=config.number("logit_scale", 0.0625),
        qkv_bias=bias,
        output_bias=bias,
        layout=CheckpointLayout(
            rotated_by_pairs=True,
            head_norms=True,
            renamed=_ONE_NORM,
        ),
        **differences,
    )


def cohere(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Command R and Aya 23."""
    sizes = read_sizes(config, limit)
    context = sizes.rope_context(theta=500_000.0)
    qk_norm = config.flag("use_qk_norm", False)
    return _cohere_like(config, sizes, [sizes.layer()] * sizes.layers, context, qk_norm=qk_norm)


def cohere2(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Command R7B and A: three of four layers have a window, the others are not rotated."""
    config.assume(sliding_window=4096)
    sizes = read_sizes(config, limit)
    window = read_window(config)
    every = config.positive("sliding_window_pattern", config.positive("layer_switch", 4))
    config.choice("order_of_interleaved_layers", "local_attn_first", ("local_attn_first",))
    default = [SLIDING if (i + 1) % every else FULL for i in range(sizes.layers)]
    layers = [
        sizes.layer(window=one, rope=0 if one else 1)
        for one in read_windows(config, sizes, default, window)
    ]
    spec = _cohere_like(config, sizes, layers)
    return with_no_rope(spec)


def cohere2_vision(config: ConfigReader, limit: int | None) -> ModelSpec:
    """The text model of a Command A that also reads images."""
    config.ignore("downsample_factor", "alignment_intermediate_size")
    return read_text_part(cohere2, config, limit)


_COMMAND_R = GgufForm(
    "command-r",
    biases={"use_qk_norm": "attn_q_norm.weight"},
    layout={"renamed": _ONE_NORM},
    numbers={"attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"},
)
COHERE = (
    Family("cohere", "CohereForCausalLM", "cohere", cohere, gguf=_COMMAND_R),
    Family(
        "cohere2",
        "Cohere2ForCausalLM",
        "cohere2",
        cohere2,
        (Multimodal("Cohere2VisionForConditionalGeneration", "cohere2_vision", cohere2_vision),),
        replace(
            _COMMAND_R,
            name="cohere2",
            biases={},
            numbers={**_COMMAND_R.numbers, "attention.sliding_window": "sliding_window"},
        ),
    ),
)
