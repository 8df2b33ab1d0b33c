"""The tensors of a GGUF file under the names and in the shapes that ``layout`` has for them.

Names of parts of a layer are those of llama.cpp's gguf-py/gguf/constants.py. Torch-free.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from weft.models.gguf_form import GgufForm
from weft.models.gguf_header import GgufTensor

_SHARED = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate_inp": "mlp.gate",
    **_SHARED,
    **_LATENT,
}
# Of whole tensors.
_LAYER_NAMES |= {
    "attn_sinks.weight": "self_attn.sinks",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_exps.bias": "mlp.experts.gate_proj_bias",
    "ffn_up_exps.bias": "mlp.experts.up_proj_bias",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}
# Of ``GgufForm.names``.
DELTA_NAMES = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
KDA_NAMES = {f"ssm_{part}": f"self_attn.{part}_proj" for part in ("f_a", "f_b", "g_a", "g_b")}
KDA_NAMES |= {f"ssm_conv1d_{part}": f"self_attn.{part}_conv1d" for part in "qkv"}
KDA_NAMES |= {
    "ssm_beta": "self_attn.b_proj",
    "ssm_a": "self_attn.A_log",
    "ssm_dt.bias": "self_attn.dt_bias",
    "ssm_norm": "self_attn.o_norm",
}
MAMBA_NAMES = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
CONV_NAMES = {f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")}
CONV_NAMES |= {"token_embd_norm.weight": "model.norm.weight"}
GEMMA4_NAMES = {
    "exps": "experts",
    "ffn_gate_inp.weight": "router.proj.weight",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "layer_output_scale.weight": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_EXPERTS = {
    "ffn_gate_exps": ("gate_proj",),
    "ffn_up_exps": ("up_proj",),
    "ffn_gate_up_exps": ("gate_proj", "up_proj"),
    "ffn_down_exps": ("down_proj",),
}
# Stored in more or fewer dimensions than checkpoints have.
_FLAT = ("ssm_a", "ssm_d", "ssm_norm", "exp_probs_b", "layer_output_scale")
_ROWS = ("ffn_gate_inp_shexp",)
_CONVOLUTIONS = ("ssm_conv1d", "shortconv.conv", *(f"ssm_conv1d_{part}" for part in "qkv"))
_LAYER = re.compile(r"blk\.(\d+)\.(.+?)(?:\.(weight|bias|scale))?")


def named(tensors: Mapping[str, GgufTensor], form: GgufForm, layers: int) -> dict[str, GgufTensor]:
    """Return tensors under the names of ``layout``; stacked experts one by one.

    Args:
        layers: of the model; those behind guess further tokens and are left out.
    """
    found: dict[str, GgufTensor] = {}
    for name, tensor in tensors.items():
        layer = _LAYER.fullmatch(name)
        if layer is None:
            found[{**_NAMES, **form.names}.get(name, name)] = tensor
        elif int(layer[1]) < layers:
            found |= _of_layer(layer[1], layer[2], layer[3] or "", tensor, tensors, form)
    return found


def _of_layer(
    number: str,
    part: str,
    kind: str,
    tensor: GgufTensor,
    tensors: Mapping[str, GgufTensor],
    form: GgufForm,
) -> dict[str, GgufTensor]:
    home, names = f"model.layers.{number}", {**_LAYER_NAMES, **form.names}
    if form.post_norms:
        names["ffn_norm"] = "pre_feedforward_layernorm"
    if part in _EXPERTS and kind == "weight" and len(tensor.shape) == 3:
        experts = f"{home}.{names.get('exps', 'mlp.experts')}"
        return dict(_experts(experts, _EXPERTS[part], tensor))
    if part == "attn_norm" and _is_feed_forward(number, tensors):
        part = "ffn_norm"
    name = names.get(f"{part}.{kind}")
    if name is None:
        name = names.get(part, part) + (f".{kind}" if kind else "")
    return {f"{home}.{name}": _in_shape(part, kind, tensor)}


def _is_feed_forward(number: str, tensors: Mapping[str, GgufTensor]) -> bool:
    """Whether a layer is nothing but an MLP or experts, as Nemotron-H has them."""
    mixers, feeds = ("attn_output", "ssm_out", "shortconv.out_proj"), ("ffn_up", "ffn_up_exps")
    mixes, feeds_forward = (
        any(f"blk.{number}.{part}.weight" in tensors for part in parts) for parts in (mixers, feeds)
    )
    return feeds_forward and not mixes


def _experts(home: str, sides: tuple[str, ...], tensor: GgufTensor) -> Any:
    """Yield each expert's matrices, of which a tensor has one or two below each other."""
    columns, rows, _ = tensor.shape
    height = rows // len(sides)
    for expert, data in enumerate(tensor.data):
        for place, side in enumerate(sides):
            part = data[place * height : (place + 1) * height]
            name = f"{home}.{expert}.{side}.weight"
            yield name, replace(tensor, shape=(columns, height), data=part)


def _in_shape(part: str, kind: str, tensor: GgufTensor) -> GgufTensor:
    shape = tensor.shape
    if part in _FLAT:
        return _reshaped(tensor, (math.prod(shape),))
    if part in _ROWS and len(shape) == 1:
        return _reshaped(tensor, (shape[0], 1))
    if part in _CONVOLUTIONS and kind == "weight":
        return _reshaped(tensor, (shape[0], 1, math.prod(shape[1:])))
    return tensor


def _reshaped(tensor: GgufTensor, shape: tuple[int, ...]) -> GgufTensor:
    data: NDArray[Any] = tensor.data.reshape(*reversed(shape[1:]), -1)
    return replace(tensor, shape=shape, data=data)
