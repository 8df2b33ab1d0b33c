"""A weight as integers with scales, the common form of all quantised checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.kernels.storage import Storage


@dataclass(frozen=True)
class Quantized:
    """A weight w[n, k] = scales[n, g] * (values[n, k] - zeros[n, g]) with g = k // group.

    Attributes:
        values: [N, K] uint8, each below 2 ** bits.
        scales: [N, G] of a float dtype, G = K / group rounded up.
        zeros: [N, G] uint8; None: all are 2 ** (bits - 1).
        bits: 4 or 8.
        group: inputs that share a scale; K for one scale a row.
    """

    values: NDArray[np.uint8]
    scales: NDArray[Any]
    zeros: NDArray[np.uint8] | None
    bits: int
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        outputs, inputs = self.values.shape
        return outputs, inputs

    @property
    def storage(self) -> Storage:
        """The storage format of the native kernels."""
        grouped = self.scales.shape[1] > 1
        group = self.group if grouped else None
        return Storage(self.bits, group, self.scales.dtype.name, self.zeros is not None)

    def part(self, rows: slice, columns: slice) -> Quantized:
        """Return some rows and columns [low, high) of the weight.

        Raises:
            ValueError: the columns cut through a group.
        """
        low, high, _ = columns.indices(self.shape[1])
        if low % self.group or (high % self.group and high != self.shape[1]):
            if self.scales.shape[1] > 1:
                raise ValueError(f"columns {low} to {high} cut through groups of {self.group}")
            groups, group = slice(0, 1), high - low
        else:
            groups, group = slice(low // self.group, -(-high // self.group)), self.group
        return Quantized(
            np.ascontiguousarray(self.values[rows, columns]),
            np.ascontiguousarray(self.scales[rows, groups]),
            None if self.zeros is None else np.ascontiguousarray(self.zeros[rows, groups]),
            self.bits,
            group,
        )

    def reordered(self, rows: NDArray[np.int64]) -> Quantized:
        """Return the weight whose row n is row ``rows[n]`` of this one."""
        zeros = None if self.zeros is None else self.zeros[rows]
        return replace(self, values=self.values[rows], scales=self.scales[rows], zeros=zeros)

    def with_zeros(self) -> Quantized:
        """Return the same weight with its zero points stored."""
        return replace(self, zeros=self._all_zeros())

    def dequantize(self) -> NDArray[np.float32]:
        """Return the weight [N, K] in float32."""
        zeros = self._spread(self._all_zeros())
        found: NDArray[np.float32] = self.values.astype(np.float32) - zeros
        return found * self._spread(self.scales)

    def _all_zeros(self) -> NDArray[np.uint8]:
        if self.zeros is not None:
            return self.zeros
        return np.full(self.scales.shape, 2 ** (self.bits - 1), np.uint8)

    def _spread(self, numbers: NDArray[Any]) -> NDArray[np.float32]:
        return np.repeat(numbers.astype(np.float32), self.group, axis=1)[:, : self.shape[1]]


def stacked(parts: Sequence[Quantized]) -> Quantized:
    """Return the rows of weights of one kind, one below the other.

    Raises:
        ValueError: they differ in bits, group or the dtype of their scales.
    """
    first = parts[0]
    kinds = {(part.bits, part.group, part.scales.dtype) for part in parts}
    if len(kinds) > 1:
        raise ValueError("weights of different bits, groups or scales cannot be stacked")
    zeros = None
    if any(part.zeros is not None for part in parts):
        zeros = np.concatenate([part._all_zeros() for part in parts])
    return Quantized(
        np.concatenate([part.values for part in parts]),
        np.concatenate([part.scales for part in parts]),
        zeros,
        first.bits,
        first.group,
    )
