"""Decides which layers run as two fused calls around attention, and binds their weights."""

from __future__ import annotations

from dataclasses import replace

from weft.kernels.conv import ConvShape
from weft.kernels.delta import DeltaShape
from weft.kernels.hosted import HostedExperts
from weft.kernels.interface import Fused, FusedLayer, OpTable
from weft.kernels.parts import (
    UNGATED,
    Biases,
    LatentParts,
    LayerParts,
    LayerShape,
    MixedParts,
    Norms,
    RoutedExperts,
)
from weft.models.layers import LayerWeights, StateLayer
from weft.models.spec import LayerSpec, ModelSpec, StateShape, StateSpec

MATRICES = (
    *("qkv", "output", "output_gate", "gate_up", "up", "down", "router"),
    *("input_gate", "input_projection", "state_gates", "state_gate_up", "forget_up"),
)


def fusable(spec: ModelSpec, layer: LayerSpec, fused: Fused, ranks: int = 1) -> bool:
    """Whether the fused calls compute all parts of a layer.

    Norms over the heads of all ranks have a sum over ranks in the middle.
    """
    if spec.encoder is not None and not fused.every_layer:
        return False
    if ranks > 1 and (layer.state is not None or spec.qk_norm_whole):
        return False
    if spec.value_dim is not None and spec.output_gate is not None:
        return False
    recurrent = layer.state is not None or not layer.has_feed_forward
    if (recurrent or spec.activation in UNGATED) and not fused.mixes:
        return False
    beside_mlp = layer.moe and spec.moe is not None and spec.moe.beside_mlp
    plain = layer.kv_source is None and not (layer.value_is_key or beside_mlp)
    plain = plain and not (spec.value_norm or spec.per_layer_input_size or spec.layer_scalars)
    plain = plain and spec.activation not in UNGATED and spec.value_dim is None
    plain = plain and spec.pre_norms and spec.residual_scale == 1.0
    plain = plain and not (spec.qk_norm_whole or spec.qk_norm_rotated)
    plain = plain and not (spec.norm_centred or spec.parallel_block)
    plain = plain and not spec.ropes[layer.rope].query_scales
    plain = plain and spec.post_norm_eps is None and not spec.embedding_norm
    return plain or fused.every_layer


def describe_layers(spec: ModelSpec, ops: OpTable, ranks: int = 1) -> str:
    """A readable description of how the layers of a model run.

    The sum over ranks lies in the middle of what follows attention, which so runs op by op.
    """
    if ops.fused is None:
        return "op by op"
    fused = sum(fusable(spec, layer, ops.fused, ranks) for layer in spec.layers)
    if not fused:
        return "op by op"
    if ranks > 1:
        return f"op by op, but in {fused} of {spec.num_layers} one call before attention"
    if fused == spec.num_layers:
        if spec.stage.count > 1:
            return "two calls a layer, around attention"
        return ops.fused.described
    return f"op by op, {fused} of {spec.num_layers} fused"


def fuse(
    spec: ModelSpec,
    layer: LayerSpec,
    weights: LayerWeights,
    ops: OpTable,
    mixer: StateLayer | None = None,
) -> FusedLayer | None:
    """Bind a layer's weights, as ``ops`` packed them; None if it runs op by op.

    Args:
        mixer: what takes attention's place in a recurrent layer.
    """
    if ops.fused is None or not fusable(spec, layer, ops.fused, ops.ranks.size):
        return None
    if isinstance(weights.expert_down, HostedExperts) and not ops.fused.hosted:
        return None
    shape = LayerShape(
        spec.heads(layer),
        0 if layer.kv_source is not None else layer.num_kv_heads,
        layer.head_dim,
        spec.norm_eps,
        spec.norm_plus_one,
        spec.mlp_activation(layer),
        value_is_key=layer.value_is_key,
        value_norm=spec.value_norm,
        value_dim=spec.value_dim,
        value_scale=spec.value_scale,
        qk_norm_whole=spec.qk_norm_whole,
        qk_norm_rotated=spec.qk_norm_rotated,
        residual_scale=spec.residual_scale,
        norm_centred=spec.norm_centred,
        parallel_block=spec.parallel_block,
        own_query_angles=bool(spec.ropes[layer.rope].query_scales),
        post_eps=spec.post_norm_eps,
        feeds_forward=layer.has_feed_forward,
        gating=None if spec.output_gate is None else spec.output_gate.kind,
        norms_sums=spec.norms_sums,
    )
    matrices = {name: getattr(weights, name) for name in MATRICES}
    matrices = {name: matrix for name, matrix in matrices.items() if matrix is not None}
    norms = Norms(**{name: getattr(weights, name) for name in Norms.__annotations__})
    biases = Biases(**{name: getattr(weights, name) for name in Biases.__annotations__})
    experts = None
    if layer.moe:
        assert spec.moe is not None
        gated = weights.expert_up is None
        gate_up = weights.expert_gate_up if gated else weights.expert_up
        down = weights.expert_down
        experts = RoutedExperts(
            gate_up,
            down,
            spec.moe.routing,
            spec.expert_activation(layer),
            weights.expert_scale,
            weights.correction_bias,
            weights.router_bias,
            weights.expert_gate_up_bias,
            weights.expert_down_bias,
            spec.moe.shared_gate,
        )
    latent = None
    if spec.latent is not None and layer.state is None:
        latent = LatentParts(
            spec.latent.rotated_dim,
            spec.latent.norm_eps,
            weights.query_up,
            weights.query_norm,
            weights.latent_norm,
            weights.key_up,
            weights.value_up,
        )
    mixed = None
    if layer.state is not None:
        mixed = _mixed(layer.state, mixer)
        heads, size = _heads(layer.state.shape)
        shape = replace(shape, heads=heads, kv_heads=0, head_dim=size, gating=None)
    numbers = weights.layer_scalar, weights.activation
    parts = LayerParts(shape, matrices, norms, biases, experts, *numbers, latent, mixed)
    return ops.fused.layer(parts)


def _mixed(state: StateSpec, mixer: StateLayer | None) -> MixedParts:
    """What the mixer of a recurrent layer takes, and which products give it."""
    shape = state.shape
    if isinstance(shape, ConvShape):
        return MixedParts(mixer, 3 * shape.channels, 0, 3 * shape.channels, 0)
    inputs = shape.channels + shape.values
    if not isinstance(shape, DeltaShape):
        return MixedParts(mixer, inputs, shape.heads, inputs, shape.heads)
    heads, gates = shape.value_heads, shape.value_heads + shape.decays
    if not shape.by_channel:
        return MixedParts(mixer, inputs, gates, inputs, gates)
    if (rank := state.gate_rank) is None:
        return MixedParts(mixer, inputs, gates, inputs + shape.decays, heads)
    return MixedParts(mixer, inputs, gates, shape.channels, heads + 2 * rank, rank)


def _heads(shape: StateShape) -> tuple[int, int]:
    """Heads of what a recurrent layer gives, and their size."""
    if isinstance(shape, ConvShape):
        return 1, shape.channels
    if isinstance(shape, DeltaShape):
        return shape.value_heads, shape.value_dim
    return shape.heads, shape.head_dim
