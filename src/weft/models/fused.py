"""Which layers run as two native calls around attention, and binding their weights to those."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.kernels.ops import OpTable
from weft.models.layers import LayerWeights
from weft.models.spec import LayerSpec, ModelSpec

if TYPE_CHECKING:
    from weft.kernels.cpu.layer import Layer


def fusable(spec: ModelSpec, layer: LayerSpec) -> bool:
    """Whether a layer has only the parts that the fused calls compute.

    Experts, KV of another layer and the extras of Gemma 4 run op by op.
    """
    plain = layer.kv_source is None and not layer.value_is_key and not layer.moe
    return plain and not (spec.value_norm or spec.per_layer_input_size or spec.layer_scalars)


def describe_layers(spec: ModelSpec, ops: OpTable) -> str:
    """Say how the layers of a model run, for people."""
    fused = sum(fusable(spec, layer) for layer in spec.layers) if ops.fused_layers else 0
    if fused == spec.num_layers:
        return "all in one native call"
    return f"op by op, {fused} of {spec.num_layers} fused" if fused else "op by op"


def fuse(spec: ModelSpec, layer: LayerSpec, weights: LayerWeights, ops: OpTable) -> Layer | None:
    """Bind a layer's weights, as ``ops`` packed them; None if it runs op by op."""
    if not ops.fused_layers or not fusable(spec, layer):
        return None
    from weft.kernels.cpu.layer import Biases, Layer, Norms, Shape

    shape = Shape(
        spec.num_heads,
        layer.num_kv_heads,
        layer.head_dim,
        spec.norm_eps,
        spec.norm_plus_one,
        spec.activation,
    )
    names = ("qkv", "output", "gate_up", "down")
    matrices = {name: getattr(weights, name) for name in names}
    norms = Norms(
        weights.input_norm,
        weights.mlp_norm,
        weights.qk_norm,
        weights.post_attention_norm,
        weights.post_mlp_norm,
    )
    biases = Biases(weights.qkv_bias, weights.output_bias, weights.gate_up_bias, weights.down_bias)
    return Layer(shape, matrices, norms, biases)
