"""The tensors of one layer, and the parts of a layer around attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import InvariantError
from weft.kernels.arrays import Array, concatenate, contiguous, empty, times, times_rows
from weft.kernels.conv import ConvLayer, ConvParts, ConvShape
from weft.kernels.delta import DeltaLayer, DeltaParts, DeltaShape
from weft.kernels.hosted import HostedExperts
from weft.kernels.interface import Experts, OpTable, Weight
from weft.kernels.mamba2 import Mamba2Layer, Mamba2Parts
from weft.kernels.routing import Routing
from weft.kernels.unavailable import KernelUnavailable
from weft.models.spec import LayerSpec, ModelSpec, RopeSpec, StateSpec

Floats: TypeAlias = NDArray[Any]  # of float32
# cos and sin, each [T, R] float32; where queries are scaled by position [T, 2R]: K's, then Q's.
Angles = tuple[Array, Array]


@dataclass(frozen=True)
class LayerWeights:
    """The parameters of one layer; None where the model has no such part.

    H query heads, Hkv KV heads of size D; hidden size C; MLP size I; E experts of size J.
    """

    qkv: Weight  # [(H + 2 Hkv) * D, C]; of a recurrent layer what it mixes: see its shape
    output: Weight  # [C, H * D], or of what a recurrent layer gives
    query_norm: Array | None = None  # [Q], of latent attention, whose sizes ``LatentSpec`` has
    query_up: Weight | None = None  # [H * (plain + rotated), Q]
    latent_norm: Array | None = None  # [rank]
    key_up: Experts | None = None  # [H, rank, plain]
    value_up: Experts | None = None  # [H, value, rank]
    input_norm: Array | None = None  # [C]
    mlp_norm: Array | None = None  # [C]
    qkv_bias: Array | None = None
    output_bias: Array | None = None  # [C]
    output_gate: Weight | None = None  # [H * D, C], or by head [H, C]
    sinks: Array | None = None  # [H]
    state_gates: Weight | None = None  # [2 Hv, C], of KDA [Hv + 2 R, C]; as all that follow
    state_conv: Array | None = None  # [channels, 1, K]
    state_conv_bias: Array | None = None  # [channels]
    state_decay: Array | None = None  # [Hv]
    state_bias: Array | None = None  # [Hv]
    state_norm: Array | None = None  # [Dv], or of all heads
    state_skip: Array | None = None  # [H], of Mamba-2
    state_gate_up: Weight | None = None  # [Hv * Dv, R], of low-rank gates (KDA)
    forget_up: Weight | None = None  # [Hv * Dk, R], the same of decays
    forget_rate: Array | None = None  # [Hv] or [1, 1, Hv, 1] float32, in place of ``state_decay``
    forget_bias: Array | None = None  # [Hv * Dk] float32, in place of ``state_bias``
    qk_norm: Array | None = None  # [H + Hkv, D]; of norms over all heads [(H + Hkv) * D]
    post_attention_norm: Array | None = None  # [C]
    post_attention_norm_bias: Array | None = None  # [C], of encoders
    post_mlp_norm: Array | None = None  # [C]
    post_mlp_norm_bias: Array | None = None  # [C]
    gate_up: Weight | None = None  # [2 I, C]
    gate_up_bias: Array | None = None  # [2 I]
    up: Weight | None = None  # [I, C], of an MLP without a gate
    down: Weight | None = None  # [C, I]
    activation: Array | None = None  # [4] float32, the numbers of the activation
    down_bias: Array | None = None  # [C]
    router: Weight | None = None  # [E, C]; with a gate of the shared experts [E + 1, C]
    router_bias: Array | None = None  # [E]
    correction_bias: Array | None = None  # [E] float32
    router_scale: Array | None = None  # [C]
    expert_scale: Array | None = None  # [E]
    expert_gate_up: Experts | None = None  # [E, 2 J, C]
    expert_up: Experts | None = None  # [E, J, C], of experts without a gate
    expert_down: Experts | None = None  # [E, C, J]
    expert_gate_up_bias: Array | None = None  # [E, 2 J]
    expert_down_bias: Array | None = None  # [E, C]
    dense_post_norm: Array | None = None  # [C]
    expert_norm: Array | None = None  # [C]
    expert_post_norm: Array | None = None  # [C]
    input_gate: Weight | None = None  # [P, C]
    input_projection: Weight | None = None  # [C, P]
    post_input_norm: Array | None = None  # [C]
    layer_scalar: Array | None = None  # [1]


def inverse_frequencies(rope: RopeSpec) -> Floats:
    """Return the inverse frequencies [R] of one rotary embedding.

    Computed in float32, as the models were trained, so that far positions get the same angles.
    """
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / np.float32(rope.rotary_dim)
    powers = np.power(rope.theta, exponents, dtype=np.float64).astype(np.float32)
    plain: Floats = np.float32(1.0) / powers
    match rope.kind:
        case "default":
            return plain
        case "linear":
            return plain / np.float32(rope.factor)
        case "llama3":
            return _llama3_frequencies(plain, rope)
        case "yarn":
            return _yarn_frequencies(plain, rope)
        case "longrope":
            scaled: Floats = np.array(rope.dim_factors, np.float32) * powers
            return np.float32(1.0) / scaled
        case "none":
            return np.zeros_like(plain)
        case "proportional":
            plain[rope.rotated_angles :] = 0.0
            return plain / np.float32(rope.factor)
    raise InvariantError(f"no formula for rope kind '{rope.kind}'")


def _llama3_frequencies(plain: Floats, rope: RopeSpec) -> Floats:
    """Divide slow frequencies by the factor, keep fast ones, blend between (Llama 3.1)."""
    # Turns within the old context.
    rotations = np.float32(rope.original_max_position) * plain / np.float32(2 * math.pi)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    keep: Floats = np.clip((rotations - np.float32(low)) / np.float32(high - low), 0.0, 1.0)
    found: Floats = keep * plain + (np.float32(1) - keep) * plain / np.float32(rope.factor)
    return found


def _yarn_frequencies(plain: Floats, rope: RopeSpec) -> Floats:
    """Interpolate by parts: NTK-by-parts of YaRN (Peng et al. 2023, section 3.2)."""
    dim = rope.rotary_dim

    def turns_at(rotations: float) -> float:
        ratio = rope.original_max_position / (rotations * 2 * math.pi)
        return dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = turns_at(rope.beta_fast), turns_at(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = high - low if high != low else 0.001
    places = np.arange(dim // 2, dtype=np.float32)
    ramp: Floats = np.clip((places - np.float32(low)) / np.float32(span), 0.0, 1.0)
    return ramp * plain / np.float32(rope.factor) + (np.float32(1) - ramp) * plain


def project_qkv(
    spec: ModelSpec,
    layer: LayerSpec,
    weights: LayerWeights,
    x: Array,
    angles: Angles,
    ops: OpTable,
) -> tuple[Array, Array | None, Array | None]:
    """Return rotated Q [T, H, D], rotated K and V [T, Hkv, D] of normalised input x [T, C].

    K and V are None for a layer that reads the KV of another one. All are views whose last two
    dimensions may be strided over T; the head dimension is contiguous.
    """
    tokens = x.shape[0]
    qkv = ops.linear(x, weights.qkv, weights.qkv_bias)
    if spec.value_dim is not None:
        qkv = _with_whole_values(qkv, layer, spec.value_dim)
    qkv, heads = qkv.reshape(tokens, -1, layer.head_dim), spec.heads(layer)
    rotated_heads = heads if layer.kv_source is not None else heads + layer.num_kv_heads
    qk = qkv[:, :rotated_heads]  # [T, H + Hkv, D]
    v = qkv[:, heads:rotated_heads] if layer.value_is_key else qkv[:, rotated_heads:]
    if not spec.qk_norm_rotated:
        qk = _qk_norm(spec, heads, weights, qk, ops)
    qk = _rotate(spec, layer, qk, angles, ops)
    if spec.qk_norm_rotated:
        qk = _qk_norm(spec, heads, weights, qk, ops)
    if layer.kv_source is not None:
        return qk, None, None
    if spec.value_norm:
        v = ops.rms_norm(v, None, spec.norm_eps, False)
    return qk[:, :heads], qk[:, heads:], v


def _with_whole_values(qkv: Array, layer: LayerSpec, size: int) -> Array:
    """Return rows of Q, K and V whose heads of V, of ``size``, are as long as those of K.

    Caches have keys and values of one size; what is added is 0.
    """
    heads, wide = layer.num_kv_heads, qkv.shape[1]
    values = qkv[:, wide - heads * size :].reshape(len(qkv), heads, size)
    rest = empty(qkv, (len(qkv), heads, layer.head_dim - size))
    rest[:] = 0.0
    whole = concatenate((values, rest), 2).reshape(len(qkv), heads * layer.head_dim)
    return concatenate((qkv[:, : wide - heads * size], whole), 1)


def without_padding(spec: ModelSpec, attended: Array) -> Array:
    """Return what was attended [T, H, D], of heads of V's own size, scaled as the model does."""
    if spec.value_dim is None:
        return attended
    return times(contiguous(attended[..., : spec.value_dim]), spec.value_scale)


def _rotate(spec: ModelSpec, layer: LayerSpec, qk: Array, angles: Angles, ops: OpTable) -> Array:
    """Rotate the heads of Q and K [T, H + Hkv, D]."""
    if not spec.ropes[layer.rope].query_scales:
        return ops.rope(qk, *angles)
    half = angles[0].shape[1] // 2
    heads = spec.heads(layer)
    q, k = qk[:, :heads], qk[:, heads:]
    rotated = [ops.rope(q, *(contiguous(part[:, half:]) for part in angles))]
    if k.shape[1]:
        rotated.append(ops.rope(k, *(contiguous(part[:, :half]) for part in angles)))
    return concatenate(rotated, 1)


def _qk_norm(spec: ModelSpec, asking: int, weights: LayerWeights, qk: Array, ops: OpTable) -> Array:
    """Normalise the heads of Q and K [T, H + Hkv, D], each or all of Q and all of K together.

    Args:
        asking: heads of Q.
    """
    if weights.qk_norm is None:
        return qk
    if not spec.qk_norm_whole:
        return _norm(spec, qk, weights.qk_norm, ops)
    if ops.ranks.size > 1:
        sums = ops.ranks.sum(ops.whole_norm.sums(qk, asking))  # [T, 2]
        kind = spec.norm_eps, spec.norm_plus_one, ops.ranks.size
        return ops.whole_norm.by_sums(qk, asking, sums, weights.qk_norm, *kind)
    tokens, heads, size = qk.shape
    rows, middle = qk.reshape(tokens, heads * size), asking * size
    parts = [
        _norm(spec, rows[:, part], weights.qk_norm[part], ops)
        for part in (slice(0, middle), slice(middle, None))
    ]
    return concatenate(parts, 1).reshape(tokens, heads, size)


def gated(
    spec: ModelSpec, weights: LayerWeights, attended: Array, residual: Array, ops: OpTable
) -> Array:
    """Return attention's output [T, H, D] times the gate that the layer's input [T, C] opens."""
    if spec.output_gate is None or weights.output_gate is None:
        return attended
    x = pre_norm(spec, residual, weights.input_norm, ops)
    return ops.gate(attended, ops.linear(x, weights.output_gate, None), spec.output_gate.kind)


StateLayer: TypeAlias = DeltaLayer | ConvLayer | Mamba2Layer


def bind_state(
    spec: ModelSpec, layer: LayerSpec, weights: LayerWeights, ops: OpTable
) -> StateLayer | None:
    """Bind what takes attention's place in a recurrent layer; None for one that attends.

    Raises:
        KernelUnavailable: the kernels of the device do not compute it.
    """
    if layer.state is None:
        return None
    bind = getattr(ops, layer.state.kind)
    if bind is None:
        raise KernelUnavailable(
            "these kernels do not compute recurrent layers; set device='cpu', or "
            "kernels='reference' (slow)"
        )
    found: StateLayer = bind(_state_parts(spec, layer.state, weights))
    return found


def _state_parts(
    spec: ModelSpec, state: StateSpec, weights: LayerWeights
) -> DeltaParts | ConvParts | Mamba2Parts:
    shape, bias = state.shape, weights.state_conv_bias
    assert weights.state_conv is not None
    conv = weights.state_conv.reshape(shape.channels, -1)
    if isinstance(shape, ConvShape):
        return ConvParts(shape, conv, bias)
    by_channel = isinstance(shape, DeltaShape) and shape.by_channel
    decay = weights.forget_rate if by_channel else weights.state_decay
    steps = weights.forget_bias if by_channel else weights.state_bias
    norm, eps = weights.state_norm, spec.norm_eps
    assert decay is not None
    assert steps is not None
    assert norm is not None
    if isinstance(shape, DeltaShape):
        gating = "sigmoid" if by_channel else "silu"
        return DeltaParts(shape, conv, decay.reshape(-1), steps, norm, eps, gating, state.floor)
    skip, limits = weights.state_skip, state.time_limits
    assert skip is not None
    return Mamba2Parts(shape, conv, bias, decay, steps, skip, norm, eps, limits)


def project_state(
    spec: ModelSpec, state: StateSpec, weights: LayerWeights, residual: Array, ops: OpTable
) -> tuple[Array, Array | None]:
    """Return what a recurrent layer mixes, and the gates of its state, None where it has none.

    Both are [T, N], as the layers of ``bind_state`` take them, of the layer's input [T, C].
    """
    x = pre_norm(spec, residual, weights.input_norm, ops)
    mixed = ops.linear(x, weights.qkv, weights.qkv_bias)
    if weights.state_gates is None:
        return mixed, None
    gates, shape, rank = ops.linear(x, weights.state_gates, None), state.shape, state.gate_rank
    if not isinstance(shape, DeltaShape) or not shape.by_channel:
        return mixed, gates
    heads = shape.value_heads
    if rank is None:
        wide = shape.channels + shape.values
        return mixed[:, :wide], concatenate((gates, mixed[:, wide:]), 1)
    assert weights.state_gate_up is not None
    assert weights.forget_up is not None
    opening = ops.linear(contiguous(gates[:, heads : heads + rank]), weights.state_gate_up, None)
    forgetting = ops.linear(contiguous(gates[:, heads + rank :]), weights.forget_up, None)
    return concatenate((mixed, opening), 1), concatenate((gates[:, :heads], forgetting), 1)


def feed_forward(
    spec: ModelSpec, layer: LayerSpec, weights: LayerWeights, hidden: Array, ops: OpTable
) -> Array:
    """Return what the MLP or the experts add to ``hidden`` [T, C], before any post norm.

    Where ranks split the sums ``ByRows``, both are a rank's rows.
    """
    x = ops.ranks.enter(pre_norm(spec, hidden, weights.mlp_norm, ops))
    if not layer.moe:
        return ops.ranks.sum(_mlp(spec, layer, weights, x, ops))
    assert spec.moe is not None
    if not spec.moe.beside_mlp:
        end_experts, gate = begin_experts(spec, layer, weights, x, x, ops)
        if not spec.moe.shared:
            return ops.ranks.sum(end_experts())
        shared = _mlp(spec, layer, weights, x, ops)  # the host computes routed experts meanwhile
        if gate is not None:
            shared = times_rows(shared, gate)
        return ops.ranks.sum(end_experts() + shared)
    routed = ops.rms_norm(hidden, weights.router_scale, spec.norm_eps, False)
    routed = ops.ranks.enter(times(routed, spec.hidden_size**-0.5))
    inputs = ops.ranks.enter(_norm(spec, hidden, weights.expert_norm, ops))
    end_experts, _ = begin_experts(
        spec, layer, weights, routed, inputs, ops
    )  # the host computes meanwhile
    y = ops.ranks.sum(_mlp(spec, layer, weights, x, ops))
    dense = _norm(spec, y, weights.dense_post_norm, ops)
    sparse = _norm(spec, ops.ranks.sum(end_experts()), weights.expert_post_norm, ops)
    return dense + sparse


def add_per_layer_input(
    spec: ModelSpec, weights: LayerWeights, hidden: Array, inputs: Array, ops: OpTable
) -> Array:
    """Add the gated per-layer token embedding ``inputs`` [T, P] to ``hidden`` [T, C] (Gemma 4)."""
    assert weights.input_gate is not None
    assert weights.input_projection is not None
    gate = ops.linear(hidden, weights.input_gate, None)  # [T, P]
    gated = ops.act_mul(concatenate((gate, inputs), -1), spec.activation)  # [T, P]
    y = ops.linear(gated, weights.input_projection, None)  # [T, C]
    return hidden + _norm(spec, y, weights.post_input_norm, ops)


def pre_norm(spec: ModelSpec, x: Array, weight: Array | None, ops: OpTable) -> Array:
    """Return the norm of ``x`` [T, C] before attention or the MLP, where the layer has one."""
    return _norm(spec, x, weight, ops) if weight is not None else x


def biased_norm(
    spec: ModelSpec, x: Array, weight: Array | None, bias: Array | None, ops: OpTable
) -> Array:
    """Return the norm of ``x`` [T, C] with its bias, if it has one."""
    found = _norm(spec, x, weight, ops)
    return found if bias is None else found + bias


def _norm(spec: ModelSpec, x: Array, weight: Array | None, ops: OpTable) -> Array:
    return ops.rms_norm(x, weight, spec.norm_eps, spec.norm_plus_one, spec.norm_centred)


def _mlp(spec: ModelSpec, layer: LayerSpec, weights: LayerWeights, x: Array, ops: OpTable) -> Array:
    first = weights.gate_up if weights.up is None else weights.up
    assert first is not None
    assert weights.down is not None
    gate_up = ops.linear(x, first, weights.gate_up_bias)  # [T, 2 I], or without a gate [T, I]
    x = ops.act_mul(gate_up, spec.mlp_activation(layer), weights.activation)  # [T, I]
    return ops.linear(x, weights.down, weights.down_bias)


def begin_experts(
    spec: ModelSpec,
    layer: LayerSpec,
    weights: LayerWeights,
    routed: Array,
    x: Array,
    ops: OpTable,
) -> tuple[Callable[[], Array], Array | None]:
    """Route by ``routed`` [T, C], compute on ``x`` [T, C]. Experts on the host compute on.

    Returns:
        what gives the sum [T, C], of which a rank has its part; and what multiplies the shared
        experts [T, 1] float32, None for nothing.
    """
    moe = spec.moe
    assert moe is not None
    assert weights.router is not None
    gate_up = weights.expert_gate_up if weights.expert_up is None else weights.expert_up
    assert gate_up is not None
    assert weights.expert_down is not None
    routing, bias = moe.routing, weights.correction_bias
    if bias is not None and weights.router_bias is None:
        scores = ops.logits(routed, weights.router)  # [T, E] float32
    else:
        scores = ops.linear(routed, weights.router, weights.router_bias)  # [T, E]
    gate = None
    if moe.shared_gate:  # as of one more expert, which every token goes to
        gate, _ = ops.route(scores[:, moe.num_experts :], Routing(1, scoring="sigmoid"))  # [T, 1]
    shares, experts = ops.route(scores[:, : moe.num_experts], routing, bias)  # [T, K] each
    if weights.expert_scale is not None:
        shares = shares * weights.expert_scale[experts]
    down = weights.expert_down
    if isinstance(down, HostedExperts):
        down.send(x, shares, experts)
        return lambda: down.receive(x), gate
    biases = weights.expert_gate_up_bias, weights.expert_down_bias
    activation = spec.expert_activation(layer)
    y = ops.moe(x, shares, experts, gate_up, down, activation, *biases)
    return lambda: y, gate
