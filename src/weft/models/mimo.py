"""MiMo-V2-Flash: ``config.json`` -> ``ModelSpec``."""

from __future__ import annotations

from dataclasses import replace

from weft.models.config_reader import ConfigReader
from weft.models.family import (
    FULL,
    SLIDING,
    Family,
    read_common,
    read_kinds,
    read_layer_types,
    read_sizes,
    read_window,
)
from weft.models.moe_families import DENSE, SPARSE, deepseek_moe, expert_layers
from weft.models.rope_config import read_layer_ropes
from weft.models.spec import CheckpointLayout, ModelSpec


def mimo_v2_flash(config: ConfigReader, limit: int | None) -> ModelSpec:
    """MiMo-V2-Flash: values shorter than keys; sliding layers with sinks, more heads, own base."""
    config.assume(rms_norm_eps=config.number("layernorm_epsilon", 1e-5), head_dim=192)
    config.assume(sliding_window=129, attention_value_scale=0.707)
    config.ignore("attention_chunk_size", "hybrid_block_size")
    sizes, window = read_sizes(config, limit), read_window(config)
    if before := config.count("sliding_window_size", 0):  # of the tokens before a query
        window = before + 1
    default = [FULL if i == 0 or (i + 1) % 6 == 0 else SLIDING for i in range(sizes.layers)]
    kinds = read_layer_types(config, sizes, _by_bits(config, "hybrid_layer_pattern", default))
    value_dim = config.positive("v_head_dim", 128)
    more = {
        "swa_num_key_value_heads": 2 * sizes.kv_heads,
        "swa_num_attention_heads": sizes.heads,
        "swa_head_dim": sizes.head_dim,
        "swa_v_head_dim": value_dim,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
    }
    for key, known in more.items():
        if config.value(key, known) != known:
            config.refuse(key, config.value(key), f"weft reads the models with {known}")
    differences = [
        {"window": window, "sinks": True, "num_kv_heads": 2 * sizes.kv_heads, "rope": 1}
        if kind == SLIDING
        else {}
        for kind in kinds
    ]
    plain = [DENSE if i == 0 else SPARSE for i in range(sizes.layers)]
    plain = _by_bits(config, "moe_layer_freq", plain, (DENSE, SPARSE))
    sparse = read_kinds(config, "mlp_layer_types", sizes, plain, (DENSE, SPARSE))
    config.ignore("moe_layer_freq")
    moe, shared = deepseek_moe(config, "n_routed_experts", "n_shared_experts", every_layer=False)
    part = config.number("partial_rotary_factor", 0.334)
    contexts = {
        FULL: sizes.rope_context(theta=5_000_000.0, partial=True, partial_rotary_factor=part),
        SLIDING: sizes.rope_context(
            theta=config.number("swa_rope_theta", 10_000.0),
            partial=True,
            partial_rotary_factor=part,
        ),
    }
    ropes = read_layer_ropes(config, contexts)
    layout = CheckpointLayout(renamed={"self_attn.sinks": "self_attn.attention_sink_bias"})
    return ModelSpec(
        layers=tuple(expert_layers(sizes, sparse, shared, differences)),
        ropes=(ropes[FULL], ropes[SLIDING]),
        attention_scale=sizes.head_dim**-0.5,
        moe=moe,
        qkv_bias=config.flag("attention_bias", False),
        value_dim=value_dim,
        value_scale=config.optional_number("attention_value_scale") or 1.0,
        layout=replace(layout, ignored=(*layout.ignored, r"model\.mtp\..*")),
        **read_common(config, sizes),
    )


def _by_bits(
    config: ConfigReader, key: str, default: list[str], kinds: tuple[str, str] = (FULL, SLIDING)
) -> list[str]:
    """Read kinds of layers that a list of 0 and 1 tells apart, if there is one."""
    found = config.value(key, None)
    if found is None:
        return default
    if not isinstance(found, list) or any(bit not in (0, 1) for bit in found):
        config.refuse(key, found, "a list of 0 and 1 is needed")
    return [kinds[bit] for bit in found]


MIMO = (Family("mimo_v2_flash", "MiMoV2FlashForCausalLM", "mimo_v2_flash", mimo_v2_flash),)
