"""The gated delta rule on the CPU: a thin wrapper around the native module ``_native``."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weft.kernels.arrays import Array, address, dense_rows, dtype_name, empty, to_numpy, view
from weft.kernels.cpu import _native
from weft.kernels.delta import DeltaParts, DeltaShape, LayerStates, StateBatch

SLAB, MOST_KEYS, MOST_TAPS = 16, 256, 16  # the constants of delta.hpp
NO_SLOT = -1


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
    """

    def __init__(self, parts: DeltaParts) -> None:
        """Bind the parameters.

        Raises:
            ValueError: the kernel does not compute such shapes.
        """
        if why := refusal(parts.shape):
            raise ValueError(f"no kernel for {why}")
        self._shape, self._eps = parts.shape, parts.norm_eps
        decay = -np.exp(_floats(parts.decay))
        conv = np.ascontiguousarray(_floats(parts.conv).T)  # [K, channels]
        self._weights = (conv, decay, _floats(parts.bias), _floats(parts.norm))
        self._sigmoid, self._floor = parts.gating == "sigmoid", parts.floor or 0.0

    def __call__(self, x: Array, gates: Array, states: LayerStates, batch: StateBatch) -> Array:
        """Return [T, Hv, Dv], and write the states of all rows.

        Raises:
            ValueError: shapes, dtypes or slots do not fit; nothing has been written then.
        """
        shape, tokens = self._shape, len(x)
        name = dtype_name(x.dtype)
        wide = (tokens, shape.channels + shape.values)
        if tuple(x.shape) != wide or name not in ("float32", "bfloat16"):
            raise ValueError(f"x {list(x.shape)} of {name}: expected {list(wide)}")
        of_states = (tokens, shape.value_heads + shape.decays)
        if tuple(gates.shape) != of_states or gates.dtype != x.dtype:
            raise ValueError(f"gates {list(gates.shape)} of {gates.dtype} do not fit {list(wide)}")
        x, gates = dense_rows(x), dense_rows(gates)
        given = (batch.bounds, batch.reads, batch.writes, batch.marks)
        bounds, reads, writes, marks = (_ints(part) for part in given)
        self._check(states, tokens, bounds, reads, writes, marks)
        out = empty(x, (tokens, shape.value_heads, shape.value_dim))
        sizes = (
            shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim, shape.taps,
            shape.by_channel,
        )  # fmt: skip
        _native.advance_delta(
            sizes, tuple(address(weight) for weight in self._weights), self._eps,
            self._sigmoid, self._floor,
            address(states.matrices), address(states.inputs), bounds, reads, writes, marks,
            view("x", x), view("gates", gates), address(out),
        )  # fmt: skip
        return out

    def _check(
        self,
        states: LayerStates,
        tokens: int,
        bounds: NDArray[np.int32],
        reads: NDArray[np.int32],
        writes: NDArray[np.int32],
        marks: NDArray[np.int32],
    ) -> None:
        shape, slots, rows = self._shape, len(states.matrices), len(reads)
        wanted = ((slots, *shape.matrix), (slots, *shape.kept_inputs))
        if tuple(tuple(part.shape) for part in states) != wanted or any(
            dtype_name(part.dtype) != "float32" for part in states
        ):
            raise ValueError(f"states of {[list(p.shape) for p in states]}: expected {wanted}")
        counts = np.diff(bounds)
        if bounds.shape != (rows + 1,) or writes.shape != (rows,) or marks.shape[1:] != (2,):
            raise ValueError(f"{rows} rows, but {len(bounds)} bounds and {len(writes)} writes")
        if bounds[0] != 0 or bounds[-1] != tokens or (counts < 0).any():
            raise ValueError(f"bounds {bounds.tolist()} do not cover {tokens} tokens")
        written = np.concatenate((writes, marks[:, 1]))
        if ((reads < NO_SLOT) | (reads >= slots)).any() or (
            (written < 0) | (written >= slots)
        ).any():
            raise ValueError(f"a row reads or writes a slot beyond the {slots} that there are")
        if len(np.unique(written)) < len(written) or np.isin(reads, written).any():
            raise ValueError("a slot is written twice, or written and read")
        places = marks[:, 0]
        if ((places < 0) | (places >= tokens)).any() or (np.diff(places) <= 0).any():
            raise ValueError(f"marks {marks.tolist()} are not in the order of {tokens} tokens")


def _floats(x: Array) -> NDArray[np.float32]:
    return np.ascontiguousarray(to_numpy(x).astype(np.float32))


def _ints(x: Array) -> NDArray[np.int32]:
    return np.ascontiguousarray(to_numpy(x), np.int32)
