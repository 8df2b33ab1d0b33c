"""A forward pass as one native call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from weft.kernels.arrays import (
    Array,
    View,
    address,
    contiguous,
    dtype_name,
    empty,
    numpy_dtype,
    to_numpy,
    view,
)
from weft.kernels.cpu import _native
from weft.kernels.cpu._native import CarriedRows
from weft.kernels.cpu.layer import CpuLayer
from weft.kernels.cpu.matrix import CpuMatrix
from weft.kernels.cpu.slots import StateShape, check_states, checked_slots
from weft.kernels.delta import LayerStates, StateBatch
from weft.kernels.interface import AttentionMetadata
from weft.kernels.parts import LayerInputs, StackParts


class CpuStack:
    """Embedding, layers bound to their caches, and final norm.

    ``run`` gives the very bits of the parts called one by one, without Python in between, whose
    code and data are cold after the weights of each layer.

    Attributes:
        native: for native code that weaves the layers in another order.
        width, dtype: of hidden states.
    """

    def __init__(self, parts: StackParts) -> None:
        """Bind what precedes and follows the layers.

        Raises:
            ValueError: the per-layer inputs have another shape or dtype than the rest.
        """
        native = _native.Stack()
        self.native = native
        self.dtype, self.width = dtype_name(parts.norm.dtype), len(parts.norm)
        self._kept: list[object] = [parts]
        self._states: tuple[StateShape, LayerStates] | None = None  # of a recurrent layer
        if isinstance(parts.embedding, CpuMatrix):
            native.packed = parts.embedding.native
        else:
            table = contiguous(parts.embedding)
            native.table = view("table", table)
            self._kept.append(table)
        native.embedding_scale = self._rounded(parts.embedding_scale)
        self._embed = parts.embed
        if parts.normalises:
            native.final_norm = self._weight(parts.norm, parts.norm_plus_one)
        native.embedding_norm = parts.embedding_norm
        native.epsilon, native.centred = parts.norm_eps, parts.norm_centred
        if parts.inputs is not None:
            self._add_inputs(parts.inputs, parts.norm_plus_one)

    def _add_inputs(self, inputs: LayerInputs, norm_plus_one: bool) -> None:
        table, projection, size = inputs.table, inputs.projection, len(inputs.norm)
        columns = table.shape[-1]
        if tuple(projection.shape) != (columns, self.width) or columns % size:
            raise ValueError(
                f"per-layer inputs of {size}: table {list(table.shape)} and projection "
                f"{list(projection.shape)} do not fit a model of {self.width}"
            )
        names = {dtype_name(part.dtype) for part in (table, projection, inputs.norm)}
        if names != {self.dtype}:
            raise ValueError(f"per-layer inputs of {sorted(names)} in a model of {self.dtype}")
        table = contiguous(table)
        self._kept.append(table)
        self.native.add_inputs(
            view("table", table), projection.native, self._weight(inputs.norm, norm_plus_one),
            size, self._rounded(size**0.5), self.width**-0.5, 2.0**-0.5,
        )  # fmt: skip

    def _weight(self, norm: Array, plus_one: bool) -> int:
        """Return where the float32 weight of a norm lies."""
        weight = to_numpy(norm).astype(np.float32) + np.float32(plus_one)
        self._kept.append(weight)
        return address(weight)

    def _rounded(self, factor: float) -> float:
        return float(numpy_dtype(self.dtype).type(factor))

    def add_rope(
        self, frequencies: Array, scale: float, query_scales: Array | None = None, step: int = 0
    ) -> None:
        """Append a rotary embedding.

        Args:
            frequencies: [R] float32.
            scale: the factor of cos and sin.
            query_scales: [N] float32, more factors of the angles of queries, which then are their
                own: one of each ``step`` positions; the last one goes on.
        """
        self._kept += [frequencies, query_scales]
        size, at, count = len(frequencies), 0, 0
        if query_scales is not None:
            size, at, count = 2 * size, address(query_scales), len(query_scales)
        self.native.add_rope(address(frequencies), size, scale, at, count, step)

    def add_layer(
        self,
        layer: CpuLayer,
        places: tuple[int, int],
        caches: tuple[Array, Array],
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Array | None = None,
        causal: bool = True,
    ) -> None:
        """Append a layer.

        Args:
            places: which rope, of those appended before, and which KV group of a call it has.
            caches: keys and values; like all that follows those of ``paged_attention``.
        """
        keys, values = caches
        self.native.add_layer(
            layer.native,
            *places,
            view("k_cache", keys),
            view("v_cache", values),
            scale,
            window or 0,
            softcap or 0.0,
            None if sinks is None else view("sinks", sinks),
            causal,
        )
        self._kept += [layer, keys, values, sinks]

    def add_recurrent(self, layer: CpuLayer, states: LayerStates) -> None:
        """Append a recurrent layer with its states by slot.

        Raises:
            ValueError: the layer attends, its states have another shape, or another layer has
                more slots or fewer.
        """
        if layer.mixer is None:
            raise ValueError("a layer that attends has no states")
        check_states(layer.mixer.shape, states)
        slots = len(states.inputs)
        if self._states is not None and len(self._states[1].inputs) != slots:
            raise ValueError(f"the layers of a stack have equal numbers of slots, not {slots} too")
        self.native.add_recurrent(
            layer.native, address(states.matrices), address(states.inputs), slots
        )
        self._states = layer.mixer.shape, states
        self._kept += [layer, states]

    def run(self, ids: Array, positions: Array, groups: Sequence[AttentionMetadata]) -> Array:
        """Return the normalised hidden states [T, C].

        Args:
            ids, positions: [T] int64.
            groups: the attention metadata of each KV group.

        Raises:
            IndexError: an id is outside the vocabulary; nothing has been written then.
            ValueError: shapes, dtypes or indices do not fit; caches may have been written then.
        """
        ids, positions = checked_tokens(ids, positions, 0)
        hidden = empty(ids, (len(ids), self.width), self.dtype)
        embedded = None if self._embed is None else contiguous(self._embed(ids, positions))
        self.native.run(
            address(ids), address(positions), len(ids), attention_views(groups), address(hidden),
            0 if embedded is None else address(embedded),
        )  # fmt: skip
        return hidden

    def run_recurrent(
        self,
        ids: Array,
        positions: Array,
        groups: Sequence[AttentionMetadata],
        states: StateBatch,
    ) -> Array:
        """Run a model with recurrent layers; else as ``run``.

        Args:
            states: the slots that the rows read and write.

        Raises:
            ValueError: as ``run``; slots do not fit, and nothing has been written then.
        """
        if self._states is None:
            raise ValueError("no layer of the stack is recurrent")
        ids, positions = checked_tokens(ids, positions, 0)
        slots = checked_slots(*self._states, states, len(ids))
        hidden = empty(ids, (len(ids), self.width), self.dtype)
        self.native.run_recurrent(
            address(ids), address(positions), len(ids), attention_views(groups), *slots,
            address(hidden),
        )  # fmt: skip
        return hidden

    def run_carrying(
        self,
        ids: Array,
        positions: Array,
        groups: Sequence[AttentionMetadata],
        carried: CarriedRows,
        begun: NDArray[np.int32],
        limits: NDArray[np.int32],
        most: int,
    ) -> tuple[Array, int]:
        """Run a pass that carries rows; its own tokens get the bits of ``run``.

        Args:
            ids: [T + n] int64, behind those of the pass those of the rows that begin.
            positions: [T] int64.
            groups: as for ``run``, of the T tokens.
            carried: what is kept of rows; see ``carried.hpp``.
            begun: [n], rows whose token begins.
            limits: for each layer, how many results of the host it may carry; empty for none.
            most: rows that a layer can carry.

        Returns:
            normalised hidden states [T + F, C], and F, the number of rows that have come through
            the last layer: those that ``carried`` has taken.

        Raises:
            IndexError, ValueError: as ``run``; or a row cannot be submitted or taken.
        """
        ids, positions = checked_tokens(ids, positions, len(begun))
        hidden = empty(ids, (len(positions) + most, self.width), self.dtype)
        came = self.native.run_carrying(
            address(ids), address(positions), len(positions), attention_views(groups),
            address(hidden), carried, begun, limits, most,
        )  # fmt: skip
        return hidden[: len(positions) + came], came


def checked_tokens(ids: Array, positions: Array, more: int) -> tuple[Array, Array]:
    """Return ids [T + more] and positions [T], contiguous.

    Raises:
        ValueError: they have other shapes or dtypes.
    """
    names = {dtype_name(ids.dtype), dtype_name(positions.dtype)}
    if names != {"int64"} or positions.ndim != 1 or ids.shape != (len(positions) + more,):
        raise ValueError(
            f"positions {list(positions.shape)} and {more} rows do not fit {list(ids.shape)} ids "
            "of int64"
        )
    return contiguous(ids), contiguous(positions)


def attention_views(
    groups: Sequence[AttentionMetadata],
) -> list[tuple[View, View, View, View, int]]:
    """Return the metadata of each KV group as native calls take it."""
    return [
        (
            view("block_tables", group.block_tables),
            view("query_start", group.query_start),
            view("seq_lens", group.seq_lens),
            view("slot_mapping", group.slot_mapping),
            group.block_size,
        )
        for group in groups
    ]
