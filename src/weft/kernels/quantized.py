"""A weight as integers with scales, the common form of all quantised checkpoints.

The integers of GGUF files have more forms: minimums instead of zero points, scales that are
multiples of a coarser one, and codes that choose from a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.kernels.storage import NEST, Storage

# What the codes of a table stand for, with 128 added; as ``code_tables`` in quant.hpp.
TABLE = {
    "nl4": (1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241),
    "mx4": (128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116),
}


@dataclass(frozen=True)
class Quantized:
    """A weight w[n, k] = scales[n, g] * (values[n, k] - zeros[n, g]) with g = k // group.

    With minimums it is that minus minimums[n, g]. Nested scales are steps[n, g] times
    scales[n, k // 256], and minimums likewise.

    Attributes:
        values: [N, K] uint8, each below 2 ** bits.
        scales: [N, G] of a float dtype, G = K / group rounded up; nested ones [N, K / 256] float16.
        zeros: [N, G] uint8; None: all are ``centre``.
        bits: 8, 6, 5 or 4.
        group: inputs that share a scale; K for one scale a row.
        minimums: as the scales are, or None.
        steps, minimum_steps: [N, G] int8 of nested scales and minimums, else None.
        table: what values choose from: a key of ``TABLE``; None: they are numbers themselves.
    """

    values: NDArray[np.uint8]
    scales: NDArray[Any]
    zeros: NDArray[np.uint8] | None
    bits: int
    group: int
    minimums: NDArray[Any] | None = None
    steps: NDArray[np.int8] | None = None
    minimum_steps: NDArray[np.int8] | None = None
    table: str | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        outputs, inputs = self.values.shape
        return outputs, inputs

    @property
    def storage(self) -> Storage:
        """The storage format of the native kernels."""
        nested, format_ = self.steps is not None, self.table or "int"
        grouped = self.scales.shape[1] > 1 or nested or self.minimums is not None
        group = self.group if grouped or self.table else None
        zeros, minimums = self.zeros is not None, self.minimums is not None
        dtype = self.scales.dtype.name
        return Storage(self.bits, group, dtype, zeros, format_, minimums=minimums, nested=nested)

    @property
    def centre(self) -> int:
        """The value that stands for 0 where no zero points are stored."""
        if self.table is not None:
            return 128
        return 0 if self.minimums is not None and self.bits < 6 else 2 ** (self.bits - 1)

    def part(self, rows: slice, columns: slice) -> Quantized:
        """Return some rows and columns [low, high) of the weight.

        Raises:
            ValueError: the columns cut through a group.
        """
        low, high, _ = columns.indices(self.shape[1])
        unit = self.group if self.steps is None else NEST
        whole = low == 0 and high == self.shape[1]
        if not whole and (low % unit or (high % unit and high != self.shape[1])):
            if self.scales.shape[1] > 1 or self.steps is not None:
                raise ValueError(f"columns {low} to {high} cut through groups of {unit}")
            groups, group = slice(0, 1), high - low
        else:
            groups, group = slice(low // self.group, -(-high // self.group)), self.group
        coarse = groups if self.steps is None else slice(low // NEST, -(-high // NEST))

        def cut(numbers: NDArray[Any] | None, columns: slice) -> Any:
            return None if numbers is None else np.ascontiguousarray(numbers[rows, columns])

        return replace(
            self,
            values=cut(self.values, columns),
            scales=cut(self.scales, coarse),
            zeros=cut(self.zeros, groups),
            group=group,
            minimums=cut(self.minimums, coarse),
            steps=cut(self.steps, groups),
            minimum_steps=cut(self.minimum_steps, groups),
        )

    def reordered(self, rows: NDArray[np.int64]) -> Quantized:
        """Return the weight whose row n is row ``rows[n]`` of this one."""
        parts = ("values", "scales", "zeros", "minimums", "steps", "minimum_steps")
        found = {name: getattr(self, name) for name in parts}
        return replace(self, **{name: a[rows] for name, a in found.items() if a is not None})

    def with_zeros(self) -> Quantized:
        """Return the same weight with its zero points stored."""
        return replace(self, zeros=self._all_zeros())

    def kept_as(self, storage: Storage) -> Quantized:
        """Return the same numbers in a storage that ``common_storage`` has found for them."""
        if storage == self.storage:
            return self
        values = self.values
        if self.table is not None:
            values = np.array(TABLE[self.table], np.uint8)[values]
        group = storage.group or self.shape[1]
        found = replace(self, values=values, bits=storage.bits, table=None, group=group)
        parts: dict[str, Any] = {}
        for scales, steps in (("scales", "steps"), ("minimums", "minimum_steps")):
            coarse, fine = getattr(self, scales), getattr(self, steps)
            if coarse is None and storage.minimums:
                coarse = np.zeros_like(self.scales)
                fine = None if self.steps is None else np.zeros_like(self.steps)
            if coarse is None:
                continue
            if storage.nested:
                parts |= {scales: coarse, steps: np.repeat(fine, self.group // group, axis=1)}
                continue
            numbers = coarse.astype(np.float32)
            if fine is not None:
                numbers = np.repeat(numbers, NEST // self.group, axis=1) * fine
            numbers = np.repeat(numbers, self.group // group, axis=1)
            parts |= {scales: numbers.astype(storage.scales), steps: None}
        found = replace(found, **parts)
        shift = found.centre - self.centre
        return replace(found, values=(values + np.uint8(shift)) if shift else values)

    def dequantize(self) -> NDArray[np.float32]:
        """Return the weight [N, K] in float32."""
        values = self.values
        if self.table is not None:
            values = np.array(TABLE[self.table], np.uint8)[values]
        zeros = self._spread(self._all_zeros())
        found: NDArray[np.float32] = values.astype(np.float32) - zeros
        found *= self._spread(self._fine(self.scales, self.steps))
        if self.minimums is not None:
            found -= self._spread(self._fine(self.minimums, self.minimum_steps))
        return found

    def _fine(self, scales: NDArray[Any], steps: NDArray[np.int8] | None) -> NDArray[Any]:
        """Scales or minimums of groups."""
        if steps is None:
            return scales
        return np.repeat(scales.astype(np.float32), NEST // self.group, axis=1) * steps

    def _all_zeros(self) -> NDArray[np.uint8]:
        if self.zeros is not None:
            return self.zeros
        shape = self.scales.shape if self.steps is None else self.steps.shape
        return np.full(shape, self.centre, np.uint8)

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
