"""Recurrent layers of a gated short convolution alone, as LFM2 has them: their parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from weft.kernels.arrays import Array
from weft.kernels.delta import LayerStates, StateBatch


@dataclass(frozen=True)
class ConvShape:
    """Sizes of a layer: channels C, and K taps."""

    channels: int
    taps: int
    bias: bool = False  # of both projections and of the convolution

    @property
    def matrix(self) -> tuple[int, int]:
        """The shape of a state's matrices, of which there are none."""
        return 0, 0

    @property
    def kept_inputs(self) -> tuple[int, int]:
        """The shape of a state's last inputs of the convolution: [K - 1, C]."""
        return self.taps - 1, self.channels

    @property
    def state_bytes(self) -> int:
        """Bytes of a layer's state, all of it in float32."""
        return 4 * self.kept_inputs[0] * self.kept_inputs[1]


@dataclass(frozen=True)
class ConvParts:
    """Parameters of a layer beside its products.

    Attributes:
        conv: [C, K], the newest input last.
        bias: [C], of the convolution.
    """

    shape: ConvShape
    conv: Array
    bias: Array | None


class ConvLayer(Protocol):
    """See ``reference_conv.ReferenceConv``."""

    def __call__(
        self, x: Array, gates: None, states: LayerStates, batch: StateBatch, /
    ) -> Array: ...


class BindConv(Protocol):
    """Binds a layer to its parameters, as ``OpTable.pack`` made them."""

    def __call__(self, parts: ConvParts, /) -> ConvLayer: ...
