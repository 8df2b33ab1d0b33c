"""The gated delta rule on the CPU: a thin wrapper around the native module ``_native``."""

from __future__ import annotations

import numpy as np

from weft.kernels.arrays import Array, address, dense_rows, dtype_name, empty, view
from weft.kernels.cpu import _native
from weft.kernels.cpu.slots import as_floats, checked_slots
from weft.kernels.delta import DeltaParts, DeltaShape, LayerStates, StateBatch

SLAB, MOST_KEYS, MOST_TAPS = 16, 256, 16  # the constants of delta.hpp


def refusal(shape: DeltaShape) -> str:
    """Why the native kernel does not compute layers of a shape; empty if it does."""
    if shape.key_dim % SLAB or shape.value_dim % SLAB or shape.key_dim > MOST_KEYS:
        return (
            f"heads of {shape.key_dim} and {shape.value_dim}: both must be multiples of {SLAB}, "
            f"the first at most {MOST_KEYS}"
        )
    if not 2 <= shape.taps <= MOST_TAPS:
        return f"convolutions over {shape.taps} inputs: 2 to {MOST_TAPS} are"
    return ""


class CpuDelta:
    """A layer by the gated delta rule; see ``reference_delta.ReferenceDelta``.

    Matrices lie in slabs of 16 columns, [Hv][Dv / 16][Dk][16], each of which one thread takes
    through all tokens of a row.

    Attributes:
        shape: the layer's sizes.
        native: for a stack.
    """

    def __init__(self, parts: DeltaParts) -> None:
        """Bind the parameters.

        Raises:
            ValueError: the kernel does not compute such shapes.
        """
        if why := refusal(parts.shape):
            raise ValueError(f"no kernel for {why}")
        self.shape = shape = parts.shape
        decay = -np.exp(as_floats(parts.decay))
        conv = np.ascontiguousarray(as_floats(parts.conv).T)  # [K, channels]
        self._weights = (conv, decay, as_floats(parts.bias), as_floats(parts.norm))
        sizes = (
            shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim, shape.taps,
            shape.by_channel, shape.tiled,
        )  # fmt: skip
        self.native = _native.Delta(
            sizes, tuple(address(weight) for weight in self._weights), parts.norm_eps,
            parts.gating == "sigmoid", parts.floor or 0.0,
        )  # fmt: skip

    def __call__(self, x: Array, gates: Array, states: LayerStates, batch: StateBatch) -> Array:
        """Return [T, Hv, Dv], and write the states of all rows.

        Raises:
            ValueError: shapes, dtypes or slots do not fit; nothing has been written then.
        """
        shape, tokens = self.shape, len(x)
        name = dtype_name(x.dtype)
        wide = (tokens, shape.channels + shape.values)
        if tuple(x.shape) != wide or name not in ("float32", "bfloat16"):
            raise ValueError(f"x {list(x.shape)} of {name}: expected {list(wide)}")
        of_states = (tokens, shape.value_heads + shape.decays)
        if tuple(gates.shape) != of_states or gates.dtype != x.dtype:
            raise ValueError(f"gates {list(gates.shape)} of {gates.dtype} do not fit {list(wide)}")
        x, gates = dense_rows(x), dense_rows(gates)
        slots = checked_slots(shape, states, batch, tokens)
        out = empty(x, (tokens, shape.value_heads, shape.value_dim))
        self.native.advance(
            address(states.matrices), address(states.inputs), *slots,
            view("x", x), view("gates", gates), address(out),
        )  # fmt: skip
        return out
