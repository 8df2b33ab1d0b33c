"""Mamba-2 on the CPU: a thin wrapper around the native module ``_native``."""

from __future__ import annotations

import numpy as np

from weft.kernels.arrays import Array, address, dense_rows, dtype_name, empty, view
from weft.kernels.cpu import _native
from weft.kernels.cpu.delta import MOST_KEYS, MOST_TAPS, SLAB
from weft.kernels.cpu.slots import as_floats, checked_slots
from weft.kernels.delta import LayerStates, StateBatch
from weft.kernels.mamba2 import Mamba2Parts, Mamba2Shape


def refusal(shape: Mamba2Shape) -> str:
    """Why the native kernel does not compute layers of a shape; empty if it does."""
    if shape.head_dim % SLAB or shape.state_dim % SLAB or shape.state_dim > MOST_KEYS:
        return (
            f"heads of {shape.head_dim} and states of {shape.state_dim}: both must be multiples "
            f"of {SLAB}, the second at most {MOST_KEYS}"
        )
    if not 2 <= shape.taps <= MOST_TAPS:
        return f"convolutions over {shape.taps} inputs: 2 to {MOST_TAPS} are"
    return ""


class CpuMamba2:
    """A layer by Mamba-2; see ``reference_mamba2.ReferenceMamba2``.

    Matrices lie in slabs of 16 columns, [H][P / 16][N][16], each of which one thread takes through
    all tokens of a row.

    Attributes:
        shape: the layer's sizes.
        native: for a stack.
    """

    def __init__(self, parts: Mamba2Parts) -> None:
        """Bind the parameters.

        Raises:
            ValueError: the kernel does not compute such shapes.
        """
        if why := refusal(parts.shape):
            raise ValueError(f"no kernel for {why}")
        self.shape = shape = parts.shape
        conv = np.ascontiguousarray(as_floats(parts.conv).T)  # [K, channels]
        bias = np.zeros(parts.shape.channels, np.float32)
        self._weights = (
            conv,
            bias if parts.conv_bias is None else as_floats(parts.conv_bias),
            -np.exp(as_floats(parts.decay)),
            as_floats(parts.bias),
            as_floats(parts.skip),
            as_floats(parts.norm),
        )
        self.native = _native.Mamba2(
            (shape.heads, shape.head_dim, shape.groups, shape.state_dim, shape.taps),
            tuple(address(weight) for weight in self._weights),
            (parts.norm_eps, *parts.time_limits),
        )

    def __call__(self, x: Array, gates: Array, states: LayerStates, batch: StateBatch) -> Array:
        """Return [T, H, P], and write the states of all rows.

        Raises:
            ValueError: shapes, dtypes or slots do not fit; nothing has been written then.
        """
        shape, tokens = self.shape, len(x)
        name, wide = dtype_name(x.dtype), (tokens, shape.channels + shape.values)
        if tuple(x.shape) != wide or name not in ("float32", "bfloat16"):
            raise ValueError(f"x {list(x.shape)} of {name}: expected {list(wide)}")
        if tuple(gates.shape) != (tokens, shape.heads) or gates.dtype != x.dtype:
            raise ValueError(f"gates {list(gates.shape)} of {gates.dtype} do not fit {list(wide)}")
        x, gates = dense_rows(x), dense_rows(gates)
        slots = checked_slots(shape, states, batch, tokens)
        out = empty(x, (tokens, shape.heads, shape.head_dim))
        self.native.advance(
            address(states.matrices), address(states.inputs), *slots,
            view("x", x), view("gates", gates), address(out),
        )  # fmt: skip
        return out
