"""Recurrent layers by Mamba-2 (Dao and Gu 2024): their parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from weft.kernels.arrays import Array
from weft.kernels.delta import LayerStates, StateBatch


@dataclass(frozen=True)
class Mamba2Shape:
    """Sizes of a layer: H heads of x [P], G groups of B and C [N], and K taps."""

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    taps: int
    conv_bias: bool = True

    @property
    def values(self) -> int:
        """Numbers of all heads of x, and of the output."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Numbers of all groups of B, or of C."""
        return self.groups * self.state_dim

    @property
    def channels(self) -> int:
        """Numbers that the convolution reads of each token: x, B and C."""
        return self.values + 2 * self.keys

    @property
    def matrix(self) -> tuple[int, int]:
        """The shape of a state's matrices: [H, N * P]; each op has its own order of these."""
        return self.heads, self.state_dim * self.head_dim

    @property
    def kept_inputs(self) -> tuple[int, int]:
        """The shape of a state's last inputs of the convolution: [K - 1, channels]."""
        return self.taps - 1, self.channels

    @property
    def state_bytes(self) -> int:
        """Bytes of a layer's state, all of it in float32."""
        matrix = self.matrix[0] * self.matrix[1]
        return 4 * (matrix + self.kept_inputs[0] * self.kept_inputs[1])


@dataclass(frozen=True)
class Mamba2Parts:
    """Parameters of a layer beside its products.

    Attributes:
        conv: [channels, K], the newest input last.
        conv_bias: [channels].
        decay: [H], A_log: a head forgets by exp(-exp(A_log) * time step).
        bias: [H], of the time step.
        skip: [H], D: what of x goes past the state.
        norm: [H * P], the weight of the gated norm, over each group of heads.
        time_limits: the least and the largest time step.
    """

    shape: Mamba2Shape
    conv: Array
    conv_bias: Array | None
    decay: Array
    bias: Array
    skip: Array
    norm: Array
    norm_eps: float
    time_limits: tuple[float, float] = (0.0, float("inf"))


class Mamba2Layer(Protocol):
    """See ``reference_mamba2.ReferenceMamba2``."""

    def __call__(self, x: Array, gates: Array, states: LayerStates, batch: StateBatch) -> Array: ...


class BindMamba2(Protocol):
    """Binds a layer to its parameters, as ``OpTable.pack`` made them."""

    def __call__(self, parts: Mamba2Parts, /) -> Mamba2Layer: ...
