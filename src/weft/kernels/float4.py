"""A weight in MXFP4: E2M1 numbers in blocks of 32, each with a power of two as its scale.

OCP Microscaling Formats (MX) Specification 1.0 (2023), sections 5.3 and 5.4: E2M1 has the numbers
0, 0.5, 1, 1.5, 2, 3, 4 and 6 and their negatives, E8M0 an exponent with bias 127. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.kernels.arrays import numpy_dtype
from weft.kernels.quantized import Quantized
from weft.kernels.storage import Storage

BLOCK = 32  # inputs that share a scale
MOST_EXPONENT = 240  # of a scale: 2**113; more may not fit into float32 with the numbers
BIAS = 127
# Twice the number of each code.
TWICE = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int16)


@dataclass(frozen=True)
class Float4:
    """A weight w[n, k] = E2M1(codes[n, k]) * 2 ** (scales[n, k // 32] - 127).

    Attributes:
        codes: [N, K] uint8, each below 16; bit 3 is the sign.
        scales: [N, K / 32 rounded up] uint8.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.uint8]

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        outputs, inputs = self.codes.shape
        return outputs, inputs

    @property
    def storage(self) -> Storage:
        """Its storage format."""
        return Storage(4, BLOCK, "e8m0", format="e2m1", inputs="float")

    def part(self, rows: slice, columns: slice) -> Float4:
        """Return some rows and columns of the weight.

        Raises:
            ValueError: the columns cut through a block.
        """
        low, high, _ = columns.indices(self.shape[1])
        if self.shape[1] <= BLOCK:
            return Float4(self.codes[rows, columns], self.scales[rows])
        if low % BLOCK or (high % BLOCK and high != self.shape[1]):
            raise ValueError(f"columns {low} to {high} cut through blocks of {BLOCK}")
        blocks = slice(low // BLOCK, -(-high // BLOCK))
        return Float4(self.codes[rows, columns], self.scales[rows, blocks])

    def reordered(self, rows: NDArray[np.int64]) -> Float4:
        """Return the weight whose row n is row ``rows[n]`` of this one."""
        return Float4(self.codes[rows], self.scales[rows])

    def integers(self) -> Quantized:
        """Return the same weight in int8: twice its numbers, and halves of its scales in bfloat16.

        Exact, as both are integers and powers of two.
        """
        values = (TWICE[self.codes] + 128).astype(np.uint8)
        scales = np.ldexp(np.float32(0.5), self.scales.astype(np.int32) - BIAS)
        return Quantized(values, scales.astype(numpy_dtype("bfloat16")), None, 8, BLOCK)

    def dequantize(self) -> NDArray[np.float32]:
        """Return the weight [N, K] in float32."""
        return self.integers().dequantize()


def stacked(parts: Sequence[Float4]) -> Float4:
    """Return the rows of weights one below the other."""
    return Float4(
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.scales for part in parts]),
    )
