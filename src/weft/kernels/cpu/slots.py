"""Checks of the slots that layers of recurrent state read and write."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from weft.kernels.arrays import Array, dtype_name, to_numpy
from weft.kernels.delta import LayerStates, StateBatch

NO_SLOT = -1
Slots = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]


class StateShape(Protocol):
    """What the states of a layer consist of."""

    @property
    def matrix(self) -> tuple[int, int]: ...

    @property
    def kept_inputs(self) -> tuple[int, int]: ...


def check_states(shape: StateShape, states: LayerStates) -> None:
    """Raise ValueError if the states of a layer do not have its shape."""
    slots = len(states.inputs)
    wanted = ((slots, *shape.matrix), (slots, *shape.kept_inputs))
    if tuple(tuple(part.shape) for part in states) != wanted or any(
        dtype_name(part.dtype) != "float32" for part in states
    ):
        raise ValueError(f"states of {[list(p.shape) for p in states]}: expected {wanted}")


def checked_slots(shape: StateShape, states: LayerStates, batch: StateBatch, tokens: int) -> Slots:
    """Return bounds, reads, writes and marks of a batch of so many tokens as dense arrays.

    Raises:
        ValueError: states do not have the shape, or rows or slots do not fit.
    """
    given = (batch.bounds, batch.reads, batch.writes, batch.marks)
    bounds, reads, writes, marks = (np.ascontiguousarray(to_numpy(x), np.int32) for x in given)
    check_states(shape, states)
    slots, rows = len(states.inputs), len(reads)
    counts = np.diff(bounds)
    if bounds.shape != (rows + 1,) or writes.shape != (rows,) or marks.shape[1:] != (2,):
        raise ValueError(f"{rows} rows, but {len(bounds)} bounds and {len(writes)} writes")
    if bounds[0] != 0 or bounds[-1] != tokens or (counts < 0).any():
        raise ValueError(f"bounds {bounds.tolist()} do not cover {tokens} tokens")
    written = np.concatenate((writes, marks[:, 1]))
    if ((reads < NO_SLOT) | (reads >= slots)).any() or ((written < 0) | (written >= slots)).any():
        raise ValueError(f"a row reads or writes a slot beyond the {slots} that there are")
    if len(np.unique(written)) < len(written) or np.isin(reads, written).any():
        raise ValueError("a slot is written twice, or written and read")
    places = marks[:, 0]
    if ((places < 0) | (places >= tokens)).any() or (np.diff(places) <= 0).any():
        raise ValueError(f"marks {marks.tolist()} are not in the order of {tokens} tokens")
    return bounds, reads, writes, marks


def as_floats(x: Array) -> NDArray[np.float32]:
    """Return a parameter as a dense array of float32."""
    return np.ascontiguousarray(to_numpy(x).astype(np.float32))
