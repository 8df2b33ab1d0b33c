"""Converts checkpoints to GGUF as llama.cpp's converter does (its folder ``conversion``)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf.quants import quantize
from numpy.typing import NDArray
from safetensors.numpy import load_file

Tensor = NDArray[Any]
Config = Mapping[str, Any]

EXPERTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
# Of a layer, where the name map of the package has none for what checkpoints store.
DIRECT = {
    "dt_bias": "ssm_dt.bias",
    "A_log": "ssm_a",
    "D": "ssm_d",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "layer_scalar": "layer_output_scale.weight",
}
COMMON = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings model_max_length",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps norm_eps layer_norm_epsilon",
    "expert_count": "num_local_experts num_experts n_routed_experts moe_num_experts",
    "expert_used_count": "num_experts_per_tok top_k_experts moe_k moe_topk",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}
SHARED = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
DEEPSEEK = {
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
}
DELTA = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "full_attention_interval": "full_attention_interval",
}
GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "expert_shared_feed_forward_length": "shared_intermediate_size",
}
KEYS = {
    "qwen2moe": SHARED,
    "qwen3next": DELTA | SHARED,
    "qwen35": DELTA,
    "qwen35moe": DELTA | SHARED,
    "glm4moe": DEEPSEEK,
    "dots1": DEEPSEEK,
    "deepseek2": {**DEEPSEEK, "attention.q_lora_rank": "q_lora_rank"},
    "lfm2": {"shortconv.l_cache": "conv_L_cache"},
    "lfm2moe": {
        "shortconv.l_cache": "conv_L_cache",
        "leading_dense_block_count": "num_dense_layers",
    },
    "minimax-m2": {"expert_feed_forward_length": "intermediate_size"},
    "granite": GRANITE,
    "granitemoe": GRANITE,
    "granitehybrid": {
        **GRANITE,
        "ssm.conv_kernel": "mamba_d_conv",
        "ssm.state_size": "mamba_d_state",
        "ssm.group_count": "mamba_n_groups",
        "ssm.time_step_rank": "mamba_n_heads",
    },
    "nemotron_h": {
        "ssm.conv_kernel": "conv_kernel",
        "ssm.state_size": "ssm_state_size",
        "ssm.group_count": "n_groups",
        "ssm.time_step_rank": "mamba_num_heads",
        "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
        "expert_weights_scale": "routed_scaling_factor",
        "expert_weights_norm": "norm_topk_prob",
        "attention.layer_norm_epsilon": "layer_norm_epsilon",
    },
    "ernie4_5-moe": {
        "leading_dense_block_count": "moe_layer_start_index",
        "interleave_moe_layer_step": "moe_layer_interval",
        "expert_shared_count": "moe_num_shared_experts",
    },
    "gemma4": {
        "attention.sliding_window": "sliding_window",
        "attention.shared_kv_layers": "num_kv_shared_layers",
        "attention.key_length_swa": "head_dim",
        "attention.value_length_swa": "head_dim",
        "embedding_length_per_layer_input": "hidden_size_per_layer_input",
        "final_logit_softcapping": "final_logit_softcapping",
    },
}
KEYS["nemotron_h_moe"] = KEYS["nemotron_h"]
WINDOW = {"attention.sliding_window": "sliding_window"}
KEYS |= {
    "afmoe": {
        **WINDOW,
        "expert_shared_count": "num_shared_experts",
        "expert_weights_norm": "route_norm",
        "expert_weights_scale": "route_scale",
        "leading_dense_block_count": "num_dense_layers",
    },
    "exaone-moe": {**DEEPSEEK, **WINDOW, "expert_shared_count": "num_shared_experts"},
    "olmo2": WINDOW,
    "command-r": {"attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"},
    "kimi-linear": {
        **DEEPSEEK,
        "expert_used_count": "num_experts_per_token",
        "expert_shared_count": "num_shared_experts",
        "kda.head_dim": "linear_head_dim",
        "ssm.conv_kernel": "linear_conv_kernel_dim",
        "attention.q_lora_rank": "q_lora_rank",
    },
}
KEYS["bailingmoe2"] = {**DEEPSEEK, "expert_shared_feed_forward_length": "moe_intermediate_size"}
KEYS["step35"] = {
    **WINDOW,
    "expert_shared_feed_forward_length": "share_expert_dim",
    "expert_weights_scale": "moe_router_scaling_factor",
}
KEYS["cohere2"] = {**KEYS["command-r"], **WINDOW}
PAIRED = (
    "llama",
    "mistral3",
    "granite",
    "nemotron",
    "arcee",
)  # whose rows of Q and K change places
PLUS_ONE = ("qwen3next", "qwen35", "step35")  # whose norms have the 1 that models add
PARTIAL = ("glm4moe", "qwen3next", "qwen35", "qwen35moe", "minimax-m2", "bailingmoe2")


def metadata(arch: str, config: Config) -> dict[str, Any]:
    """The metadata of the architecture, without its name in front."""
    keys = COMMON | KEYS.get(arch, {})
    found = {
        key: next((config[n] for n in names.split() if config.get(n) is not None), None)
        for key, names in keys.items()
    }
    values = {key: value for key, value in found.items() if value is not None}
    layers, types = config.get("num_hidden_layers", 0), config.get("layer_types")
    rope = config.get("rope_parameters") or {}
    main = rope.get("full_attention", rope)
    if main:
        values["rope.freq_base"] = float(main["rope_theta"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if arch in PARTIAL:
        default = {"glm4moe": 0.5, "minimax-m2": 1.0, "bailingmoe2": 1.0}.get(arch, 0.25)
        part = main.get("partial_rotary_factor", default)
        values["rope.dimension_count"] = int(head_dim * part)
    if main.get("rope_type") == "yarn":
        values["rope.scaling.type"] = "yarn"
        values["rope.scaling.factor"] = main["factor"]
        original = main["original_max_position_embeddings"]
        values["rope.scaling.original_context_length"] = original
        for name in ("beta_fast", "beta_slow"):
            if name in main:
                values[f"rope.scaling.yarn_{name}"] = float(main[name])
        if "mscale_all_dim" in main:
            unit = 1.0 if arch == "mistral3" else 0.1
            values["rope.scaling.yarn_log_multiplier"] = unit * main["mscale_all_dim"]
    if "llama_4_scaling_beta" in main:
        values["attention.temperature_scale"] = main["llama_4_scaling_beta"]
    if "sliding_attention" in rope:
        values["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
    if arch in ("olmo2", "exaone-moe"):
        values["attention.sliding_window_pattern"] = [kind.startswith("s") for kind in types]
    if arch.endswith(("vl", "vlmoe")):
        values["rope.dimension_sections"] = [16, 24, 24, 0]
    if arch.startswith("qwen3vl"):
        values["n_deepstack_layers"] = 3
    if arch.startswith("qwen3") and "linear_value_head_dim" in config:
        inner = config["linear_value_head_dim"] * config["linear_num_value_heads"]
        values["ssm.inner_size"] = inner
        values["attention.recurrent_layers"] = [kind == "linear_attention" for kind in types]
    if arch.startswith("qwen35"):
        values["rope.dimension_sections"] = [11, 11, 10, 0]
    if arch in ("glm4moe", "lfm2moe", "bailingmoe2"):
        values["expert_gating_func"] = 2
    if arch in ("deepseek2", "kimi-linear"):
        values |= _latent(config)
    if arch == "kimi-linear":
        values["attention.head_count_kv"] = [int(kind == "full_attention") for kind in types]
    if arch == "ernie4_5-moe":
        values["expert_shared_feed_forward_length"] = config["intermediate_size"] // 2
    if arch == "hunyuan-moe":
        values["expert_feed_forward_length"] = config["intermediate_size"]
        values["expert_shared_feed_forward_length"] = config["intermediate_size"]
        values["expert_shared_count"] = 1
    if arch.startswith("lfm2"):
        values["attention.head_count_kv"] = [
            0 if kind == "conv" else config["num_key_value_heads"] for kind in types
        ]
        values["vocab_size"] = config["vocab_size"]
    if arch == "lfm2":
        values["feed_forward_length"] = _adjusted(config)
    if arch == "granitehybrid":
        heads = [config["num_key_value_heads"] * (kind == "full_attention") for kind in types]
        values["attention.head_count_kv"] = heads
        values["ssm.inner_size"] = config["mamba_expand"] * config["hidden_size"]
        values["rope.scaling.finetuned"] = False
        values["context_length"] = 2**20
    if arch.startswith("nemotron_h"):
        values |= _one_op(arch, config)
    if arch == "gemma4":
        values |= _gemma4(config, layers)
    if arch == "step35":
        values |= _step(config, types)
    return values


def _step(config: Config, types: list[str]) -> dict[str, Any]:
    sliding = [kind == "sliding_attention" for kind in types]
    heads = (config["num_attention_heads"], config["num_sliding_attention_heads"])
    limits = {
        f"swiglu_clamp_{kind}": [float(limit or 0.0) for limit in config[key] or []] or None
        for kind, key in (("exp", "swiglu_limits"), ("shexp", "swiglu_limits_shared"))
    }
    return {
        "attention.head_count": [heads[flag] for flag in sliding],
        "attention.head_count_kv": [config["num_key_value_heads"]] * len(types),
        "attention.sliding_window_pattern": sliding,
        "expert_weights_norm": True,
        "leading_dense_block_count": config["mlp_layer_types"].count("dense"),
        "moe_every_n_layers": 1,
        **limits,
    }


def _latent(config: Config) -> dict[str, Any]:
    rotated, rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
    softmax = "topk_method" in config and config["topk_method"] != "noaux_tc"
    return {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": rotated,
        "expert_gating_func": 1 if softmax else 2,
        "vocab_size": config["vocab_size"],
    }


def _adjusted(config: Config) -> int:
    width = config["intermediate_size"]
    if not config["block_auto_adjust_ff_dim"]:
        return width
    multiple = config["block_multiple_of"]
    return multiple * -(-int(config["block_ffn_dim_multiplier"] * int(2 * width / 3)) // multiple)


def _one_op(arch: str, config: Config) -> dict[str, Any]:
    kinds = config["layers_block_type"]
    sparse = arch.endswith("moe")
    width = config["moe_intermediate_size" if sparse else "intermediate_size"]
    of_mlp = "moe" if sparse else "mlp"
    return {
        "block_count": len(kinds),
        "attention.head_count_kv": [
            config["num_key_value_heads"] * (kind == "full_attention") for kind in kinds
        ],
        "feed_forward_length": [width * (kind == of_mlp) for kind in kinds],
        "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
    }


def _gemma4(config: Config, layers: int) -> dict[str, Any]:
    windows = [kind == "sliding_attention" for kind in config["layer_types"]]
    whole = next(
        layer["head_dim"] for i, layer in config["per_layer_config"].items() if not windows[int(i)]
    )
    values: dict[str, Any] = {
        "attention.sliding_window_pattern": windows,
        "attention.key_length": whole,
        "attention.value_length": whole,
        "rope.dimension_count": whole,
        "rope.dimension_count_swa": config["head_dim"],
        "attention.head_count_kv": [
            config["per_layer_config"]
            .get(str(i), {})
            .get("num_key_value_heads", config["num_key_value_heads"])
            for i in range(layers)
        ],
    }
    if config["use_double_wide_mlp"]:
        own = layers - config["num_kv_shared_layers"]
        width = config["intermediate_size"]
        values["feed_forward_length"] = [width * (1 if i < own else 2) for i in range(layers)]
    return values


def tensors_of(arch: str, config: Config, folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors under the file's names, as they lie there, but in floats."""
    config = config.get("text_config", config)
    layers = len(config.get("layers_block_type") or ()) or config["num_hidden_layers"]
    archs = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(archs[arch], layers)
    experts: dict[str, dict[int, Tensor]] = {}
    stored = load_file(folder / "model.safetensors")
    for name, tensor in stored.items():
        found = re.fullmatch(r".*\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight", name)
        if found is not None:
            number, expert, part = found.groups()
            place = f"model.layers.{number}.mlp.experts.{EXPERTS.get(part, part)}.weight"
            experts.setdefault(place, {})[int(expert)] = tensor
            continue
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        if name.startswith("vi"):  # of towers
            continue
        for one, numbers in _parts(arch, config, name, tensor):
            yield _place(names, one), numbers
    for name, each in experts.items():
        yield _place(names, name), np.stack([each[i] for i in range(len(each))])
    if arch == "step35" and (factors := _llama3_factors(config)) is not None:
        yield "rope_freqs.weight", factors
    if arch == "gemma4":
        size = next(s.shape[0] for n, s in stored.items() if _is_whole_norm(n, config))
        rope = config["rope_parameters"]["full_attention"]
        rotated = int(size * rope["partial_rotary_factor"] / 2)
        divisors = [1.0] * rotated + [1e30] * (size // 2 - rotated)
        yield "rope_freqs.weight", np.array(divisors, np.float32)


def _llama3_factors(config: Config) -> Tensor | None:
    """Divisors of the frequencies of full layers, if these are scaled; behind them 1."""
    rope = config["rope_parameters"]["full_attention"]
    if rope["rope_type"] != "llama3":
        return None
    half, rotated = config["head_dim"] // 2, int(config["head_dim"] * rope["partial_rotary_factor"])
    plain = rope["rope_theta"] ** (-np.arange(0, rotated, 2) / rotated)
    turns = rope["original_max_position_embeddings"] * plain / (2 * np.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.append(1 / (kept + (1 - kept) / rope["factor"]), np.ones(half - rotated // 2))


def _is_whole_norm(name: str, config: Config) -> bool:
    number = config["layer_types"].index("full_attention")
    return name.endswith(f".layers.{number}.self_attn.q_norm.weight")


def _place(names: gguf.TensorNameMap, name: str) -> str:
    layer = re.fullmatch(r"(?:model|backbone)\.layers\.(\d+)\.(.+)", name)
    if layer is not None:
        number, part = layer.groups()
        short = re.sub(r"^(mixer|mamba|linear_attn|self_attn)\.", "", part)
        if short in DIRECT:
            return f"blk.{number}.{DIRECT[short]}"
    name = re.sub(r"block_sparse_moe\.(\w+_proj)", r"mlp.\1", name)  # of Kimi's dense layers
    name = re.sub(r"(e_score_correction)_bias$", r"\1.bias", name)
    name = re.sub(r"(expert|router)_bias$", r"\1_bias.bias", name)
    name = name if name.endswith((".weight", ".bias")) else f"{name}.weight"
    place = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert place is not None, name
    return str(place)


def _parts(arch: str, config: Config, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield what becomes of a tensor, under names of checkpoints."""
    if "linear_attn." in name:
        yield from _delta(arch, config, name, tensor)
    elif re.search(r"\.(mamba|mixer)\.(A_log|D|conv1d|norm)", name):
        groups = config.get("mamba_n_groups", config.get("n_groups"))
        yield name, _mamba(name, tensor, groups)
    elif re.search(r"self_attn\.(A_log|._conv1d)", name):
        yield name, -np.exp(tensor) if name.endswith("A_log") else tensor[None]
    elif name.endswith("conv.conv.weight"):
        yield name, tensor[:, 0]
    elif name.endswith("kv_b_proj.weight"):
        heads, plain = config["num_attention_heads"], config["qk_nope_head_dim"]
        cut = tensor.reshape(heads, -1, tensor.shape[-1])
        yield name.replace("kv_b", "k_b"), cut[:, :plain].swapaxes(1, 2)
        yield name.replace("kv_b", "v_b"), cut[:, plain:]
    elif name.endswith("input_linear.weight"):
        shared = "shared_mlp" in name
        dense = shared and not config["num_local_experts"]
        home = "mlp" if dense else "mlp.shared_expert" if shared else "mlp.experts"
        layer = name.split(".")[2]
        for part, rows in zip(("gate", "up"), np.split(tensor, 2, -2), strict=True):
            yield f"model.layers.{layer}.{home}.{part}_proj.weight", rows
    elif name.endswith("shared_mlp.output_linear.weight") and not config["num_local_experts"]:
        yield f"model.layers.{name.split('.')[2]}.mlp.down_proj.weight", tensor
    elif arch.startswith(PAIRED) and (found := re.search(r"\.([qk])_proj", name)):
        heads = config["num_attention_heads" if found[1] == "q" else "num_key_value_heads"]
        yield name, paired(tensor, heads)
    elif name.endswith("norm.weight") and (arch == "gemma" or arch.startswith(PLUS_ONE)):
        yield name, tensor + np.float32(1)
    else:
        yield name, tensor


def paired(weight: Tensor, heads: int) -> Tensor:
    """Rows of Q or K, of which the halves of a head are rotated together, as neighbours."""
    cut = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return cut.swapaxes(1, 2).reshape(weight.shape)


def _mamba(name: str, tensor: Tensor, groups: int) -> Tensor:
    if name.endswith("A_log"):
        return -np.exp(tensor)[:, None]
    if name.endswith(".D"):
        return tensor[:, None]
    if name.endswith("norm.weight"):
        return tensor.reshape(groups, -1)
    return tensor[:, 0] if name.endswith("conv1d.weight") else tensor


def _delta(arch: str, config: Config, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key, value = config["linear_key_head_dim"], config["linear_value_head_dim"]
    home, part = name.split("linear_attn.")
    if part == "in_proj_qkvz.weight":
        each = values // keys * value
        sides = np.split(tensor.reshape(keys, -1, tensor.shape[-1]), np.cumsum([key, key, each]), 1)
        rows = [side.reshape(-1, tensor.shape[-1]) for side in sides]
        yield f"{home}linear_attn.in_proj_qkv.weight", np.concatenate(rows[:3])
        yield f"{home}linear_attn.in_proj_z.weight", rows[3]
        return
    tensor = tensor[:, 0] if part == "conv1d.weight" else tensor
    if arch.startswith("qwen35"):
        heads = np.arange(values).reshape(keys, -1).T.ravel()
        rows = np.arange(values * value).reshape(values, value)[heads].ravel()
        start = 2 * keys * key
        if part in ("in_proj_qkv.weight", "conv1d.weight"):
            tensor = np.concatenate((tensor[:start], tensor[start:][rows]))
        elif part == "in_proj_z.weight":
            tensor = tensor[rows]
        elif part == "out_proj.weight":
            tensor = tensor[:, rows]
        elif part != "norm.weight":
            tensor = tensor[heads]
    yield name, -np.exp(tensor) if part == "A_log" else tensor


Kind = Callable[[str, tuple[int, ...]], Type]
Store = Callable[[Tensor, Type, int], Tensor]


def convert(
    folder: Path,
    arch: str,
    path: Path,
    kind: Kind = lambda *_: Type.F32,
    store: Store = lambda weight, kind, _: quantize(weight, kind),
    more: Mapping[str, Any] | None = None,
    edit: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda tensors: tensors,
) -> None:
    """Write the checkpoint of a folder as GGUF.

    Args:
        kind: the type of a matrix, by its name in the file and its shape.
        store: its numbers in a type.
        more: metadata that differ; None: there are none.
        edit: what becomes of all tensors, by their names in the file.
    """
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, arch)
    values = metadata(arch, config.get("text_config", config)) | dict(more or {})
    for key, value in values.items():
        if value is None:
            continue
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add |= {str: writer.add_string, list: writer.add_array}
        add[type(value)](f"{arch}.{key}", value)
    tensors = edit(dict(tensors_of(arch, config, folder)))
    for seed, (name, tensor) in enumerate(tensors.items()):
        numbers = np.ascontiguousarray(tensor, np.float32)
        here = kind(name, numbers.shape) if numbers.ndim > 1 else Type.F32
        if here == Type.F32:
            writer.add_tensor(name, numbers)
        else:
            writer.add_tensor(name, store(numbers, here, seed), raw_dtype=here)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
