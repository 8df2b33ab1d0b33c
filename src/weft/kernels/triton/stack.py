"""A forward pass of fused layers, bound to the caches of an executor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from weft.kernels.float8 import Rounded
from weft.kernels.interface import AttentionMetadata
from weft.kernels.parts import StackParts
from weft.kernels.reference import known_ids
from weft.kernels.triton.cudnn_prefill import attention_by
from weft.kernels.triton.layer import Sum, TritonLayer, add_up
from weft.kernels.triton.matrix import embedding
from weft.kernels.triton.norm import NormKind
from weft.kernels.triton.prologue import enters
from weft.kernels.triton.rope import Places, angles
from weft.kernels.tuning import Tuning
from weft.kernels.unavailable import KernelUnavailable


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
    sinks: Tensor | None


class TritonStack:
    """Embedding, layers bound to their caches, and final norm; see ``cpu.stack.CpuStack``.

    Every call depends on the shapes of its arguments alone, so that it can be captured.
    """

    def __init__(self, parts: StackParts, *, tuning: Tuning | None = None) -> None:
        """Bind what precedes and follows the layers.

        Args:
            tuning: where the launches of attention come from; without one by rule.

        Raises:
            ValueError: the model has per-layer inputs, or norms of its embeddings.
        """
        if parts.inputs is not None or parts.embedding_norm:
            raise ValueError(
                "models with per-layer inputs or norms of embeddings run op by op on a GPU"
            )
        self._attention = attention_by(tuning)
        self._table = parts.embedding
        self._scale = torch.tensor(parts.embedding_scale, dtype=parts.norm.dtype).item()
        self._norm = parts.norm
        self._kind = NormKind(parts.norm_eps, parts.norm_plus_one)
        self._ropes: list[tuple[Tensor, float]] = []
        self._layers: list[_Bound] = []

    def add_rope(
        self,
        frequencies: Tensor,
        scale: float,
        query_scales: Tensor | None = None,
        step: int = 0,  # noqa: ARG002 - of the scales
    ) -> None:
        """Append a rotary embedding: frequencies [R] float32, and the factor of cos and sin.

        Raises:
            ValueError: the queries are scaled by position; such layers run op by op.
        """
        if query_scales is not None:
            raise ValueError("queries that are scaled by position have no fused layers here")
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
        sinks: Tensor | None = None,
        causal: bool = True,
    ) -> None:
        """Append a layer.

        Args:
            places: which rope, of those appended before, and which KV group of a call it has.
            caches: keys and values; like ``scale``, ``window``, ``softcap`` and ``sinks`` those
                of ``paged_attention``.
            causal: there is no kernel for attention in both directions.

        Raises:
            KernelUnavailable: not causal.
        """
        if not causal:
            raise KernelUnavailable("there is no kernel for attention in both directions on GPUs")
        self._layers.append(_Bound(layer, *places, *caches, scale, window, softcap, sinks))

    def run(self, ids: Tensor, positions: Tensor, groups: Sequence[AttentionMetadata]) -> Tensor:
        """Return the normalised hidden states [T, C].

        Args:
            ids, positions: [T] int64; an id outside the vocabulary has an embedding of zeros.
            groups: the attention metadata of each KV group.

        Raises:
            ValueError: shapes or dtypes do not fit.
        """
        return self._run(self.lane(ids, positions, groups), None)

    def run_into(
        self,
        ids: Tensor,
        positions: Tensor,
        groups: Sequence[AttentionMetadata],
        in_flight: Tensor,
        out: Tensor,
    ) -> None:
        """Write what ``run`` returns into ``out`` [T, C], contiguous.

        Args:
            ids: -1 - i stands for number i of ``in_flight`` [R] int64.
        """
        self._run(self._lane(ids, positions, groups, in_flight), out)

    def _run(self, lane: TritonLane, out: Tensor | None) -> Tensor:
        for layer in range(len(self._layers)):
            lane.leave(layer, lane.enter(layer)())
        return lane.finish(out)

    def lane(
        self, ids: Tensor, positions: Tensor, groups: Sequence[AttentionMetadata]
    ) -> TritonLane:
        """Return the batch of ``run`` before its first layer; see ``PaddedLane``."""
        return self._lane(ids, positions, groups, None)

    def _lane(
        self,
        ids: Tensor,
        positions: Tensor,
        groups: Sequence[AttentionMetadata],
        in_flight: Tensor | None,
    ) -> TritonLane:
        entered = self._entered(ids.contiguous(), in_flight)
        turns = [angles(positions, frequencies, scale) for frequencies, scale in self._ropes]
        return TritonLane(self, entered, turns, groups)

    def enter(
        self,
        layer: int,
        x: Tensor | Rounded,
        turns: Sequence[tuple[Tensor, Tensor]],
        groups: Sequence[AttentionMetadata],
    ) -> Callable[[], Tensor]:
        """Compute what precedes attention, of normalised x [T, C]; return what attends."""
        at = self._layers[layer]
        batch = groups[at.group]
        places = Places(at.keys, at.values, batch.slot_mapping, batch.block_size)
        q = at.layer.begin(x, *turns[at.rope], places)
        return partial(
            self._attention, q, None, None, at.keys, at.values, batch,
            scale=at.scale, window=at.window, softcap=at.softcap, sinks=at.sinks,
            value_dim=at.layer.value_dim,
        )  # fmt: skip

    def normed(self, layer: int, total: Sum) -> tuple[Tensor | Rounded, Tensor]:
        """Return what ``enter`` takes, and the residual [T, C]."""
        return self._layers[layer].layer.normed(total)

    def leave(self, layer: int, attended: Tensor, residual: Tensor) -> Sum:
        """Compute what follows attention, but for the last sum."""
        return self._layers[layer].layer.end(attended, residual)

    def finish(self, total: Sum, out: Tensor | None) -> Tensor:
        """Return the final norm [T, C], written into ``out`` if that is given."""
        hidden, _ = add_up(total, self._norm, self._kind, None, out)
        assert isinstance(hidden, Tensor)
        return hidden

    def _entered(self, ids: Tensor, in_flight: Tensor | None) -> tuple[Tensor | Rounded, Tensor]:
        """The norm of the embeddings as the first layer takes it, and these."""
        first = self._layers[0].layer
        if enters(self._table):
            return first.enter(ids, in_flight, self._table, self._scale)
        embedded = embedding(ids if in_flight is None else known_ids(ids, in_flight), self._table)
        return first.normed(Sum(embedded if self._scale == 1.0 else embedded * self._scale))


class TritonLane:
    """A batch on its way through the layers of a stack; implements ``PaddedLane``."""

    def __init__(
        self,
        stack: TritonStack,
        entered: tuple[Tensor | Rounded, Tensor],
        turns: Sequence[tuple[Tensor, Tensor]],
        groups: Sequence[AttentionMetadata],
    ) -> None:
        self._stack, self._entered, self._turns, self._groups = stack, entered, turns, groups
        self._total: Sum

    def enter(self, layer: int) -> Callable[[], Tensor]:
        x, self._residual = self._entered if layer == 0 else self._stack.normed(layer, self._total)
        return self._stack.enter(layer, x, self._turns, self._groups)

    def leave(self, layer: int, attended: Tensor) -> None:
        self._total = self._stack.leave(layer, attended, self._residual)

    def finish(self, out: Tensor | None = None) -> Tensor:
        return self._stack.finish(self._total, out)
