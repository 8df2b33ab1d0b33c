"""``config.json`` -> ``ModelSpec``: the registry, and one short function a family. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.core.errors import UnsupportedModelError, short, suggest
from weft.core.json_files import check_depth, read_object
from weft.models.bounds import MOST_LAYER_EXPERTS
from weft.models.config_reader import SHOWN, ConfigReader
from weft.models.family_common import (
    FULL,
    SLIDING,
    Sizes,
    read_common,
    read_layer_types,
    read_sizes,
    read_window,
)
from weft.models.gemma import gemma2, gemma3, gemma3_multimodal, gemma4, gemma4_multimodal
from weft.models.gguf import GgufFile
from weft.models.hub import SUFFIX
from weft.models.quant_config import read_stored_weights
from weft.models.rope_config import read_rope
from weft.models.spec import CheckpointLayout, LayerSpec, ModelSpec, MoeSpec

Family = Callable[[ConfigReader, int | None], ModelSpec]

_LARGE_KEYS = (
    "biases make some keys so large that rounding them to 3 bits of mantissa drowns the scores "
    "(QwenLM/Qwen3 issue 840, NVIDIA/TensorRT-LLM issue 4218, ggml-org/llama.cpp issue 21385)"
)
_GLOBAL_HEADS = "its attention loses its precision (Zheng et al. 2026, rvLLM, section 8.10)"
# By family, the types of 8-bit KV, as the setting ``kv_dtype`` calls them, under which results do
# not stay what they are, and why. All others are allowed.
UNSOUND_KV: dict[str, dict[str, str]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"fp8": _LARGE_KEYS},
    "qwen3": {},
    "qwen3_moe": {},
    "phi3": {},
    "gemma2": {},
    "gemma3": {},
    "gemma4": {"fp8": _GLOBAL_HEADS},
}


def read_spec(folder: Path, max_model_len: int | None = None) -> ModelSpec:
    """Read ``config.json`` of a model folder, or a GGUF file; see ``spec_from_config``."""
    if folder.suffix == SUFFIX and folder.is_file():
        return spec_from_config(GgufFile(folder).config(), max_model_len)
    config = read_object(folder / "config.json", UnsupportedModelError)
    check_depth(config, "config.json", UnsupportedModelError)
    return spec_from_config(config, max_model_len)


def spec_from_config(config: Mapping[str, Any], max_model_len: int | None = None) -> ModelSpec:
    """Return what the model is.

    Args:
        max_model_len: the longest sequence that will be served, in tokens; fixes the factors of a
            longrope. None: what the config allows.

    Raises:
        UnsupportedModelError: the architecture, a key or a value that weft does not implement.
    """
    architectures = config.get("architectures") or []
    listed = isinstance(architectures, list) and architectures
    name = short(architectures[0] if listed else config.get("model_type", ""), SHOWN)
    family = FAMILIES.get(name) or (None if architectures else MODEL_TYPES.get(name))
    if family is None:
        known = ", ".join(FAMILIES)
        hint = suggest(name, FAMILIES)
        raise UnsupportedModelError(
            f"config.json: architecture '{name}' is not supported.{hint} Supported: {known}",
            param="architectures",
        )
    reader = ConfigReader(config)
    spec = family(reader, max_model_len)
    spec = replace(spec, stored_weights=read_stored_weights(reader))
    reader.finish()
    _check_experts(reader, spec)
    return _without_idle_windows(spec, max(spec.max_position_embeddings, max_model_len or 0))


def _check_experts(config: ConfigReader, spec: ModelSpec) -> None:
    if spec.moe is None:
        return
    layers = sum(layer.moe for layer in spec.layers)
    if layers * spec.moe.num_experts > MOST_LAYER_EXPERTS:
        total = f"{MOST_LAYER_EXPERTS} in all {layers} layers together are"
        config.refuse("num_experts", spec.moe.num_experts, total)
    if spec.moe.top_k > spec.moe.num_experts:
        config.refuse("num_experts_per_tok", spec.moe.top_k, f"only {spec.moe.num_experts} exist")


def _without_idle_windows(spec: ModelSpec, longest: int) -> ModelSpec:
    """Drop the windows that no sequence can outgrow."""
    layers = tuple(
        replace(layer, window=None) if layer.window and layer.window >= longest else layer
        for layer in spec.layers
    )
    return replace(spec, layers=layers)


def _llama_like(
    family: str,
    config: ConfigReader,
    sizes: Sizes,
    layers: Sequence[LayerSpec],
    **differences: Any,
) -> ModelSpec:
    """Return the spec of a model with one rotary embedding and Llama's order of operations."""
    rope = read_rope(config, sizes.rope_context())
    fields = read_common(config, sizes)
    if rope.kind == "yarn":  # configs often state the length without the extension
        extended = int(rope.factor * rope.original_max_position)
        fields["max_position_embeddings"] = max(sizes.max_position, extended)
    return ModelSpec(
        family=family,
        layers=tuple(layers),
        ropes=(rope,),
        attention_scale=sizes.head_dim**-0.5,
        **(fields | differences),
    )


def llama(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Llama 2, 3, 3.1 and later text models."""
    sizes = read_sizes(config, limit)
    bias = config.flag("attention_bias", False)
    layers = [sizes.layer()] * sizes.layers
    return _llama_like(
        "llama",
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
    return _llama_like("mistral", config, sizes, layers)


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
    return _llama_like("qwen2", config, sizes, _qwen_layers(config, sizes), qkv_bias=True)


def qwen3(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Qwen 3: norms on each head of Q and K."""
    config.assume(head_dim=128)
    sizes = read_sizes(config, limit)
    bias = config.flag("attention_bias", False)
    layers = _qwen_layers(config, sizes)
    return _llama_like(
        "qwen3", config, sizes, layers, qk_norm=True, qkv_bias=bias, output_bias=bias
    )


def qwen3_moe(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Qwen 3 with experts instead of the MLP in some or all layers."""
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
    more = {"moe": moe, "qkv_bias": bias, "output_bias": bias}
    return _llama_like("qwen3_moe", config, sizes, layers, qk_norm=True, **more)


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
        family="phi3",
        layers=(sizes.layer(window=read_window(config)),) * sizes.layers,
        ropes=(read_rope(config, context),),
        attention_scale=sizes.head_dim**-0.5,
        layout=CheckpointLayout(fused_projections=True),
        **read_common(config, sizes),
    )


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "Phi3ForCausalLM": phi3,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "Gemma3ForConditionalGeneration": gemma3_multimodal,
    "Gemma4ForCausalLM": gemma4,
    "Gemma4ForConditionalGeneration": gemma4_multimodal,
}

MODEL_TYPES: dict[str, Family] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "phi3": phi3,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "gemma3": gemma3_multimodal,
    "gemma4_text": gemma4,
    "gemma4": gemma4_multimodal,
}
