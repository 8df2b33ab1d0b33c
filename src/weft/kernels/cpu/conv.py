"""Gated short convolutions on the CPU: a thin wrapper around the native module ``_native``."""

from __future__ import annotations

import numpy as np

from weft.kernels.arrays import Array, address, dense_rows, dtype_name, empty, view
from weft.kernels.conv import ConvParts, ConvShape
from weft.kernels.cpu import _native
from weft.kernels.cpu.delta import MOST_TAPS, SLAB
from weft.kernels.cpu.slots import as_floats, checked_slots
from weft.kernels.delta import LayerStates, StateBatch


def refusal(shape: ConvShape) -> str:
    """Why the native kernel does not compute layers of a shape; empty if it does."""
    if shape.channels % SLAB:
        return f"{shape.channels} channels: multiples of {SLAB} are"
    if not 2 <= shape.taps <= MOST_TAPS:
        return f"convolutions over {shape.taps} inputs: 2 to {MOST_TAPS} are"
    return ""


class CpuConv:
    """A layer of a gated short convolution; see ``reference_conv.ReferenceConv``.

    Attributes:
        shape: the layer's sizes.
        native: for a stack.
    """

    def __init__(self, parts: ConvParts) -> None:
        """Bind the parameters.

        Raises:
            ValueError: the kernel does not compute such shapes.
        """
        if why := refusal(parts.shape):
            raise ValueError(f"no kernel for {why}")
        self.shape = parts.shape
        conv = np.ascontiguousarray(as_floats(parts.conv).T)  # [K, C]
        bias = np.zeros(parts.shape.channels, np.float32)
        self._weights = (conv, bias if parts.bias is None else as_floats(parts.bias))
        self.native = _native.Conv(
            (parts.shape.channels, parts.shape.taps),
            tuple(address(weight) for weight in self._weights),
        )

    def __call__(self, x: Array, _gates: None, states: LayerStates, batch: StateBatch) -> Array:
        """Return [T, C], and write the states of all rows.

        Raises:
            ValueError: shapes, dtypes or slots do not fit; nothing has been written then.
        """
        shape, tokens = self.shape, len(x)
        name, wide = dtype_name(x.dtype), (tokens, 3 * shape.channels)
        if tuple(x.shape) != wide or name not in ("float32", "bfloat16"):
            raise ValueError(f"x {list(x.shape)} of {name}: expected {list(wide)}")
        x = dense_rows(x)
        slots = checked_slots(shape, states, batch, tokens)
        out = empty(x, (tokens, shape.channels))
        self.native.advance(
            address(states.matrices), address(states.inputs), *slots,
            view("x", x), view("gates", x[:, :0]), address(out),
        )  # fmt: skip
        return out
