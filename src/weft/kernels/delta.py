"""Recurrent layers by the gated delta rule (Yang et al. 2024): their parts, states and batches.

Kimi Delta Attention (Kimi Linear 2025) is that rule with a decay for each channel of a key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from weft.kernels.arrays import Array


@dataclass(frozen=True)
class DeltaShape:
    """Sizes of a layer: Hk heads of q and k [Dk], Hv heads of v [Dv], and K taps.

    Attributes:
        by_channel: each channel of a head's key has a decay of its own, in place of one a head.
        tiled: head h of v reads head h % Hk of k, as llama.cpp orders them, in place of
            h // (Hv / Hk).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    by_channel: bool = False
    tiled: bool = False

    @property
    def decays(self) -> int:
        """Numbers by which a token has a state decay: [Hv], or [Hv * Dk]."""
        return self.value_heads * (self.key_dim if self.by_channel else 1)

    @property
    def keys(self) -> int:
        """Numbers of all heads of q, or of k."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Numbers of all heads of v, and of the output."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Numbers that the convolution reads of each token: q, k and v."""
        return 2 * self.keys + self.values

    @property
    def matrix(self) -> tuple[int, int]:
        """The shape of a state's matrices: [Hv, Dk * Dv]; each op has its own order of these."""
        return self.value_heads, self.key_dim * self.value_dim

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
class DeltaParts:
    """Parameters of a layer beside its products.

    Attributes:
        conv: [channels, K], the newest input last.
        decay: [Hv], A_log: a head forgets by exp(-exp(A_log) * time step).
        bias: [decays], of the time step.
        norm: [Dv], the weight of the gated norm; never with 1 added.
        gating: ``silu`` or ``sigmoid`` of the norm's gate multiplies it.
        floor: below 0: a channel forgets by exp(floor * sigmoid(exp(A_log) * time step)), the time
            step as it is, in place of its softplus. None: it has none.
    """

    shape: DeltaShape
    conv: Array
    decay: Array
    bias: Array
    norm: Array
    norm_eps: float
    gating: str = "silu"
    floor: float | None = None


class LayerStates(NamedTuple):
    """The states of a layer by slot, float32: matrices [N, Hv, Dk * Dv], inputs [N, K-1, C]."""

    matrices: Array
    inputs: Array


@dataclass(frozen=True)
class StateBatch:
    """Which states the R rows of a sub-batch read and write, for all layers alike.

    No row reads a slot that one writes, so a step that fails half-way can be computed again.

    Attributes:
        bounds: [R + 1] int32, cumulative tokens, as ``AttentionMetadata.query_start``.
        reads: [R] int32, slots; -1 for a row that begins, with zeros.
        writes: [R] int32, slots.
        marks: [M, 2] int32, by token: after token t of the batch the state goes to a slot as well.
            Of padded batches [T] int32, the slot of each token, -1 for none.
    """

    bounds: Array
    reads: Array
    writes: Array
    marks: Array


class DeltaLayer(Protocol):
    """See ``reference_delta.ReferenceDelta``."""

    def __call__(self, x: Array, gates: Array, states: LayerStates, batch: StateBatch) -> Array: ...


class BindDelta(Protocol):
    """Binds a layer to its parameters, as ``OpTable.pack`` made them."""

    def __call__(self, parts: DeltaParts, /) -> DeltaLayer: ...


States: TypeAlias = Sequence[LayerStates]  # of each recurrent layer of a model
