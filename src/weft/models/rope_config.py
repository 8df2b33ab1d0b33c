"""Reads rotary embedding parameters, in the old and the new form of ``config.json``. Torch-free.

Old: ``rope_theta`` beside ``rope_scaling``. New: ``rope_parameters`` with both, maybe nested by
layer type.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from weft.models.config_reader import ConfigReader
from weft.models.spec import RopeSpec

ROPE_TYPES = ("default", "linear", "llama3", "longrope", "proportional", "yarn")


@dataclass(frozen=True)
class RopeContext:
    """Facts of the model that a rope depends on."""

    head_dim: int
    theta: float  # where the config names none
    max_position: int  # as trained, after extension
    max_model_len: int  # the longest sequence that will be served
    original_max_position: int | None = None  # stated outside the rope parameters, as Phi-3 does
    partial_rotary_factor: float = 1.0
    partial: bool = False  # the family can rotate a part of each head
    aliases: Mapping[str, str] | None = None  # other names of the kinds in this family
    scales_queries: bool = False  # the family's yarn can scale queries by position


def read_rope(config: ConfigReader, context: RopeContext) -> RopeSpec:
    """Read the one rotary embedding of a model."""
    context = replace(
        context,
        theta=config.number("rope_theta", context.theta),
        partial_rotary_factor=config.number("partial_rotary_factor", context.partial_rotary_factor),
    )
    scaling = config.section("rope_scaling")
    parameters = config.section("rope_parameters")
    return _rope(scaling or parameters or ConfigReader({}), context)


def read_layer_ropes(
    config: ConfigReader, contexts: Mapping[str, RopeContext]
) -> dict[str, RopeSpec]:
    """Read one rotary embedding for each layer type that ``contexts`` names.

    In the old form ``rope_theta`` and ``rope_scaling`` are those of full attention, and
    ``rope_local_base_freq`` is the base of sliding attention.
    """
    nested = config.section("rope_parameters")
    scaling = config.section("rope_scaling")
    old_bases = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}
    ropes = {}
    for kind, context in contexts.items():
        parameters = nested.section(kind) if nested else None
        if kind == "full_attention" and scaling is not None:
            parameters = scaling
        base = config.number(old_bases[kind], context.theta)
        ropes[kind] = _rope(parameters or ConfigReader({}), replace(context, theta=base))
    if nested:
        nested.finish()
    return ropes


def _rope(config: ConfigReader, context: RopeContext) -> RopeSpec:
    found = str(config.value("rope_type", config.value("type", "default")))
    kind = (context.aliases or {}).get(found, found)
    if kind not in _READERS:
        config.refuse("rope_type", found, f"supported: {', '.join(ROPE_TYPES)}")
    theta = config.number("rope_theta", context.theta)
    part = config.number("partial_rotary_factor", context.partial_rotary_factor)
    if part != 1 and kind != "proportional" and not context.partial:
        config.refuse("partial_rotary_factor", part, "this family rotates whole heads")
    plain = RopeSpec("default", theta, int(context.head_dim * part))
    rope = _READERS[kind](config, plain, context)
    if rope.rotary_dim < 2 or rope.rotary_dim % 2:
        config.refuse("partial_rotary_factor", part, "an even number of dimensions must rotate")
    config.finish()
    return rope


def _default(config: ConfigReader, plain: RopeSpec, _: RopeContext) -> RopeSpec:
    config.ignore("original_max_position_embeddings")  # saved with some plain ropes, not used
    # M-RoPE rotates parts of a head by three positions, which are one and the same in text.
    config.ignore("mrope_section", "mrope_interleaved")
    return plain


def _linear(config: ConfigReader, plain: RopeSpec, _: RopeContext) -> RopeSpec:
    return replace(plain, kind="linear", factor=config.number("factor"))


def _original(config: ConfigReader, context: RopeContext) -> int:
    stated = config.positive("original_max_position_embeddings", context.max_position)
    return context.original_max_position or stated


def _llama3(config: ConfigReader, plain: RopeSpec, context: RopeContext) -> RopeSpec:
    return replace(
        plain,
        kind="llama3",
        factor=config.number("factor"),
        low_freq_factor=config.number("low_freq_factor"),
        high_freq_factor=config.number("high_freq_factor"),
        original_max_position=_original(config, context),
    )


def _query_scales(config: ConfigReader, context: RopeContext, step: int) -> tuple[float, ...]:
    """Read what multiplies the queries of each ``step`` positions, as in Llama 4."""
    if not context.scales_queries:
        return ()
    config.ignore("max_position_embeddings")
    beta = config.optional_number("llama_4_scaling_beta") or 0.0
    longest = max(context.max_position, context.max_model_len)
    steps = math.ceil(longest / step) if beta else 0
    return tuple(1.0 + beta * math.log1p(number) for number in range(steps))


def _yarn(config: ConfigReader, plain: RopeSpec, context: RopeContext) -> RopeSpec:
    factor = config.number("factor")
    scales = [config.optional_number(key) for key in ("mscale", "mscale_all_dim")]

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    top, bottom = scales
    original = _original(config, context)
    queries = _query_scales(config, context, original)
    attention = magnitude(top) / magnitude(bottom) if top and bottom else magnitude(1.0)
    return replace(
        plain,
        kind="yarn",
        factor=factor,
        attention_factor=config.number("attention_factor", attention),
        original_max_position=original,
        query_scales=queries if len(queries) > 1 else (),
        query_step=original,
        beta_fast=config.number("beta_fast", 32.0),
        beta_slow=config.number("beta_slow", 1.0),
        truncate=config.flag("truncate", True),
    )


def _longrope(config: ConfigReader, plain: RopeSpec, context: RopeContext) -> RopeSpec:
    """Fix the short or the long factors by the longest sequence served (Ding et al. 2024)."""
    original = _original(config, context)
    factor = config.number("factor", context.max_position / original)
    attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    short, long = config.numbers("short_factor"), config.numbers("long_factor")
    for key, factors in (("short_factor", short), ("long_factor", long)):
        if len(factors) != plain.rotary_dim // 2:
            config.refuse(key, len(factors), f"{plain.rotary_dim // 2} factors are needed")
    return replace(
        plain,
        kind="longrope",
        attention_factor=config.number("attention_factor", attention),
        dim_factors=long if context.max_model_len > original else short,
    )


def _ntk_alpha(config: ConfigReader, plain: RopeSpec, context: RopeContext) -> RopeSpec:
    """Hunyuan's: the base is stretched once and for all, whatever the length of a sequence."""
    config.ignore("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    size = context.head_dim
    return replace(plain, theta=plain.theta * config.number("alpha") ** (size / (size - 2)))


def _proportional(config: ConfigReader, plain: RopeSpec, context: RopeContext) -> RopeSpec:
    part = config.number("partial_rotary_factor", context.partial_rotary_factor)
    return replace(
        plain,
        kind="proportional",
        rotary_dim=context.head_dim,
        rotated_angles=int(part * context.head_dim // 2),
        factor=config.number("factor", 1.0),
    )


_READERS = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "mrope": _default,
    "ntk_alpha": _ntk_alpha,
    "proportional": _proportional,
    "yarn": _yarn,
}
