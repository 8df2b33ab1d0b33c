"""A random checkpoint of gpt-oss with experts in MXFP4, as published ones are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from checkpoints import CASES, edit_config, randomise, save
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors


def save_in_mxfp4(folder: Path) -> Any:
    """Write the checkpoint; return the reference model with what its blocks stand for.

    What they stand for says the reference's own function.
    """
    config = CASES["gpt-oss"].config()
    config.intermediate_size, config._attn_implementation = 96, "eager"
    config.num_hidden_layers, config.layer_types = 2, config.layer_types[:2]
    model = transformers.GptOssForCausalLM(config).eval().requires_grad_(False)
    randomise(model, 0)
    tensors = load_file(save(model, folder) / "model.safetensors")
    draw = torch.Generator().manual_seed(0)
    for number, layer in enumerate(model.model.layers):
        for part in ("gate_up_proj", "down_proj"):
            weight = getattr(layer.mlp.experts, part)  # [E, inputs, outputs]
            name = f"model.layers.{number}.mlp.experts.{part}"
            count, inputs, outputs = weight.shape
            shape = (count, outputs, inputs // 32)
            blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=draw)
            scales = torch.randint(122, 126, shape, dtype=torch.uint8, generator=draw)
            weight.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
            del tensors[name]
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors")
    edit_config(folder, quantization_config={"quant_method": "mxfp4"})
    return model
