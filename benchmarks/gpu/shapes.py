"""Models of real shapes with random weights that are made where they lie; no file is read."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from weft.kernels.arrays import dtype_name
from weft.kernels.interface import OpTable
from weft.models.decoder import Decoder
from weft.models.host_part import HostPart
from weft.models.layout import parameters, storage_of
from weft.models.spec import ModelSpec
from weft.models.spec_reader import spec_from_config

# config.json as published, without what has no bearing on a shape
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2.5-7b": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "intermediate_size": 18944, "vocab_size": 152064, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "max_position_embeddings": 32768, "tie_word_embeddings": False,
        "hidden_act": "silu", "use_sliding_window": False,
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "vocab_size": 128256, "rms_norm_eps": 1e-5,
        "rope_theta": 5e5, "max_position_embeddings": 131072, "tie_word_embeddings": False,
        "hidden_act": "silu",
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151936,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 32768,
        "tie_word_embeddings": False, "hidden_act": "silu",
    },
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
        "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16,
        "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
        "topk_method": "greedy", "norm_topk_prob": False, "routed_scaling_factor": 1.0,
        "vocab_size": 102400, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
        "max_position_embeddings": 32768, "tie_word_embeddings": False, "hidden_act": "silu",
    },
    "tiny": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 128, "vocab_size": 512, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
        "max_position_embeddings": 2048, "tie_word_embeddings": False, "hidden_act": "silu",
    },
    "tiny-moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 128, "moe_intermediate_size": 64, "num_experts": 8,
        "num_experts_per_tok": 2, "norm_topk_prob": True, "vocab_size": 512, "rms_norm_eps": 1e-6,
        "rope_theta": 1e4, "max_position_embeddings": 2048, "tie_word_embeddings": False,
        "hidden_act": "silu",
    },
}  # fmt: skip
DEVIATION = 0.02  # of the weights, as models are initialised


def shape(
    name: str,
    max_model_len: int,
    layers: int | None = None,
    stored: dict[str, Any] | None = None,
) -> ModelSpec:
    """The spec of a shape.

    Args:
        layers: fewer than it has.
        stored: ``quantization_config`` of a checkpoint whose weights are quantised.

    Raises:
        SystemExit: an unknown name.
    """
    if name not in CONFIGS:
        raise SystemExit(f"no shape is called {name}; they are: {', '.join(CONFIGS)}")
    changed: dict[str, Any] = {} if layers is None else {"num_hidden_layers": layers}
    changed |= {} if stored is None else {"quantization_config": stored}
    return spec_from_config(CONFIGS[name] | changed, max_model_len)


def random_decoder(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    ops: OpTable,
    quantize: str,
    host: HostPart | None = None,
) -> Decoder:
    """A decoder with random weights, quantised as ``load_model`` would.

    Args:
        host: the experts that lie on the host; they have the numbers that they would have here.
    """
    weights: dict[str, Any] = {}
    on_device, by_name = ops, partial(storage_of, quantize=quantize, group=64)
    generator = torch.Generator(device).manual_seed(1)
    for parameter in parameters(spec, stacked_experts=True):
        tied = parameter.name == "embed" and spec.tied_embeddings
        name = "lm_head" if tied else parameter.name
        tensor = torch.empty(parameter.shape, dtype=dtype, device=device)
        if tensor.dim() == 1:
            tensor.fill_(1.0 if "norm" in name else 0.0)
        else:
            tensor.normal_(0, DEVIATION, generator=generator)
        ops, rounding = on_device, by_name
        if host is not None and host.has(name):
            ops, rounding, tensor = host.ops, host.rounding, tensor.cpu()
        storage = rounding(name)
        if storage is None or ops.quantise is None:
            weights[parameter.name] = ops.pack(name, tensor)
            continue
        found = ops.quantise(name, tensor.shape, dtype_name(dtype), storage)
        several = isinstance(found, tuple)
        for matrix, rows in zip(found, tensor, strict=True) if several else [(found, tensor)]:
            matrix.write(0, rows)
        weights[parameter.name] = found
    if host is not None:
        weights |= host.hosted(spec, weights)
    return Decoder(spec, weights, on_device)
