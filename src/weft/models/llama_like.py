"""Llama, Mistral, Qwen and Phi: ``config.json`` -> ``ModelSpec``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.models.config_reader import ConfigReader
from weft.models.family import (
    FULL,
    SLIDING,
    Family,
    Multimodal,
    Reader,
    Sizes,
    ignore_towers,
    read_common,
    read_layer_types,
    read_sizes,
    read_text_part,
    read_window,
    with_towers,
)
from weft.models.gguf_form import ATTENTION_BIAS, EXPERTS, FUSED_MLP, VISION, GgufForm
from weft.models.gguf_mixers import mixtral_experts
from weft.models.rope_config import RopeContext, read_rope
from weft.models.spec import CheckpointLayout, LayerSpec, ModelSpec, MoeSpec

_LARGE_KEYS = (
    "biases make some keys so large that rounding them to 3 bits of mantissa drowns the scores "
    "(QwenLM/Qwen3 issue 840, NVIDIA/TensorRT-LLM issue 4218, ggml-org/llama.cpp issue 21385)"
)


def llama_like(
    config: ConfigReader,
    sizes: Sizes,
    layers: Sequence[LayerSpec],
    context: RopeContext | None = None,
    **differences: Any,
) -> ModelSpec:
    """Return the spec of a model with one rotary embedding and Llama's order of operations.

    Args:
        context: what the embedding starts from; None: base 10000, of whole heads.
    """
    rope = read_rope(config, context or sizes.rope_context())
    fields = read_common(config, sizes) | {"ropes": (rope,)}
    if rope.kind == "yarn":  # configs often state the length without the extension
        extended = int(rope.factor * rope.original_max_position)
        fields["max_position_embeddings"] = max(sizes.max_position, extended)
    return ModelSpec(
        layers=tuple(layers),
        **(fields | {"attention_scale": sizes.head_dim**-0.5} | differences),
    )


def llama(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Llama 2, 3, 3.1 and later text models."""
    sizes = read_sizes(config, limit)
    bias = config.flag("attention_bias", False)
    layers = [sizes.layer()] * sizes.layers
    return llama_like(
        config,
        sizes,
        layers,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
    )


def mistral(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Mistral: one sliding window on every layer, or none."""
    config.assume(sliding_window=4096)
    sizes = read_sizes(config, limit)
    layers = [sizes.layer(window=read_window(config))] * sizes.layers
    return llama_like(config, sizes, layers)


def _qwen_layers(config: ConfigReader, sizes: Sizes) -> list[LayerSpec]:
    """Return the layers: windows from ``max_window_layers`` on, or where ``layer_types`` says."""
    config.assume(sliding_window=4096)
    sliding, window = config.flag("use_sliding_window", False), read_window(config)
    first = config.count("max_window_layers", 28)
    default = [SLIDING if sliding and i >= first else FULL for i in range(sizes.layers)]
    kinds = read_layer_types(config, sizes, default)
    if SLIDING in kinds and not sliding:
        config.refuse("layer_types", kinds, "sliding layers need use_sliding_window")
    return [sizes.layer(window=window if kind == SLIDING else None) for kind in kinds]


def qwen2(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Qwen 2 and 2.5: biases on Q, K and V."""
    sizes = read_sizes(config, limit)
    return llama_like(config, sizes, _qwen_layers(config, sizes), qkv_bias=True)


def _check_qk_norm(config: ConfigReader) -> None:
    if not config.flag("use_qk_norm", True):
        config.refuse("use_qk_norm", False, "Qwen 3 normalises Q and K")


def qwen3(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Qwen 3: norms on each head of Q and K."""
    config.assume(head_dim=128)
    _check_qk_norm(config)
    sizes = read_sizes(config, limit)
    bias = config.flag("attention_bias", False)
    layers = _qwen_layers(config, sizes)
    return llama_like(config, sizes, layers, qk_norm=True, qkv_bias=bias, output_bias=bias)


def qwen3_moe(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Qwen 3 with experts instead of the MLP in some or all layers."""
    _check_qk_norm(config)
    sizes = read_sizes(config, limit)
    bias = config.flag("attention_bias", False)
    config.assume(sliding_window=4096)
    window = read_window(config) if config.flag("use_sliding_window", False) else None
    config.ignore("sliding_window", "max_window_layers")
    dense = config.integers("mlp_only_layers")
    step = config.positive("decoder_sparse_step", 1)
    moe = MoeSpec(
        num_experts=config.positive("num_experts", config.value("num_local_experts", 128)),
        top_k=config.positive("num_experts_per_tok", 8),
        intermediate_size=config.positive("moe_intermediate_size", 768),
        normalise=config.flag("norm_topk_prob", False),
    )
    layers = [
        sizes.layer(window=window, moe=i not in dense and (i + 1) % step == 0)
        for i in range(sizes.layers)
    ]
    more: dict[str, Any] = {"moe": moe, "qkv_bias": bias, "output_bias": bias}
    return llama_like(config, sizes, layers, qk_norm=True, **more)


def _text_of(read: Reader) -> Reader:
    """Return what reads the text model of a Qwen that also sees; older ones nest nothing."""

    def text(config: ConfigReader, limit: int | None) -> ModelSpec:
        if config.section("text_config") is not None:
            return read_text_part(read, config, limit)
        ignore_towers(config)
        return with_towers(read(config, limit))

    return text


def phi3(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Phi 3 and 4: fused projections on disk, partial rotation, longrope."""
    config.assume(rms_norm_eps=1e-5)
    sizes = read_sizes(config, limit)
    context = sizes.rope_context(
        original_max_position=config.positive("original_max_position_embeddings", 4096),
        aliases={"su": "longrope", "yarn": "longrope"},
        partial=True,
    )
    return ModelSpec(
        layers=(sizes.layer(window=read_window(config)),) * sizes.layers,
        ropes=(read_rope(config, context),),
        attention_scale=sizes.head_dim**-0.5,
        layout=CheckpointLayout(fused_qkv=True, fused_gate_up=True),
        **read_common(config, sizes),
    )


LLAMA_LIKE = (
    Family(
        "llama",
        "LlamaForCausalLM",
        "llama",
        llama,
        gguf=GgufForm(biases=ATTENTION_BIAS, rotated_by_pairs=True, more=mixtral_experts),
    ),
    Family("mistral", "MistralForCausalLM", "mistral", mistral),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        "qwen2",
        qwen2,
        gguf=GgufForm(aliases=("qwen2vl",), unused=VISION),
        multimodal=(
            Multimodal("Qwen2VLForConditionalGeneration", "qwen2_vl", _text_of(qwen2)),
            Multimodal("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", _text_of(qwen2)),
        ),
        unsound_kv={"fp8": _LARGE_KEYS},
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        "qwen3",
        qwen3,
        (Multimodal("Qwen3VLForConditionalGeneration", "qwen3_vl", _text_of(qwen3)),),
        GgufForm(aliases=("qwen3vl",), unused=VISION),
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        qwen3_moe,
        (Multimodal("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", _text_of(qwen3_moe)),),
        gguf=GgufForm(
            "qwen3moe",
            aliases=("qwen3vlmoe",),
            numbers=EXPERTS,
            stated={"norm_topk_prob": True},
            unused=VISION,
        ),
    ),
    Family(
        "phi3",
        "Phi3ForCausalLM",
        "phi3",
        phi3,
        gguf=GgufForm(
            partly_rotated=True,
            names=FUSED_MLP,
            numbers={"attention.sliding_window": "sliding_window"},
            stated={"sliding_window": None},
        ),
    ),
)
