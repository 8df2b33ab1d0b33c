"""Mixers of GGUF files other than plain attention, described as ``config.json`` describes them.

Which layer is of which kind, the tensors tell: the metadata do not always. Torch-free.
"""

from __future__ import annotations

import math
from typing import Any

from weft.models.family import FULL, SLIDING
from weft.models.gguf_form import DEEPSEEK_EXPERTS, LOCAL_EXPERTS, PLAIN_SHARES, GgufFacts

_LINEAR, _CONV = "linear_attention", "conv"
_SOFTMAX, _SIGMOID = 1, 2  # ``expert_gating_func``
_UNROTATED = 1e29  # a divisor of a frequency that is to be 0


def delta_layers(facts: GgufFacts) -> dict[str, Any]:
    """Layers by the gated delta rule, of Qwen3-Next and 3.5."""
    found = facts.found
    found.ignore("full_attention_interval", "attention.recurrent_layers")
    heads, size = _heads_of_state(facts)
    return {
        "layer_types": facts.kinds("ssm_conv1d.weight", _LINEAR, FULL),
        "linear_num_key_heads": found.positive("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": found.positive("ssm.state_size"),
        "linear_value_head_dim": size,
        "linear_conv_kernel_dim": found.positive("ssm.conv_kernel"),
    }


def _heads_of_state(facts: GgufFacts) -> tuple[int, int]:
    """The number of heads of a recurrent layer, and the numbers of one."""
    found = facts.found
    heads, inner = found.positive("ssm.time_step_rank"), found.positive("ssm.inner_size")
    if inner % heads:
        found.refuse("ssm.inner_size", inner, f"whole heads are supported, of which it has {heads}")
    return heads, inner // heads


def short_convolutions(facts: GgufFacts) -> dict[str, Any]:
    """Gated short convolutions, of LFM2."""
    return {
        "layer_types": facts.kinds("shortconv.conv.weight", _CONV, FULL),
        "conv_L_cache": facts.found.positive("shortconv.l_cache"),
    }


def granite_mamba(facts: GgufFacts) -> dict[str, Any]:
    """Layers by Mamba-2 and shared experts, of Granite 4."""
    found = facts.found
    heads, size = _heads_of_state(facts)
    hidden = found.positive("embedding_length")
    if heads * size % hidden:
        found.refuse("ssm.inner_size", heads * size, f"a multiple of {hidden} is")
    rotated = found.flag("rope.scaling.finetuned", False)
    width = found.positive(
        "expert_shared_feed_forward_length", found.value("feed_forward_length", 0)
    )
    return {
        "layer_types": facts.kinds("ssm_conv1d.weight", _LINEAR, FULL),
        "mamba_n_heads": heads,
        "mamba_d_head": size,
        "mamba_expand": heads * size // hidden,
        "mamba_n_groups": found.positive("ssm.group_count"),
        "mamba_d_state": found.positive("ssm.state_size"),
        "mamba_d_conv": found.positive("ssm.conv_kernel"),
        "mamba_conv_bias": facts.has("ssm_conv1d.bias"),
        "position_embedding_type": "rope" if rotated else "nope",
        "shared_intermediate_size": width,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        **facts.numbers(LOCAL_EXPERTS),
    }


def granite_attention(facts: GgufFacts) -> dict[str, Any]:
    """A Granite 4 without layers by Mamba-2, which the metadata describe all the same."""
    found = facts.found
    state = ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank")
    found.ignore(*(f"ssm.{key}" for key in state))
    if found.count("expert_count", 0):
        return {}
    found.ignore("expert_used_count")
    width = found.count("expert_shared_feed_forward_length", 0)
    if not width:
        return {}
    found.ignore("feed_forward_length")
    return {"intermediate_size": width}


def one_op_layers(facts: GgufFacts) -> dict[str, Any]:
    """Layers of one op each, of Nemotron-H."""
    found = facts.found
    kinds = {
        "ssm_conv1d.weight": _LINEAR,
        "attn_q.weight": FULL,
        "ffn_up.weight": "mlp",
        "ffn_up_exps.weight": "moe",
    }
    layers = [
        next((kind for part, kind in kinds.items() if facts.has(part, number)), "nothing")
        for number in range(facts.layers)
    ]
    heads, size = _heads_of_state(facts)
    widths = (facts.tensors.get(f"blk.{number}.ffn_up.weight") for number in range(facts.layers))
    found.ignore("feed_forward_length")  # of experts, or of MLPs
    return {
        "layers_block_type": layers,
        "intermediate_size": next((up.shape[1] for up in widths if up is not None), 1),
        "layer_norm_epsilon": found.number("attention.layer_norm_rms_epsilon"),
        "mamba_num_heads": heads,
        "mamba_head_dim": size,
        "n_groups": found.positive("ssm.group_count"),
        "ssm_state_size": found.positive("ssm.state_size"),
        "conv_kernel": found.positive("ssm.conv_kernel"),
        "use_conv_bias": facts.has("ssm_conv1d.bias"),
    }


def olmo3_windows(facts: GgufFacts) -> dict[str, Any]:
    """Windows in most layers, if an OLMo has any: OLMo 3's, where these have a rotation."""
    found = facts.found
    pattern = found.value("attention.sliding_window_pattern", None)
    if not found.count("attention.sliding_window", 0):
        return {}
    config: dict[str, Any] = {
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": found.positive("attention.sliding_window"),
        "rope_local_base_freq": found.number(
            "rope.freq_base_swa", found.number("rope.freq_base", 10_000.0)
        ),
    }
    if pattern is not None:
        config["layer_types"] = facts.windows()
    return config


def scaled_queries(facts: GgufFacts) -> dict[str, Any]:
    """Queries that are scaled by position, of Ministral 3; Mistral Small 3 has none."""
    found = facts.found
    beta = found.optional_number("attention.temperature_scale")
    magnitude = found.optional_number("rope.scaling.yarn_log_multiplier")
    if beta is None:
        return {"architectures": ["MistralForCausalLM"], "sliding_window": None}
    scales = {"mscale": magnitude, "mscale_all_dim": magnitude} if magnitude else {}
    return {"scaling": {"llama_4_scaling_beta": beta, **scales}}


def kda_layers(facts: GgufFacts) -> dict[str, Any]:
    """Layers with a decay for each channel beside latent attention, of Kimi-Linear."""
    found = facts.found
    numbers = facts.numbers(DEEPSEEK_EXPERTS)
    decays = (facts.tensors.get(f"blk.{number}.ssm_a") for number in range(facts.layers))
    heads = next((math.prod(one.shape) for one in decays if one is not None), 1)
    numbers["num_local_experts"] = numbers.pop("n_routed_experts", 0)
    return {
        "layer_types": facts.kinds("ssm_a", _LINEAR, FULL),
        "linear_num_heads": heads,
        "linear_head_dim": found.positive("kda.head_dim"),
        "linear_conv_kernel_dim": found.positive("ssm.conv_kernel"),
        "mlp_layer_types": facts.kinds("ffn_gate_inp.weight", "sparse", "dense"),
        **_latent_sizes(facts),
        **numbers,
    }


def latent_attention(facts: GgufFacts) -> dict[str, Any]:
    """Latent attention, and the experts beside it: DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash."""
    found, config = facts.found, _latent_sizes(facts)
    multiplier = found.optional_number("rope.scaling.yarn_log_multiplier")
    if multiplier is not None:  # a tenth of DeepSeek's scale
        magnitude = float(f"{multiplier * 10:.6g}")
        config["scaling"] = {"mscale": magnitude, "mscale_all_dim": magnitude}
    return config | _latent_experts(facts)


def _latent_sizes(facts: GgufFacts) -> dict[str, Any]:
    """The sizes of latent attention.

    Files of before 2025-04 have those of a head where later ones have those of a cached row.
    """
    found = facts.found
    new = "attention.key_length_mla" in found
    end = "_mla" if new else ""
    rotated = found.positive("rope.dimension_count")
    size = found.positive(f"attention.key_length{end}")
    if size <= rotated:
        found.refuse(f"attention.key_length{end}", size, f"more than the {rotated} that rotate is")
    ranked = found.count("attention.q_lora_rank", 0)
    found.ignore("attention.head_count_kv", "attention.key_length", "attention.value_length")
    return {
        "num_key_value_heads": found.positive("attention.head_count"),
        "head_dim": size,
        "q_lora_rank": ranked or None,
        "kv_lora_rank": found.positive("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": size - rotated,
        "v_head_dim": found.positive(f"attention.value_length{end}"),
    }


def _latent_experts(facts: GgufFacts) -> dict[str, Any]:
    found = facts.found
    numbers = facts.numbers(DEEPSEEK_EXPERTS)
    scoring = found.count("expert_gating_func", 0)
    if not numbers.get("n_routed_experts"):
        return {"architectures": ["YoutuForCausalLM"]}
    if scoring not in (0, _SOFTMAX, _SIGMOID):
        found.refuse("expert_gating_func", scoring, "softmax (1) and sigmoid (2) are supported")
    shares = {**PLAIN_SHARES, **numbers}
    shares["mlp_layer_types"] = facts.kinds("ffn_gate_inp.weight", "sparse", "dense")
    shares |= {key: 1 for key in ("n_group", "topk_group") if not shares[key]}
    sigmoid = scoring == _SIGMOID or (not scoring and facts.has("exp_probs_b.bias"))
    if sigmoid:
        return {"architectures": ["DeepseekV3ForCausalLM"], **shares}
    method = "group_limited_greedy" if shares["n_group"] > 1 else "greedy"
    return {"architectures": ["DeepseekV2ForCausalLM"], "topk_method": method, **shares}


def gemma4(facts: GgufFacts) -> dict[str, Any]:
    """Layers of two shapes, KV that the last ones share, and embeddings of each layer."""
    found, layers = facts.found, facts.layers
    found.ignore("attention.value_length", "attention.value_length_swa")
    heads, widths = facts.each("attention.head_count_kv"), facts.each("feed_forward_length")
    whole = found.positive("attention.key_length")
    local = found.positive("attention.key_length_swa", whole)
    for key, size in (("rope.dimension_count", whole), ("rope.dimension_count_swa", local)):
        if found.positive(key, size) != size:
            found.refuse(key, found.value(key), f"whole heads of {size} are supported")
    shared = found.count("attention.shared_kv_layers", 0)
    own = range(layers - shared)
    wide = shared > 0 and widths[-1] == 2 * widths[0]
    for number, width in enumerate(widths):
        if width != widths[0] * (2 if wide and number not in own else 1):
            found.refuse("feed_forward_length", widths, "one width, or twice it with shared KV, is")
    kinds = facts.windows()
    without = [kinds[i] == FULL and not facts.has("attn_v.weight", i) for i in own]
    table = facts.tensors.get("per_layer_token_embd.weight")
    experts = found.count("expert_count", 0)
    return {
        "layer_types": kinds,
        "head_dim": local,
        "num_key_value_heads": next((heads[i] for i in own if kinds[i] == SLIDING), heads[0]),
        "intermediate_size": widths[0],
        "per_layer_config": {
            str(i): {"head_dim": whole if kinds[i] == FULL else local, "num_key_value_heads": n}
            for i, n in enumerate(heads)
        },
        "attention_k_eq_v": any(without),
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": wide,
        "hidden_size_per_layer_input": found.count("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": table.shape[1] if table is not None else 1,
        "sliding_window": found.positive("attention.sliding_window"),
        "final_logit_softcapping": found.optional_number("final_logit_softcapping"),
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": _gemma4_ropes(facts),
        "enable_moe_block": experts > 0,
        "num_experts": experts,
        "top_k_experts": found.count("expert_used_count", 0),
        "moe_intermediate_size": found.count("expert_feed_forward_length", 0),
    }


def _gemma4_ropes(facts: GgufFacts) -> dict[str, Any]:
    """Both rotations; of global layers, frequencies that are divided by 1e30 do not rotate."""
    found, factors = facts.found, facts.tensors.get("rope_freqs.weight")
    divisors = factors.data.ravel().tolist() if factors is not None else [1.0]
    rotated = sum(divisor < _UNROTATED for divisor in divisors)
    if any(divisor != 1.0 for divisor in divisors[:rotated]):
        found.refuse("rope_freqs.weight", divisors, "divisors of 1 and 1e30 are supported")
    return {
        FULL: {
            "rope_type": "proportional",
            "rope_theta": found.number("rope.freq_base", 1_000_000.0),
            "partial_rotary_factor": rotated / len(divisors),
        },
        SLIDING: {
            "rope_type": "default",
            "rope_theta": found.number("rope.freq_base_swa", 10_000.0),
        },
    }


def step_layers(facts: GgufFacts) -> dict[str, Any]:
    """Heads and rotations of both kinds of layers, and limits of SwiGLU, of Step 3.5."""
    found, kinds, heads = facts.found, facts.windows(), facts.each("attention.head_count")
    counts = {kind: {n for n, of in zip(heads, kinds, strict=True) if of == kind} for kind in kinds}
    if any(len(numbers) > 1 for numbers in counts.values()):
        found.refuse(
            "attention.head_count", heads, "one number for each kind of layer is supported"
        )
    size = found.positive("attention.key_length")
    for key in ("rope.dimension_count", "rope.dimension_count_swa"):
        if found.positive(key, size) != size:
            found.refuse(
                key, found.value(key), f"{size} is supported, of which full layers rotate half"
            )
    base = found.number("rope.freq_base", 10_000.0)
    whole = {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": 0.5}
    factors = facts.tensors.get("rope_freqs.weight")
    if factors is not None:
        divisors = factors.data.ravel().tolist()[: size // 4]
        whole |= {"rope_type": "longrope", "short_factor": divisors, "long_factor": divisors}
        whole["attention_factor"] = 1.0
    sliding = {"rope_type": "default", "rope_theta": found.number("rope.freq_base_swa", base)}
    one = heads[0]
    return {
        "num_attention_heads": next(iter(counts.get(FULL, {one}))),
        "num_sliding_attention_heads": next(iter(counts.get(SLIDING, {one}))),
        "rope_parameters": {FULL: whole, SLIDING: sliding},
        "mlp_layer_types": facts.kinds("ffn_gate_inp.weight", "sparse", "dense"),
        "swiglu_limits": found.value("swiglu_clamp_exp", None),
        "swiglu_limits_shared": found.value("swiglu_clamp_shexp", None),
    }


def mixtral_experts(facts: GgufFacts) -> dict[str, Any]:
    """Experts, if a Llama has any: Mixtral's."""
    if not facts.found.count("expert_count", 0):
        facts.found.ignore("expert_used_count")
        return {}
    return {"architectures": ["MixtralForCausalLM"], **facts.numbers(LOCAL_EXPERTS)}
