"""How a matrix is stored as integers with scales, and the memory that it takes. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

PANEL = 64  # outputs that are packed together, see quant.hpp
GATED_PANEL = 32  # of each half of a gated matrix
ACTIVATION_GROUP = 128  # inputs that are rounded together where a row of weights has one scale
SCALE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Storage:
    """Integers of a matrix [outputs, inputs] for the native kernels.

    Attributes:
        bits: 8 or 4.
        group: inputs that share a scale; None: all of them, and the scale is float32.
        scales: name of the dtype of grouped scales.
        zeros: zero points are stored, a byte for each scale.
    """

    bits: int
    group: int | None
    scales: str = "bfloat16"
    zeros: bool = False

    def __str__(self) -> str:
        grouped = "a scale an output" if self.group is None else f"groups of {self.group}"
        return f"int{self.bits} ({grouped})"

    def nbytes(self, outputs: int, inputs: int, *, gated: bool = False) -> int:
        """Return the bytes of a packed matrix, padding included."""
        panels = -(-(outputs // 2) // GATED_PANEL) if gated else -(-outputs // PANEL)
        group = self.group or ACTIVATION_GROUP
        scales = SCALE_BYTES[self.scales] if self.group else 0
        block = PANEL * (scales + int(self.zeros) + group * self.bits // 8)
        return panels * (-(-inputs // group) * block + (0 if self.group else 4 * PANEL))
