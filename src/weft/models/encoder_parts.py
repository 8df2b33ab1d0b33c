"""Computes on the host what encoders have beside layers: token types, products of pooled states.

Pooled states are few, one a text, so each is multiplied by itself: it gets the same numbers in any
batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.kernels.arrays import Array, from_numpy, to_numpy
from weft.models.spec import ModelSpec

Vector = NDArray[Any]  # of floats


def token_types(ids: Array, positions: Array) -> Array:
    """Return the types [T] int64 of the tokens of pairs: 1 behind the mark that ends a first text.

    Every text of a pair ends with the mark that the whole prompt ends with, such as ``[SEP]``, and
    what texts spell never becomes one.

    Args:
        ids, positions: [T] int64 of whole prompts one behind the other.
    """
    tokens, begins = to_numpy(ids), to_numpy(positions) == 0
    starts = np.flatnonzero(begins)
    rows = np.cumsum(begins) - 1
    ends = np.append(starts[1:], len(tokens)) - 1
    marks = tokens == tokens[ends][rows]
    before = np.cumsum(marks) - marks
    return from_numpy(ids, (before > before[starts][rows]).astype(np.int64))


def _erf(x: Vector) -> Vector:
    return np.array([math.erf(number) for number in x.tolist()])


ACTIVATIONS: dict[str, Callable[[Vector], Vector]] = {
    "identity": lambda x: x,
    "tanh": np.tanh,
    "gelu": lambda x: x * (1 + _erf(x / math.sqrt(2))) / 2,
}


@dataclass(frozen=True)
class DenseLayer:
    """A product that a pooled state goes through; see ``DenseSpec``."""

    weight: NDArray[Any]  # [O, I] float32, as the others
    bias: Vector | None  # [O]
    norm: Vector | None  # [O]
    norm_eps: float
    activation: str

    def __call__(self, state: Vector) -> Vector:
        """Return what it makes of a state [I]: [O] float64."""
        found = (self.weight @ state.astype(np.float32)).astype(np.float64)
        if self.bias is not None:
            found = found + self.bias
        found = ACTIVATIONS[self.activation](found)
        if self.norm is None:
            return found
        centred = found - found.mean()
        scaled: Vector = centred / np.sqrt(np.mean(centred**2) + self.norm_eps) * self.norm
        return scaled


def dense_layers(spec: ModelSpec, weights: Mapping[str, Any]) -> tuple[DenseLayer, ...]:
    """Return what pooled states go through, of weights by the names of ``encoder_layout.dense``."""

    def part(number: int, name: str) -> Vector | None:
        found = weights.get(f"dense.{number}.{name}")
        return None if found is None else to_numpy(found)

    layers = []
    for number, one in enumerate(spec.dense):
        weight = part(number, "dense")
        if weight is None:  # of another stage
            return ()
        parts = part(number, "dense_bias"), part(number, "dense_norm")
        layers.append(DenseLayer(weight, *parts, spec.norm_eps, one.activation))
    return tuple(layers)
