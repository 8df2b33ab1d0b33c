"""Mixtures of experts on the CPU: routing, and the products of experts with their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.kernels.arrays import (
    Array,
    address,
    contiguous,
    dense_rows,
    dtype_name,
    empty,
    to_numpy,
    view,
)
from weft.kernels.cpu import _native
from weft.kernels.cpu.matrix import CpuMatrix
from weft.kernels.cpu.rows import native_activation
from weft.kernels.parts import UNGATED
from weft.kernels.routing import Routing


def route(scores: Array, routing: Routing, bias: Array | None = None) -> tuple[Array, Array]:
    """Return shares [T, K] float32 and ids [T, K] int64 of experts; see ``reference.route``.

    Of equal ones the first expert is taken. If a score of a token is NaN, its shares are NaN; those
    of a softmax also if one is inf.

    Raises:
        ValueError: there are fewer experts, or scores [T, E] or bias have another shape or type.
    """
    if scores.ndim != 2:
        raise ValueError(f"experts cannot be chosen by scores {list(scores.shape)}")
    if dtype_name(scores.dtype) not in ("float32", "bfloat16"):
        raise ValueError(f"scores {list(scores.shape)} of {scores.dtype}: no kernel")
    numbers = None if bias is None else correction(bias, scores.shape[1])
    native = native_routing(routing, scores.shape[1], numbers)
    scores, shape = dense_rows(scores), (scores.shape[0], routing.top_k)
    shares, ids = empty(scores, shape, "float32"), empty(scores, shape, "int64")
    _native.route(view("scores", scores), native, address(ids), address(shares))
    return shares, ids


def correction(bias: Array, experts: int) -> NDArray[Any]:
    """Return a correction bias [E] for native calls.

    Raises:
        ValueError: it has another shape or type.
    """
    if tuple(bias.shape) != (experts,) or dtype_name(bias.dtype) != "float32":
        raise ValueError(
            f"correction_bias {list(bias.shape)} of {bias.dtype}: expected [{experts}] of float32"
        )
    return np.ascontiguousarray(to_numpy(bias))


def native_routing(routing: Routing, experts: int, bias: NDArray[Any] | None) -> _native.Routing:
    """Return a routing for native calls, which do not keep the bias alive.

    Raises:
        ValueError: so many experts cannot be chosen from like this.
    """
    routing.check(experts)
    native = _native.Routing()
    native.top_k, native.normalise = routing.top_k, routing.normalise
    native.sigmoid = routing.scoring == "sigmoid"
    native.groups, native.top_groups = routing.n_group, routing.topk_group
    native.group_best, native.scale = routing.group_best, routing.routed_scaling_factor
    native.bias = 0 if bias is None else address(bias)
    return native


def moe(
    x: Array,
    weights: Array,
    experts: Array,
    gate_up: Sequence[CpuMatrix],
    down: Sequence[CpuMatrix],
    activation: str,
    gate_up_bias: Array | None = None,
    down_bias: Array | None = None,
) -> Array:
    """Return the weighted sum of each token's experts [T, D]; see ``reference.moe``.

    Raises:
        ValueError: shapes or dtypes do not fit.
        IndexError: there is no such expert.
    """
    tokens, top_k = experts.shape
    hidden, dtype = down[0].shape[0], down[0].dtype
    if (
        x.shape != (tokens, hidden)
        or dtype_name(x.dtype) != dtype
        or weights.shape != experts.shape
    ):
        raise ValueError(
            f"x {list(x.shape)} of {x.dtype}, shares {list(weights.shape)} and experts "
            f"{list(experts.shape)} do not fit experts of {hidden} in {dtype}"
        )
    if dtype_name(weights.dtype) != "float32" or dtype_name(experts.dtype) != "int64":
        raise ValueError(f"shares of {weights.dtype} and ids of {experts.dtype}")
    x, weights, experts = dense_rows(x), contiguous(weights), contiguous(experts)
    out = empty(x, x.shape)
    kept = [None if bias is None else contiguous(bias) for bias in (gate_up_bias, down_bias)]
    bound = bind_experts(gate_up, down, activation, *kept)
    _native.moe(bound, view("x", x), address(experts), address(weights), top_k, address(out))
    return out


def bind_experts(
    gate_up: Sequence[CpuMatrix],
    down: Sequence[CpuMatrix],
    activation: str,
    gate_up_bias: Array | None = None,
    down_bias: Array | None = None,
) -> _native.Experts:
    """Return experts for native calls, which do not keep matrices and biases alive.

    Args:
        gate_up: E gated matrices [2 J, C], or of activations in ``UNGATED`` plain ones [J, C].
        down: E matrices [C, J].
        gate_up_bias, down_bias: [E, 2 J] and [E, C], contiguous, of the type of activations.

    Raises:
        ValueError: shapes or dtypes do not fit, or there is no such activation.
    """
    if activation in ("xielu", "gelu"):
        raise ValueError(f"no kernel for experts with {activation}")
    if not down or len(gate_up) != len(down):
        raise ValueError(f"{len(gate_up)} first and {len(down)} second matrices of experts")
    experts = _native.Experts()
    experts.activation, experts.limit = native_activation(activation)
    hidden, size = down[0].shape
    gated = activation not in UNGATED
    wide = 2 * size if gated else size
    for number, (first, second) in enumerate(zip(gate_up, down, strict=True)):
        fits = tuple(first.shape) == (wide, hidden) and tuple(second.shape) == (hidden, size)
        if not fits or first.gated != gated or not first.dtype == second.dtype == down[0].dtype:
            raise ValueError(
                f"expert {number} has {list(first.shape)} and {list(second.shape)}: expected "
                f"{'gated ' * gated}{[wide, hidden]} and {[hidden, size]} of {down[0].dtype}"
            )
        experts.add(first.native, second.native)
    for name, bias, width in (
        ("gate_up_bias", gate_up_bias, wide),
        ("down_bias", down_bias, hidden),
    ):
        if bias is None:
            continue
        if tuple(bias.shape) != (len(down), width) or dtype_name(bias.dtype) != down[0].dtype:
            raise ValueError(
                f"{name} {list(bias.shape)} of {bias.dtype}: expected {[len(down), width]} of "
                f"{down[0].dtype}"
            )
        setattr(experts, name, address(bias))
    return experts
