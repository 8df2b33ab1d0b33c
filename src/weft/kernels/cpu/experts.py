"""Mixtures of experts on the CPU: routing, and the products of experts with their tokens."""

from __future__ import annotations

from collections.abc import Sequence

from weft.kernels.arrays import Array, address, contiguous, dense_rows, dtype_name, empty, view
from weft.kernels.cpu import _native
from weft.kernels.cpu.matrix import CpuMatrix
from weft.kernels.cpu.rows import ACTIVATIONS


def route(scores: Array, top_k: int, normalise: bool) -> tuple[Array, Array]:
    """Return shares [T, K] float32 and ids [T, K] int64 of experts; see ``reference.route``.

    Of equal shares the first expert's is taken. If a score of a token is NaN or inf, its shares are
    NaN.

    Raises:
        ValueError: there are fewer experts, or the scores [T, E] have another shape or type.
    """
    if scores.ndim != 2 or not 0 < top_k <= scores.shape[1]:
        raise ValueError(f"{top_k} experts cannot be chosen by scores {list(scores.shape)}")
    if dtype_name(scores.dtype) not in ("float32", "bfloat16"):
        raise ValueError(f"scores {list(scores.shape)} of {scores.dtype}: no kernel")
    scores, shape = dense_rows(scores), (scores.shape[0], top_k)
    shares, ids = empty(scores, shape, "float32"), empty(scores, shape, "int64")
    _native.route(view("scores", scores), top_k, normalise, address(ids), address(shares))
    return shares, ids


def moe(
    x: Array,
    weights: Array,
    experts: Array,
    gate_up: Sequence[CpuMatrix],
    down: Sequence[CpuMatrix],
    activation: str,
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
    bound = bind_experts(gate_up, down, activation)
    _native.moe(bound, view("x", x), address(experts), address(weights), top_k, address(out))
    return out


def bind_experts(
    gate_up: Sequence[CpuMatrix], down: Sequence[CpuMatrix], activation: str
) -> _native.Experts:
    """Return experts for native calls, which do not keep the matrices alive.

    Args:
        gate_up: E gated matrices [2 J, C].
        down: E matrices [C, J].

    Raises:
        ValueError: shapes or dtypes do not fit, or there is no such activation.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation '{activation}'; known: {', '.join(ACTIVATIONS)}")
    if not down or len(gate_up) != len(down):
        raise ValueError(f"{len(gate_up)} first and {len(down)} second matrices of experts")
    experts = _native.Experts()
    experts.activation = ACTIVATIONS[activation]
    hidden, size = down[0].shape
    for number, (first, second) in enumerate(zip(gate_up, down, strict=True)):
        fits = tuple(first.shape) == (2 * size, hidden) and tuple(second.shape) == (hidden, size)
        if not fits or not first.gated or not first.dtype == second.dtype == down[0].dtype:
            raise ValueError(
                f"expert {number} has {list(first.shape)} and {list(second.shape)}: expected gated "
                f"{[2 * size, hidden]} and {[hidden, size]} of {down[0].dtype}"
            )
        experts.add(first.native, second.native)
    return experts
