"""Decides which layers run as two fused calls around attention, and binds their weights."""

from __future__ import annotations

from weft.kernels.interface import FusedLayer, OpTable
from weft.kernels.parts import Biases, LayerShape, Norms
from weft.models.layers import LayerWeights, moe_block
from weft.models.spec import LayerSpec, ModelSpec


def fusable(spec: ModelSpec, layer: LayerSpec, moe_layers: bool) -> bool:
    """Whether a layer has only the parts that the fused calls compute.

    KV of another layer and the extras of Gemma 4 run op by op, experts if not ``moe_layers``.
    """
    if layer.moe and not (moe_layers and spec.moe is not None and not spec.moe.beside_mlp):
        return False
    plain = layer.kv_source is None and not layer.value_is_key
    return plain and not (spec.value_norm or spec.per_layer_input_size or spec.layer_scalars)


def describe_layers(spec: ModelSpec, ops: OpTable, ranks: int = 1) -> str:
    """A readable description of how the layers of a model run.

    The sum over ranks lies in the middle of what follows attention, which so runs op by op.
    """
    if ops.fused is None:
        return "op by op"
    fused = sum(fusable(spec, layer, ops.fused.moe_layers) for layer in spec.layers)
    if not fused:
        return "op by op"
    if ranks > 1:
        return f"op by op, but in {fused} of {spec.num_layers} one call before attention"
    if fused == spec.num_layers:
        return ops.fused.described
    return f"op by op, {fused} of {spec.num_layers} fused"


def fuse(
    spec: ModelSpec, layer: LayerSpec, weights: LayerWeights, ops: OpTable
) -> FusedLayer | None:
    """Bind a layer's weights, as ``ops`` packed them; None if it runs op by op."""
    if ops.fused is None or not fusable(spec, layer, ops.fused.moe_layers):
        return None
    shape = LayerShape(
        spec.num_heads,
        layer.num_kv_heads,
        layer.head_dim,
        spec.norm_eps,
        spec.norm_plus_one,
        spec.activation,
    )
    names = ("qkv", "output") if layer.moe else ("qkv", "output", "gate_up", "down")
    matrices = {name: getattr(weights, name) for name in names}
    norms = Norms(
        weights.input_norm,
        weights.mlp_norm,
        weights.qk_norm,
        weights.post_attention_norm,
        weights.post_mlp_norm,
    )
    biases = Biases(weights.qkv_bias, weights.output_bias, weights.gate_up_bias, weights.down_bias)
    if not layer.moe:
        return ops.fused.layer(shape, matrices, norms, biases)
    experts = lambda x: moe_block(spec, weights, x, x, ops)  # noqa: E731
    return ops.fused.layer(shape, matrices, norms, biases, experts)
