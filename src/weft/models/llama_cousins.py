"""Gemma 1, Arcee, CWM, Helium, HyperCLOVA X and Mellum: ``config.json`` -> ``ModelSpec``."""

from __future__ import annotations

from dataclasses import replace

from weft.models.config_reader import ConfigReader
from weft.models.family import (
    FULL,
    SLIDING,
    Family,
    read_common,
    read_kinds,
    read_sizes,
    read_window,
    read_windows,
)
from weft.models.gguf_form import ATTENTION_BIAS, GgufForm
from weft.models.llama_like import llama, llama_like
from weft.models.llama_variants import granite
from weft.models.moe_families import DENSE, SPARSE, expert_layers
from weft.models.rope_config import read_layer_ropes, read_rope
from weft.models.spec import CheckpointLayout, ModelSpec, MoeSpec

_CWM_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def gemma(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Gemma 1: GELU, norms with 1 + weight, scaled embeddings."""
    config.assume(head_dim=256, tie_word_embeddings=True)
    # Checkpoints of the first days name another GELU, which they were not trained with.
    config.ignore("hidden_act")
    config.assume(hidden_activation="gelu_pytorch_tanh")
    sizes = read_sizes(config, limit)
    bias = config.flag("attention_bias", False)
    return ModelSpec(
        layers=(sizes.layer(),) * sizes.layers,
        ropes=(read_rope(config, sizes.rope_context()),),
        attention_scale=sizes.head_dim**-0.5,
        norm_plus_one=True,
        qkv_bias=bias,
        output_bias=bias,
        embedding_scale=sizes.hidden**0.5,
        **read_common(config, sizes, activation="hidden_activation"),
    )


def arcee(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Arcee: a Llama whose MLPs square what is above 0, without a gate."""
    config.assume(rms_norm_eps=1e-5)
    sizes = read_sizes(config, limit)
    bias = config.flag("attention_bias", False)
    rope = read_rope(config, sizes.rope_context())
    fields = read_common(config, sizes, known={"relu2": "relu2"})
    if rope.kind == "yarn":
        extended = int(rope.factor * rope.original_max_position)
        fields["max_position_embeddings"] = max(sizes.max_position, extended)
    return ModelSpec(
        layers=(sizes.layer(),) * sizes.layers,
        ropes=(rope,),
        attention_scale=sizes.head_dim**-0.5,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
        **fields,
    )


def cwm(config: ConfigReader, limit: int | None) -> ModelSpec:
    """CWM: a Llama with a window in three of four layers."""
    config.assume(rms_norm_eps=1e-5, head_dim=128, sliding_window=8192, rope_parameters=_CWM_ROPE)
    sizes, window = read_sizes(config, limit), read_window(config)
    default = [SLIDING if i % 4 else FULL for i in range(sizes.layers)]
    windows = read_windows(config, sizes, default, window)
    return llama_like(config, sizes, [sizes.layer(window=one) for one in windows])


def helium(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Helium: a Llama of whose heads neighbouring dimensions rotate."""
    config.assume(rms_norm_eps=1e-8, head_dim=128)
    spec = llama(config, limit)
    layout = replace(spec.layout, rotated_by_pairs=True)
    return replace(spec, output_bias=False, layout=layout)


def hyperclovax(config: ConfigReader, limit: int | None) -> ModelSpec:
    """HyperCLOVA X: Granite's multipliers, and norms behind attention and MLP."""
    sizes = read_sizes(config, limit)
    config.assume(attention_multiplier=sizes.head_dim**-0.5)
    spec = granite(config, limit)
    after = config.flag("use_post_norm", True)
    names = {
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_attention_layernorm": "post_norm1",
        "post_feedforward_layernorm": "post_norm2",
    }
    layout = replace(spec.layout, renamed=names if after else {})
    return replace(spec, logit_scale=1.0 / spec.logit_scale, post_norms=after, layout=layout)


def mellum(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Mellum 2: Qwen 3's experts, windows, and a rotation of each kind of layer."""
    config.assume(head_dim=128, sliding_window=1024)
    config.ignore("mtp_layer_types", "mtp_mlp_layer_types", "num_nextn_predict_layers")
    config.ignore("num_mtp_layers")
    sizes, window = read_sizes(config, limit), read_window(config)
    windows = read_windows(config, sizes, [FULL] * sizes.layers, window)
    kinds = read_kinds(config, "mlp_layer_types", sizes, [SPARSE] * sizes.layers, (DENSE, SPARSE))
    moe = MoeSpec(
        num_experts=config.positive("num_experts", config.value("num_local_experts", 64)),
        top_k=config.positive("num_experts_per_tok", 8),
        intermediate_size=config.positive("moe_intermediate_size", 896),
        normalise=config.flag("norm_topk_prob", True),
    )
    differences = [{"window": one, "rope": int(one is not None)} for one in windows]
    bases = {FULL: 500_000.0, SLIDING: 10_000.0}
    contexts = {kind: sizes.rope_context(theta=base) for kind, base in bases.items()}
    ropes = read_layer_ropes(config, contexts)
    bias, layout = config.flag("attention_bias", False), CheckpointLayout()
    return ModelSpec(
        layers=tuple(expert_layers(sizes, kinds, 0, differences)),
        ropes=(ropes[FULL], ropes[SLIDING]),
        attention_scale=sizes.head_dim**-0.5,
        moe=moe,
        qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
        layout=replace(layout, ignored=(*layout.ignored, r"mtp\..*")),
        **read_common(config, sizes),
    )


COUSINS = (
    Family("gemma", "GemmaForCausalLM", "gemma", gemma, gguf=GgufForm(norms_plus_one=True)),
    Family(
        "arcee",
        "ArceeForCausalLM",
        "arcee",
        arcee,
        gguf=GgufForm(biases=ATTENTION_BIAS, rotated_by_pairs=True),
    ),
    Family("cwm", "CwmForCausalLM", "cwm", cwm),
    Family("helium", "HeliumForCausalLM", "helium", helium),
    Family("hyperclovax", "HyperCLOVAXForCausalLM", "hyperclovax", hyperclovax),
    Family("mellum", "MellumForCausalLM", "mellum", mellum),
)
