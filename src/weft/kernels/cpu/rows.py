"""Ops that go row by row, on the CPU: norm, rotary embedding, gated activation, softcap."""

from __future__ import annotations

from weft.kernels.arrays import (
    Array,
    address,
    contiguous,
    dense_rows,
    dtype_name,
    empty,
    strides,
    view,
)
from weft.kernels.cpu import _native
from weft.kernels.parts import UNGATED, limit_of

ACTIVATIONS = {
    "silu": 0,
    "gelu_tanh": 1,
    "swiglu_oai": 2,
    "relu2": 3,
    "xielu": 4,
    "gelu": 6,
    "geglu": 6,
}  # the numbers of `Activation` in panel.hpp
_LIMITED = 5
GATINGS = {"sigmoid": 0, "softplus": 1}  # those of `Gating`


def angles(positions: Array, frequencies: Array, scale: float) -> tuple[Array, Array]:
    """Return cos and sin [T, R] float32 of positions [T] int64; see ``reference.angles``."""
    positions = contiguous(positions)
    shape = (len(positions), len(frequencies))
    cos, sin = empty(positions, shape, "float32"), empty(positions, shape, "float32")
    _native.angles(
        address(positions), *shape[:1], address(frequencies), shape[1], scale,
        address(cos), address(sin),
    )  # fmt: skip
    return cos, sin


def rms_norm(
    x: Array, weight: Array | None, eps: float, plus_one: bool, centred: bool = False
) -> Array:
    """Root mean square norm of x [T, D] or [T, H, D]; see ``reference.rms_norm``.

    Args:
        weight: [D], or one for each head [H, D].

    Raises:
        ValueError: shapes do not fit.
    """
    if weight is not None and weight.shape not in (x.shape[-1:], x.shape[1:]):
        raise ValueError(f"weight {list(weight.shape)} does not fit {list(x.shape)}")
    x = dense_rows(x)
    out = empty(x, x.shape)
    heads = x if x.ndim == 3 else x[:, None]
    weights = None if weight is None else view("weight", contiguous(weight).reshape(-1))
    _native.normalise(view("x", heads), weights, plus_one, eps, centred, address(out))
    return out


def square_sums(x: Array, first: int) -> Array:
    """Sums [T, 2] float32 of squares of heads x [T, H, D]; see ``reference.square_sums``.

    Raises:
        ValueError: there are fewer heads.
    """
    x = _whole_rows(x, first)
    sums = empty(x, (len(x), 2), "float32")
    _native.square_sums(view("x", x), first, address(sums))
    return sums


def norm_by_sums(
    x: Array, first: int, sums: Array, weight: Array, eps: float, plus_one: bool, ranks: int
) -> Array:
    """Norms over several heads of x [T, H, D]; see ``reference.norm_by_sums``.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    x, sums = _whole_rows(x, first), contiguous(sums)
    fits = tuple(weight.shape) == (x.shape[1] * x.shape[2],) and tuple(sums.shape) == (len(x), 2)
    if not fits or dtype_name(sums.dtype) != "float32":
        raise ValueError(
            f"weight {list(weight.shape)} and sums {list(sums.shape)} of {sums.dtype} do not fit "
            f"{list(x.shape)}"
        )
    out = empty(x, x.shape)
    weights = view("weight", contiguous(weight))
    _native.normalise_by(
        view("x", x), first, address(sums), weights, plus_one, eps, ranks, address(out)
    )
    return out


def _whole_rows(x: Array, first: int) -> Array:
    """Heads [T, H, D] of which those of a token lie one behind the other."""
    if x.ndim != 3 or not 0 <= first <= x.shape[1]:
        raise ValueError(f"the first {first} heads of {list(x.shape)} cannot be normalised")
    dense = strides(x)[1:] == (x.shape[2], 1)
    return x if dense else contiguous(x)


def rope(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate the heads of x [T, H, D]; see ``reference.rope``.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    shape = (x.shape[0], cos.shape[-1])
    fits = cos.shape == sin.shape == shape and x.ndim == 3 and 2 * shape[1] <= x.shape[2]
    if not fits or not dtype_name(cos.dtype) == dtype_name(sin.dtype) == "float32":
        raise ValueError(f"angles {list(cos.shape)} of {cos.dtype} do not fit {list(x.shape)}")
    x, cos, sin = dense_rows(x), contiguous(cos), contiguous(sin)
    out = empty(x, x.shape)
    _native.rotate(view("x", x), address(cos), address(sin), shape[1], address(out))
    return out


def native_activation(activation: str) -> tuple[int, float]:
    """Return the number of an activation, and its limit, 0 where it has none.

    Raises:
        ValueError: there is no such activation.
    """
    if (limit := limit_of(activation)) is not None:
        return _LIMITED, limit
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation '{activation}'; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[activation], 0.0


def act_mul(gate_up: Array, activation: str, numbers: Array | None = None) -> Array:
    """Return activation(gate) * up for ``gate_up`` [T, 2I], gate first -> [T, I].

    Of ``UNGATED`` it is that of an MLP without a gate, [T, I]; see ``reference.act_mul``.

    Raises:
        ValueError: the shape does not fit, or there is no such activation.
    """
    gated, (kind, limit) = activation not in UNGATED, native_activation(activation)
    if gate_up.ndim != 2 or (gated and gate_up.shape[1] % 2):
        raise ValueError(f"cannot apply '{activation}' to {list(gate_up.shape)}")
    gate_up = dense_rows(gate_up)
    if not gated:
        wanted = 0 if activation != "xielu" else 4
        if wanted != (0 if numbers is None else len(numbers)):
            raise ValueError(f"'{activation}' takes {wanted} numbers")
        out = empty(gate_up, gate_up.shape)
        given = 0 if numbers is None else address(numbers)
        _native.activate(view("x", gate_up), kind, given, address(out))
        return out
    out = empty(gate_up, (gate_up.shape[0], gate_up.shape[1] // 2))
    _native.act_mul(view("gate_up", gate_up), kind, limit, address(out))
    return out


def gate(x: Array, gates: Array, kind: str) -> Array:
    """Return heads x [T, H, D] times ``kind`` of their gates; see ``reference.gate``.

    Raises:
        ValueError: shapes or dtypes do not fit, or there is no such kind.
    """
    tokens, heads, size = x.shape
    fits = gates.shape in ((tokens, heads), (tokens, heads * size)) and gates.dtype == x.dtype
    if not fits or kind not in GATINGS:
        raise ValueError(
            f"no {kind} gate of {list(gates.shape)} in {gates.dtype} for {list(x.shape)} in "
            f"{x.dtype}; known: {', '.join(GATINGS)}"
        )
    x, gates = contiguous(x), dense_rows(gates)
    out = empty(x, x.shape)
    _native.gate(view("x", x), view("gates", gates), GATINGS[kind], address(out))
    return out


def softcap(logits: Array, cap: float) -> Array:
    """Return cap * tanh(logits / cap) of float32 logits [S, V]; contiguous ones are overwritten.

    Raises:
        ValueError: they are of another type, or the cap is not positive.
    """
    if dtype_name(logits.dtype) != "float32" or not cap > 0:
        raise ValueError(f"cannot cap {list(logits.shape)} of {logits.dtype} at {cap}")
    logits = contiguous(logits)
    rows, columns = logits.shape
    _native.softcap(address(logits), rows * columns, cap)
    return logits
