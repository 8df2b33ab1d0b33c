"""A forward pass of fused layers, bound to the caches of an executor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from weft.kernels.interface import AttentionMetadata
from weft.kernels.parts import StackParts
from weft.kernels.triton.attention import paged_attention
from weft.kernels.triton.layer import Sum, TritonLayer, add_up
from weft.kernels.triton.matrix import embedding
from weft.kernels.triton.norm import NormKind
from weft.kernels.triton.rope import Places, angles
from weft.kernels.tuning import Tuning


@dataclass(frozen=True)
class _Bound:
    """A layer, which rope and which KV group of a call it has, and its caches."""

    layer: TritonLayer
    rope: int
    group: int
    keys: Tensor
    values: Tensor
    scale: float
    window: int | None
    softcap: float | None


class TritonStack:
    """Embedding, layers bound to their caches, and final norm; see ``cpu.stack.CpuStack``.

    Every call depends on the shapes of its arguments alone, so that it can be captured.
    """

    def __init__(self, parts: StackParts, *, tuning: Tuning | None = None) -> None:
        """Bind what precedes and follows the layers.

        Args:
            tuning: where the launches of attention come from; without one by rule.

        Raises:
            ValueError: the model has per-layer inputs.
        """
        if parts.inputs is not None:
            raise ValueError("models with per-layer inputs run op by op on a GPU")
        self._attention = partial(paged_attention, tuning=tuning)
        self._table = parts.embedding
        self._scale = torch.tensor(parts.embedding_scale, dtype=parts.norm.dtype).item()
        self._norm = parts.norm
        self._kind = NormKind(parts.norm_eps, parts.norm_plus_one)
        self._ropes: list[tuple[Tensor, float]] = []
        self._layers: list[_Bound] = []

    def add_rope(self, frequencies: Tensor, scale: float) -> None:
        """Append a rotary embedding: frequencies [R] float32, and the factor of cos and sin."""
        self._ropes.append((frequencies, scale))

    def add_layer(
        self,
        layer: TritonLayer,
        places: tuple[int, int],
        caches: tuple[Tensor, Tensor],
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> None:
        """Append a layer.

        Args:
            places: which rope, of those appended before, and which KV group of a call it has.
            caches: keys and values; like ``scale``, ``window`` and ``softcap`` those of
                ``paged_attention``.
        """
        self._layers.append(_Bound(layer, *places, *caches, scale, window, softcap))

    def run(self, ids: Tensor, positions: Tensor, groups: Sequence[AttentionMetadata]) -> Tensor:
        """Return the normalised hidden states [T, C].

        Args:
            ids, positions: [T] int64; an id outside the vocabulary has an embedding of zeros.
            groups: the attention metadata of each KV group.

        Raises:
            ValueError: shapes or dtypes do not fit.
        """
        lane = self.lane(ids, positions, groups)
        for layer in range(len(self._layers)):
            lane.leave(layer, lane.enter(layer)())
        return lane.finish()

    def lane(
        self, ids: Tensor, positions: Tensor, groups: Sequence[AttentionMetadata]
    ) -> TritonLane:
        """Return the batch of ``run`` before its first layer; see ``PaddedLane``."""
        embedded = embedding(ids, self._table)
        total = Sum(embedded if self._scale == 1.0 else embedded * self._scale)
        turns = [angles(positions, frequencies, scale) for frequencies, scale in self._ropes]
        return TritonLane(self, total, turns, groups)

    def enter(
        self,
        layer: int,
        total: Sum,
        turns: Sequence[tuple[Tensor, Tensor]],
        groups: Sequence[AttentionMetadata],
    ) -> tuple[Callable[[], Tensor], Tensor]:
        """Compute what precedes attention; return what attends, and the residual [T, C]."""
        at = self._layers[layer]
        batch = groups[at.group]
        places = Places(at.keys, at.values, batch.slot_mapping, batch.block_size)
        q, residual = at.layer.begin(total, *turns[at.rope], places)
        attend = partial(
            self._attention, q, None, None, at.keys, at.values, batch,
            scale=at.scale, window=at.window, softcap=at.softcap,
        )  # fmt: skip
        return attend, residual

    def leave(self, layer: int, attended: Tensor, residual: Tensor) -> Sum:
        """Compute what follows attention, but for the last sum."""
        return self._layers[layer].layer.end(attended, residual)

    def finish(self, total: Sum) -> Tensor:
        """Return the final norm [T, C]."""
        hidden, _ = add_up(total, self._norm, self._kind, None)
        assert isinstance(hidden, Tensor)
        return hidden


class TritonLane:
    """A batch on its way through the layers of a stack; implements ``PaddedLane``."""

    def __init__(
        self,
        stack: TritonStack,
        total: Sum,
        turns: Sequence[tuple[Tensor, Tensor]],
        groups: Sequence[AttentionMetadata],
    ) -> None:
        self._stack, self._total, self._turns, self._groups = stack, total, turns, groups

    def enter(self, layer: int) -> Callable[[], Tensor]:
        attend, self._residual = self._stack.enter(layer, self._total, self._turns, self._groups)
        return attend

    def leave(self, layer: int, attended: Tensor) -> None:
        self._total = self._stack.leave(layer, attended, self._residual)

    def finish(self) -> Tensor:
        return self._stack.finish(self._total)
