"""Families of mixtures of experts: ``config.json`` -> ``ModelSpec``.

What they share is a Llama with routed experts in most layers, and shared experts beside them; they
differ in how the router weighs, and in the names of their tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from weft.models.config_reader import ConfigReader
from weft.models.family import (
    FULL,
    SLIDING,
    Family,
    Sizes,
    read_kinds,
    read_layer_types,
    read_sizes,
    read_window,
)
from weft.models.gguf_moe import FORMS
from weft.models.llama_like import llama_like
from weft.models.llama_variants import exaone4_kinds, granite, hunyuan, with_no_rope
from weft.models.spec import CheckpointLayout, LayerSpec, ModelSpec, MoeSpec

DENSE, SPARSE = "dense", "sparse"
MIXTRAL_NAMES = {
    "mlp.gate": "block_sparse_moe.gate",
    "mlp.gate.e_score_correction_bias": "block_sparse_moe.e_score_correction_bias",
    "mlp.experts.*.gate_proj": "block_sparse_moe.experts.*.w1",
    "mlp.experts.*.up_proj": "block_sparse_moe.experts.*.w3",
    "mlp.experts.*.down_proj": "block_sparse_moe.experts.*.w2",
}
QWEN_NAMES = {
    f"mlp.shared_experts.{part}": f"mlp.shared_expert.{part}"
    for part in ("gate_proj", "up_proj", "down_proj")
}
_SHARED_MLP = {
    f"mlp.shared_experts.{part}": f"mlp.shared_mlp.{part}"
    for part in ("gate_proj", "up_proj", "down_proj")
}
_HUNYUAN_NAMES = _SHARED_MLP | {
    "mlp.gate": "mlp.router.gate",
    "mlp.gate.e_score_correction_bias": "mlp.expert_bias",
}
# Of towers that are not there, of options that are off, and of training.
_HUNYUAN_UNUSED = """
cla_share_factor class_num dense_list im_end_id im_newline_id im_start_id mask_init_id
moe_drop_tokens moe_random_routing_dropped_token norm_topk_prob num_media_embeds org_vocab_size
pad_id pool_type routed_scaling_factor skip_cls_token text_end_id text_start_id use_rotary_pos_emb
video_end_id video_start_id
"""
GRANITE_NAMES = {
    "mlp.gate": "block_sparse_moe.router.layer",
    "mlp.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
    "mlp.experts.down_proj": "block_sparse_moe.output_linear.weight",
    "mlp.shared_experts.gate_up_proj": "shared_mlp.input_linear",
    "mlp.shared_experts.down_proj": "shared_mlp.output_linear",
}


def expert_layers(
    sizes: Sizes,
    kinds: Sequence[str],
    shared: int,
    differences: Sequence[dict[str, Any]] | None = None,
) -> list[LayerSpec]:
    """Return the layers; those with experts have a dense MLP of the width of all shared ones."""
    found = []
    for number, kind in enumerate(kinds):
        more = differences[number] if differences is not None else {}
        sparse = {"moe": True, "intermediate_size": shared or sizes.intermediate}
        found.append(sizes.layer(**((sparse if kind == SPARSE else {}) | more)))
    return found


def dense_first(config: ConfigReader, sizes: Sizes, default: int) -> list[str]:
    """Read which layers have experts: all but the first ones, or as ``mlp_layer_types`` says."""
    dense = config.count("first_k_dense_replace", default)
    plain = [DENSE if i < dense else SPARSE for i in range(sizes.layers)]
    return read_kinds(config, "mlp_layer_types", sizes, plain, (DENSE, SPARSE))


def deepseek_moe(
    config: ConfigReader, experts: str, shared: str, *, every_layer: bool = True
) -> tuple[MoeSpec, int]:
    """Read the routing of DeepSeek-V3 and how wide its shared experts are together.

    Args:
        experts, shared: the keys of both numbers.
        every_layer: ``moe_layer_freq`` is a number, which has to be 1.
    """
    config.choice("scoring_func", "sigmoid", ("sigmoid", "noaux_tc"))
    config.choice("topk_method", "noaux_tc", ("noaux_tc",))
    if every_layer and config.positive("moe_layer_freq", 1) != 1:
        config.refuse("moe_layer_freq", config.value("moe_layer_freq"), "supported: 1")
    config.ignore("aux_loss_alpha", "seq_aux", "ep_size", "num_mtp_layers")
    size, count = config.positive("moe_intermediate_size"), config.count(shared, 0)
    moe = MoeSpec(
        num_experts=config.positive(experts),
        top_k=config.positive("num_experts_per_tok"),
        intermediate_size=size,
        normalise=config.flag("norm_topk_prob", True),
        scoring="sigmoid",
        correction_bias=True,
        n_group=config.positive("n_group", 1),
        topk_group=config.positive("topk_group", 1),
        routed_scaling_factor=config.number("routed_scaling_factor", 1.0),
        shared=count > 0,
    )
    return moe, count * size


def without_predictors(config: ConfigReader, sizes: Sizes, layout: CheckpointLayout) -> Any:
    """Leave the layers behind the last one unread, which predict further tokens (MTP)."""
    extra = config.count("num_nextn_predict_layers", 0)
    numbers = "|".join(str(sizes.layers + i) for i in range(max(extra, 1)))
    return replace(layout, ignored=(*layout.ignored, rf"model\.layers\.({numbers})\..*"))


def glm4_moe(config: ConfigReader, limit: int | None) -> ModelSpec:
    """GLM 4.5, 4.6 and 4.7: routing of DeepSeek-V3, half of each head rotates."""
    config.assume(rms_norm_eps=1e-5, n_shared_experts=1)
    sizes = read_sizes(config, limit)
    moe, shared = deepseek_moe(config, "n_routed_experts", "n_shared_experts")
    return llama_like(
        config,
        sizes,
        expert_layers(sizes, dense_first(config, sizes, 1), shared),
        sizes.rope_context(partial=True, partial_rotary_factor=0.5),
        moe=moe,
        qkv_bias=config.flag("attention_bias", False),
        qk_norm=config.flag("use_qk_norm", False),
        layout=without_predictors(config, sizes, CheckpointLayout()),
    )


def solar_open(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Solar Open: as GLM 4.5, with experts in every layer, and whole heads rotate."""
    config.assume(rms_norm_eps=1e-5, head_dim=128, n_shared_experts=1, intermediate_size=1)
    config.ignore("num_nextn_predict_layers", "use_qk_norm")
    sizes = read_sizes(config, limit)
    moe, shared = deepseek_moe(config, "n_routed_experts", "n_shared_experts")
    return llama_like(
        config,
        sizes,
        expert_layers(sizes, dense_first(config, sizes, 0), shared),
        sizes.rope_context(theta=1_000_000.0, partial=True),
        moe=moe,
        qkv_bias=config.flag("attention_bias", False),
    )


def dots1(config: ConfigReader, limit: int | None) -> ModelSpec:
    """dots.llm1: routing of DeepSeek-V3, norms on each head of Q and K, windows in some layers."""
    config.assume(norm_topk_prob=False, sliding_window=4096)
    sizes = read_sizes(config, limit)
    moe, shared = deepseek_moe(config, "n_routed_experts", "n_shared_experts")
    window, first = read_window(config), config.count("max_window_layers", 62)
    plain = [SLIDING if window is not None and i >= first else FULL for i in range(sizes.layers)]
    kinds = read_layer_types(config, sizes, plain)
    windows = [{"window": window if kind == SLIDING else None} for kind in kinds]
    bias = config.flag("attention_bias", False)
    return llama_like(
        config,
        sizes,
        expert_layers(sizes, dense_first(config, sizes, 0), shared, windows),
        moe=moe,
        qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
        layout=without_predictors(config, sizes, CheckpointLayout()),
    )


def exaone_moe(config: ConfigReader, limit: int | None) -> ModelSpec:
    """K-EXAONE: routing of DeepSeek-V3, windows; beside these, global layers are not rotated."""
    config.assume(rms_norm_eps=1e-5, sliding_window=4096, routed_scaling_factor=2.5)
    config.assume(num_shared_experts=1)
    config.ignore("num_nextn_predict_layers")
    sizes = read_sizes(config, limit)
    moe, shared = deepseek_moe(config, "num_experts", "num_shared_experts")
    window = read_window(config)
    kinds = exaone4_kinds(config, sizes, window)
    differences = [
        {"window": window} if kind == SLIDING else {"rope": 0 if window is None else 1}
        for kind in kinds
    ]
    layout = CheckpointLayout(
        renamed={"mlp.gate.e_score_correction_bias": "mlp.e_score_correction_bias"}
    )
    spec = llama_like(
        config,
        sizes,
        expert_layers(sizes, dense_first(config, sizes, 1), shared, differences),
        moe=moe,
        qk_norm=True,
        layout=replace(layout, ignored=(*layout.ignored, r"(model\.)?mtp.*")),
    )
    return spec if window is None else with_no_rope(spec)


def hy_v3(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Hunyuan 3: sigmoid with a correction bias, norms on each head of Q and K."""
    config.assume(rms_norm_eps=1e-5, head_dim=128, num_shared_experts=1)
    config.flag("enable_moe_fp32_combine", True)  # sums are rounded once, not twice
    scale = config.number("router_scaling_factor", 2.826)
    config.assume(routed_scaling_factor=scale)
    config.ignore("num_nextn_predict_layers")
    sizes = read_sizes(config, limit)
    moe, shared = deepseek_moe(config, "num_experts", "num_shared_experts")
    bias = config.flag("attention_bias", False)
    if config.flag("mlp_bias", False):
        config.refuse("mlp_bias", True, "weft reads the models without")
    return llama_like(
        config,
        sizes,
        expert_layers(sizes, dense_first(config, sizes, 1), shared),
        sizes.rope_context(theta=11_158_840.0),
        moe=moe,
        qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
        layout=without_predictors(config, sizes, CheckpointLayout(renamed=_HUNYUAN_NAMES)),
    )


def minimax_m2(config: ConfigReader, limit: int | None) -> ModelSpec:
    """MiniMax M2: sigmoid with a correction bias, norms over all of Q and all of K."""
    config.assume(head_dim=128)
    for key in ("use_qk_norm", "use_routing_bias"):
        if not config.flag(key, True):
            config.refuse(key, False, "supported: true")
    config.choice("scoring_func", "sigmoid", ("sigmoid",))
    config.choice("qk_norm_type", "per_layer", ("per_layer",))
    if config.count("shared_intermediate_size", 0):
        config.refuse("shared_intermediate_size", config.value("shared_intermediate_size"), "0 is")
    if set(config.integers("attn_type_list")) - {1}:
        config.refuse("attn_type_list", config.value("attn_type_list"), "full attention is, 1")
    config.ignore("shared_moe_mode", "mlp_intermediate_size")
    config.ignore("mtp_transformer_layers", "num_mtp_modules", "use_mtp")
    for kind in ("full_attention", "linear_attention", "mlp"):
        if config.number(f"layernorm_{kind}_beta", 1.0) != 1:
            config.refuse(f"layernorm_{kind}_beta", config.value(f"layernorm_{kind}_beta"), "1 is")
    sizes = read_sizes(config, limit)
    moe = MoeSpec(
        num_experts=config.positive("num_local_experts", 256),
        top_k=config.positive("num_experts_per_tok", 8),
        intermediate_size=sizes.intermediate,
        normalise=True,
        scoring="sigmoid",
        correction_bias=True,
    )
    part = config.positive("rotary_dim", sizes.head_dim) / sizes.head_dim
    layout = CheckpointLayout(renamed=MIXTRAL_NAMES)
    return llama_like(
        config,
        sizes,
        expert_layers(sizes, [SPARSE] * sizes.layers, 0),
        sizes.rope_context(theta=5_000_000.0, partial=True, partial_rotary_factor=part),
        moe=moe,
        qk_norm=True,
        qk_norm_whole=True,
        layout=replace(layout, ignored=(*layout.ignored, r"model\.mtp.*")),
    )


def mixtral(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Mixtral: experts in every layer, weighed by the softmax of the chosen scores."""
    config.assume(rms_norm_eps=1e-5)
    sizes = read_sizes(config, limit)
    moe = MoeSpec(
        num_experts=config.positive("num_local_experts", 8),
        top_k=config.positive("num_experts_per_tok", 2),
        intermediate_size=sizes.intermediate,
        normalise=True,
    )
    windows = [{"window": read_window(config)}] * sizes.layers
    return llama_like(
        config,
        sizes,
        expert_layers(sizes, [SPARSE] * sizes.layers, 0, windows),
        sizes.rope_context(theta=1_000_000.0),
        moe=moe,
        layout=CheckpointLayout(renamed=MIXTRAL_NAMES),
    )


def qwen2_moe(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Qwen 1.5 and 2 with experts, and a gated shared one."""
    config.assume(sliding_window=4096, norm_topk_prob=False)
    sizes = read_sizes(config, limit)
    sliding = config.flag("use_sliding_window", False)
    window = read_window(config) if sliding else None
    config.ignore("sliding_window")
    first = config.count("max_window_layers", 28)
    plain = [SLIDING if sliding and i % 2 == 0 and i < first else FULL for i in range(sizes.layers)]
    kinds = read_layer_types(config, sizes, plain)
    if SLIDING in kinds and not sliding:
        config.refuse("layer_types", kinds, "sliding layers need use_sliding_window")
    windows = [{"window": window if kind == SLIDING else None} for kind in kinds]
    dense, step = config.integers("mlp_only_layers"), config.positive("decoder_sparse_step", 1)
    sparse = [i not in dense and (i + 1) % step == 0 for i in range(sizes.layers)]
    shared = config.positive("shared_expert_intermediate_size", 5632)
    moe = MoeSpec(
        num_experts=config.positive("num_experts", 60),
        top_k=config.positive("num_experts_per_tok", 4),
        intermediate_size=config.positive("moe_intermediate_size", 1408),
        normalise=config.flag("norm_topk_prob", False),
        shared=True,
        shared_gate=True,
    )
    return llama_like(
        config,
        sizes,
        expert_layers(sizes, [SPARSE if flag else DENSE for flag in sparse], shared, windows),
        moe=moe,
        qkv_bias=config.flag("qkv_bias", True),
        layout=CheckpointLayout(renamed=QWEN_NAMES),
    )


def ernie4_5_moe(config: ConfigReader, limit: int | None) -> ModelSpec:
    """ERNIE 4.5 with experts: softmax with a correction bias, neighbouring dimensions rotate."""
    config.assume(head_dim=128, tie_word_embeddings=True, rms_norm_eps=1e-5)
    config.choice("moe_gate", "topk", ("topk",))
    if not config.flag("moe_use_aux_free", True):
        config.refuse("moe_use_aux_free", False, "weft reads the models with a correction bias")
    if config.number("moe_norm_min", 1e-12) > 1e-6:
        config.refuse("moe_norm_min", config.value("moe_norm_min"), "at most 1e-6 is")
    config.ignore("moe_capacity", "num_nextn_predict_layers", "use_rmsnorm", "ignored_index")
    sizes = read_sizes(config, limit)
    first, step = config.count("moe_layer_start_index", 1), config.positive("moe_layer_interval", 1)
    last = config.value("moe_layer_end_index", -1)
    last = sizes.layers - 1 if last == -1 else config.count("moe_layer_end_index", 0)
    kinds = [
        SPARSE if first <= i <= last and (i + 1) % step == 0 else DENSE for i in range(sizes.layers)
    ]
    size = config.positive("moe_intermediate_size", 1536)
    shared = size * config.count("moe_num_shared_experts", 2)
    moe = MoeSpec(
        num_experts=config.positive("moe_num_experts", 64),
        top_k=config.positive("moe_k", 6),
        intermediate_size=size,
        normalise=True,
        correction_bias=True,
        shared=shared > 0,
    )
    if config.flag("use_bias", False):
        config.refuse("use_bias", True, "the output head would have a bias, which weft's has not")
    name = "mlp.gate.e_score_correction_bias"
    layout = CheckpointLayout(
        rotated_by_pairs=True,
        correction_row=True,
        renamed={name: "mlp.moe_statics.e_score_correction_bias"},
    )
    return llama_like(
        config,
        sizes,
        expert_layers(sizes, kinds, shared),
        sizes.rope_context(theta=500_000.0),
        moe=moe,
        layout=replace(layout, ignored=(*layout.ignored, r"model\.mtp.*")),
    )


def olmoe(config: ConfigReader, limit: int | None) -> ModelSpec:
    """OLMoE: experts in every layer, norms over all of Q and all of K."""
    config.assume(rms_norm_eps=1e-5)
    if not config.switched_off("clip_qkv"):
        config.refuse("clip_qkv", config.value("clip_qkv"), "weft does not cut off Q, K and V")
    sizes = read_sizes(config, limit)
    moe = MoeSpec(
        num_experts=config.positive("num_experts", 64),
        top_k=config.positive("num_experts_per_tok", 8),
        intermediate_size=sizes.intermediate,
        normalise=config.flag("norm_topk_prob", False),
    )
    bias = config.flag("attention_bias", False)
    return llama_like(
        config,
        sizes,
        expert_layers(sizes, [SPARSE] * sizes.layers, 0),
        moe=moe,
        qk_norm=True,
        qk_norm_whole=True,
        qkv_bias=bias,
        output_bias=bias,
    )


def granite_moe(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Granite 3 with experts: Granite's multipliers, all experts of a layer in one tensor."""
    spec = granite(config, limit)
    size = spec.layers[0].intermediate_size
    shared = config.count("shared_intermediate_size", 0)
    moe = MoeSpec(
        num_experts=config.positive("num_local_experts", 8),
        top_k=config.positive("num_experts_per_tok", 2),
        intermediate_size=size,
        normalise=True,
        shared=shared > 0,
    )
    layers = [replace(layer, moe=True, intermediate_size=shared or size) for layer in spec.layers]
    layout = replace(spec.layout, stacked_experts=True, fused_gate_up=True, renamed=GRANITE_NAMES)
    return replace(spec, layers=tuple(layers), moe=moe, layout=layout)


def _of_each_layer(config: ConfigReader, key: str, default: int) -> int:
    """Read a number that all layers share, stated once or for each of them."""
    found = config.integers(key) or (default,)
    if len(set(found)) > 1 or found[0] < 1:
        config.refuse(key, config.value(key), "one number above zero for all layers is supported")
    return found[0]


def hunyuan_moe(config: ConfigReader, limit: int | None) -> ModelSpec:
    """Hunyuan A13B: Hunyuan's attention, experts in every layer and a shared one beside them."""
    config.assume(tie_word_embeddings=False)
    for key in ("use_cla", "use_mla", "position_embedding_xdrope", "group_limited_greedy"):
        if config.flag(key, False):
            config.refuse(key, True, "weft reads the models without")
    if config.count("moe_layer_num_skipped", 0):
        config.refuse("moe_layer_num_skipped", config.value("moe_layer_num_skipped"), "0 is")
    if not config.flag("use_mixed_mlp_moe", True):
        config.refuse("use_mixed_mlp_moe", False, "weft reads the models with a shared expert")
    config.choice("norm_type", "rms", ("rms",))
    config.ignore(*_HUNYUAN_UNUSED.split())
    spec = hunyuan(config, limit)
    size = spec.layers[0].intermediate_size
    for key, known in (("moe_intermediate_size", size), ("num_shared_expert", 1)):
        if (found := _of_each_layer(config, key, known)) != known:
            config.refuse(key, found, f"weft reads the models with {known}")
    moe = MoeSpec(
        num_experts=config.positive("num_experts", 1),
        top_k=_of_each_layer(config, "moe_topk", config.positive("num_experts_per_tok", 1)),
        intermediate_size=size,
        normalise=True,
        shared=True,
    )
    names = {**spec.layout.renamed, **_SHARED_MLP, "mlp.gate": "mlp.gate.wg"}
    layers = tuple(replace(layer, moe=True) for layer in spec.layers)
    return replace(spec, layers=layers, moe=moe, layout=replace(spec.layout, renamed=names))


MOE_FAMILIES = (
    Family("glm4_moe", "Glm4MoeForCausalLM", "glm4_moe", glm4_moe, gguf=FORMS["glm4_moe"]),
    Family(
        "minimax_m2", "MiniMaxM2ForCausalLM", "minimax_m2", minimax_m2, gguf=FORMS["minimax_m2"]
    ),
    Family("mixtral", "MixtralForCausalLM", "mixtral", mixtral),
    Family("qwen2_moe", "Qwen2MoeForCausalLM", "qwen2_moe", qwen2_moe, gguf=FORMS["qwen2_moe"]),
    Family(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        ernie4_5_moe,
        gguf=FORMS["ernie4_5_moe"],
    ),
    Family("olmoe", "OlmoeForCausalLM", "olmoe", olmoe, gguf=FORMS["olmoe"]),
    Family("dots1", "Dots1ForCausalLM", "dots1", dots1, gguf=FORMS["dots1"]),
    Family(
        "granitemoe", "GraniteMoeForCausalLM", "granitemoe", granite_moe, gguf=FORMS["granitemoe"]
    ),
    Family("granitemoeshared", "GraniteMoeSharedForCausalLM", "granitemoeshared", granite_moe),
    Family("solar_open", "SolarOpenForCausalLM", "solar_open", solar_open),
    Family(
        "exaone_moe", "ExaoneMoeForCausalLM", "exaone_moe", exaone_moe, gguf=FORMS["exaone_moe"]
    ),
    Family("hy_v3", "HYV3ForCausalLM", "hy_v3", hy_v3),
    Family(
        "hunyuan_v1_moe",
        "HunYuanMoEV1ForCausalLM",
        "hunyuan_v1_moe",
        hunyuan_moe,
        gguf=FORMS["hunyuan_v1_moe"],
    ),
)
