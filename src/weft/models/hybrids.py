"""Families with recurrent layers beside those of attention: ``config.json`` -> ``ModelSpec``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weft.kernels.delta import DeltaShape
from weft.models.config_reader import ConfigReader
from weft.models.family import (
    FULL,
    Family,
    Multimodal,
    Reader,
    Sizes,
    read_kinds,
    read_sizes,
    read_text_part,
)
from weft.models.gguf_form import EXPERTS, SHARED_EXPERT, VISION, GgufForm
from weft.models.gguf_mixers import delta_layers
from weft.models.gguf_names import DELTA_NAMES
from weft.models.llama_like import llama_like
from weft.models.moe_families import QWEN_NAMES
from weft.models.spec import CheckpointLayout, GateSpec, LayerSpec, ModelSpec, MoeSpec, StateSpec

LINEAR = "linear_attention"
_UNUSED = (  # of layers that guess further tokens; and of other engines
    *("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "unsloth_fixed_mtp"),
    "mamba_ssm_dtype",
)
PREDICTORS = r"mtp\..*"  # layers that guess further tokens, which are not used


def _delta(config: ConfigReader) -> StateSpec:
    """Read the sizes of layers by the gated delta rule."""
    config.choice("output_gate_type", "swish", ("swish", "silu"))
    shape = DeltaShape(
        key_heads=config.positive("linear_num_key_heads", 16),
        value_heads=config.positive("linear_num_value_heads", 32),
        key_dim=config.positive("linear_key_head_dim", 128),
        value_dim=config.positive("linear_value_head_dim", 128),
        taps=config.positive("linear_conv_kernel_dim", 4),
    )
    if shape.value_heads % shape.key_heads:
        why = f"the {shape.key_heads} key heads must divide it"
        config.refuse("linear_num_value_heads", shape.value_heads, why)
    if shape.taps < 2:
        config.refuse("linear_conv_kernel_dim", shape.taps, "a convolution reads 2 inputs or more")
    return StateSpec("delta", shape)


def every_nth(sizes: Sizes, interval: int) -> list[str]:
    """Return the kinds of layers of which the last of each group of so many attends."""
    return [LINEAR if (i + 1) % interval else FULL for i in range(sizes.layers)]


def read_mixers(config: ConfigReader, sizes: Sizes, default: Sequence[str]) -> list[str]:
    """Read which layers attend, ``FULL``, and which are recurrent, ``LINEAR``."""
    found = read_kinds(config, "layer_types", sizes, default, (FULL, LINEAR))
    if FULL not in found:
        config.refuse("layer_types", found, "at least one layer must attend")
    return found


def _kinds(config: ConfigReader, sizes: Sizes) -> list[str]:
    """Read the kinds of layers; every fourth attends if nothing is said."""
    interval = config.positive("full_attention_interval", 4)
    return read_mixers(config, sizes, every_nth(sizes, interval))


def _hybrid(
    config: ConfigReader, sizes: Sizes, layers: list[LayerSpec], layout: CheckpointLayout
) -> ModelSpec:
    """Return the spec of a model of Qwen3-Next's kind: gates in Q, a quarter of heads rotates."""
    bias = config.flag("attention_bias", False)
    if bias:
        config.refuse("attention_bias", bias, "models of this kind have none")
    if not config.flag("attn_output_gate", True):
        config.refuse("attn_output_gate", False, "attention of this kind has a gate")
    return llama_like(
        config,
        sizes,
        layers,
        sizes.rope_context(partial=True, partial_rotary_factor=0.25),
        qk_norm=True,
        norm_plus_one=True,
        output_gate=GateSpec(),
        layout=replace(layout, gate_in_q=True, ignored=(*layout.ignored, PREDICTORS)),
    )


def qwen3_5(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Qwen 3.5 and 3.6, dense: three of four layers by the gated delta rule."""
    config.assume(head_dim=256)
    config.ignore(*_UNUSED)
    sizes = read_sizes(config, limit)
    state = _delta(config)
    layers = [sizes.layer(state=state if k == LINEAR else None) for k in _kinds(config, sizes)]
    return _hybrid(config, sizes, layers, CheckpointLayout())


def qwen3_5_text_part(config: ConfigReader, limit: int | None) -> ModelSpec:
    """The text model of a Qwen 3.5, which also reads images."""
    return _text_part(qwen3_5, config, limit)


def _text_part(read: Reader, config: ConfigReader, limit: int | None) -> ModelSpec:
    config.ignore("language_model_only")
    return read_text_part(read, config, limit)


def _experts(config: ConfigReader) -> tuple[MoeSpec, int]:
    """Read experts beside a gated shared one, and the width of that."""
    moe = MoeSpec(
        num_experts=config.positive("num_experts"),
        top_k=config.positive("num_experts_per_tok"),
        intermediate_size=config.positive("moe_intermediate_size", 512),
        normalise=config.flag("norm_topk_prob", True),
        shared=True,
        shared_gate=True,
    )
    return moe, config.positive("shared_expert_intermediate_size", 512)


def _sparse_layers(
    config: ConfigReader, sizes: Sizes, shared: int, dense: Sequence[int] = (), step: int = 1
) -> list[LayerSpec]:
    """Return the layers, with experts but for those that are ``dense`` or between steps."""
    state, found = _delta(config), []
    for number, kind in enumerate(_kinds(config, sizes)):
        sparse = number not in dense and (number + 1) % step == 0
        width = shared if sparse else sizes.intermediate
        recurrent = state if kind == LINEAR else None
        found.append(sizes.layer(state=recurrent, moe=sparse, intermediate_size=width))
    return found


def qwen3_next(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Qwen3-Next: three of four layers by the gated delta rule, experts beside a shared one."""
    config.assume(head_dim=256)
    sizes = read_sizes(config, limit)
    moe, shared = _experts(config)
    dense = config.integers("mlp_only_layers")
    step = config.positive("decoder_sparse_step", 1)
    layers = _sparse_layers(config, sizes, shared, dense, step)
    layout = CheckpointLayout(fused_state=True, fused_state_gates=True, renamed=QWEN_NAMES)
    return replace(_hybrid(config, sizes, layers, layout), moe=moe)


def qwen3_5_moe(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Qwen 3.5 and 3.6 with experts beside a gated shared one, in all layers."""
    config.assume(head_dim=256, intermediate_size=1)
    config.ignore(*_UNUSED)
    sizes = read_sizes(config, limit)
    moe, shared = _experts(config)
    layout = CheckpointLayout(renamed=QWEN_NAMES)
    layers = _sparse_layers(config, sizes, shared)
    return replace(_hybrid(config, sizes, layers, layout), moe=moe)


def qwen3_5_moe_text_part(config: ConfigReader, limit: int | None) -> ModelSpec:
    """The text model of a Qwen 3.5 with experts, which also reads images."""
    return _text_part(qwen3_5_moe, config, limit)


_DELTA = GgufForm(
    norms_plus_one=True,
    partly_rotated=True,
    names=DELTA_NAMES,
    unused=VISION,
    more=delta_layers,
)
HYBRIDS = (
    Family(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        "qwen3_next",
        qwen3_next,
        gguf=replace(
            _DELTA,
            name="qwen3next",
            numbers={**EXPERTS, **SHARED_EXPERT},
            layout={"fused_state": False},
        ),
    ),
    Family(
        "qwen3_5_moe",
        "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe_text",
        qwen3_5_moe,
        (Multimodal("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", qwen3_5_moe_text_part),),
        replace(_DELTA, name="qwen35moe", tiled_heads=True, numbers={**EXPERTS, **SHARED_EXPERT}),
    ),
    Family(
        "qwen3_5",
        "Qwen3_5ForCausalLM",
        "qwen3_5_text",
        qwen3_5,
        (Multimodal("Qwen3_5ForConditionalGeneration", "qwen3_5", qwen3_5_text_part),),
        replace(_DELTA, name="qwen35", tiled_heads=True),
    ),
)
