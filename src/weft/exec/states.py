"""Slots of recurrent state: their memory, and which of them a sub-batch reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import InvariantError
from weft.core.plan import SubBatch
from weft.exec.store import Memory, host_memory
from weft.kernels.arrays import Array, dtype_name
from weft.kernels.delta import LayerStates, StateBatch
from weft.models.spec import ModelSpec


class StateStore:
    """Memory for the states of all recurrent layers of a model.

    Attributes:
        layers: by the number of a recurrent layer its states by slot, float32.
    """

    def __init__(self, spec: ModelSpec, slots: int, memory: Memory = host_memory) -> None:
        """Make the slots of a model that has recurrent layers."""
        self.layers: dict[int, LayerStates] = {}
        for number, layer in enumerate(spec.layers):
            if layer.state is not None:
                shape = layer.state.shape
                sizes = (shape.matrix, shape.kept_inputs)
                self.layers[number] = LayerStates(
                    *(memory((slots, *size), "float32") for size in sizes)
                )

    def like(self, slots: int, memory: Memory = host_memory) -> StateStore:
        """Return slots of the same layers, which start as zeros."""
        other = StateStore.__new__(StateStore)
        other.layers = {
            number: LayerStates(
                *(memory((slots, *part.shape[1:]), dtype_name(part.dtype)) for part in layer)
            )
            for number, layer in self.layers.items()
        }
        return other

    def arrays(self) -> list[list[Array]]:
        """The arrays of all layers, those of equal sizes together; their first index is a slot."""
        found: dict[tuple[int, ...], list[Array]] = {}
        for array in (array for layer in self.layers.values() for array in layer):
            if 0 not in array.shape:  # a kind of layer may have no use for one of them
                found.setdefault(tuple(array.shape), []).append(array)
        return list(found.values())


def state_batch(batch: SubBatch, wrap: Callable[[NDArray[np.int32]], Array]) -> StateBatch:
    """Return what the rows of a sub-batch read and write.

    Of a row that is computed without its drafts, as memory ran out with them, marks among these are
    left out, and what is written behind the last guess is the state after its certain tokens.

    Args:
        wrap: makes the arrays of a forward pass of numpy's.

    Raises:
        InvariantError: the plan says nothing of states.
    """
    return StateBatch(*(wrap(part) for part in _numbers(batch)))


def write_states(arrays: Mapping[str, NDArray[Any]], batch: SubBatch) -> None:
    """Write what the rows of a sub-batch read and write; see ``step_layout.forward_layout``.

    Rows of padding have no tokens, so that they write nothing.

    Raises:
        InvariantError: the plan says nothing of states.
    """
    _, reads, writes, marks = _numbers(batch)
    for name, slots in (("reads", reads), ("writes", writes)):
        arrays[name][: len(slots)] = slots
        arrays[name][len(slots) :] = -1
    arrays["marks"][:] = -1
    arrays["marks"][marks[:, 0]] = marks[:, 1]


def _numbers(batch: SubBatch) -> tuple[NDArray[np.int32], ...]:
    """Bounds, reads, writes and marks of the rows, as ``StateBatch`` has them."""
    if len(batch.states) != len(batch.rows):
        raise InvariantError("a model with recurrent layers needs a state for each row")
    guesses = (len(batch.drafts.get(row, ())) for row in batch.rows)
    counts = [count + more for count, more in zip(batch.counts, guesses, strict=True)]
    bounds = np.cumsum((0, *counts), dtype=np.int32)
    marks = [
        (bounds[row] + place - start - 1, slot)
        for row, (start, state) in enumerate(zip(batch.starts, batch.states, strict=True))
        for place, slot in state.marks
        if place - start <= counts[row]
    ]
    return (
        bounds,
        np.array([state.read for state in batch.states], np.int32),
        np.array([state.write for state in batch.states], np.int32),
        np.array(marks, np.int32).reshape(-1, 2),
    )
