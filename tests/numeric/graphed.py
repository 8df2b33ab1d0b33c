"""The graph executor on the host, where captured functions read only the uploaded buffer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from weft.engine.devices import is_resident, steps_in_flight
from weft.engine.host_tier import device_attention
from weft.exec.device import CudaDevice, Device, HostDevice, Replay
from weft.exec.device_tier import device_tier
from weft.exec.graphs import GraphExecutor
from weft.exec.halves_pass import HalvesSetup
from weft.exec.input_batch import InputBatch
from weft.exec.setup import Steps
from weft.kernels.arrays import to_torch
from weft.kernels.conv import ConvShape
from weft.kernels.delta import DeltaShape, LayerStates, StateBatch
from weft.kernels.interface import AttentionMetadata, OpTable
from weft.kernels.mamba2 import Mamba2Shape
from weft.kernels.reference import known_ids
from weft.models.decoder import Decoder
from weft.models.loader import load_model

SIZES = (1, 2, 4, 8, 16, 32, 64)
LANES = 3  # fewer than the rows that begin at once


class BlindDevice(HostDevice):
    """While a captured function runs, all that the host keeps of rows is garbage."""

    def __init__(self, table: InputBatch, seed: int | None = None) -> None:
        super().__init__(seed)
        self._hidden: list[np.ndarray] = [
            *(table.tokens, table.length, table.num_prompt, *table.tables, *table.table_length),
            *(getattr(table.columns, name) for name in table.columns.__slots__),
        ]
        self.replays = 0

    def host_memory(self, size: int, dtype: torch.dtype) -> Tensor:
        memory = super().host_memory(size, dtype)
        self._hidden.append(memory.numpy())
        return memory

    def capture(self, body: Replay) -> Replay:
        super().capture(body)

        def replay() -> None:
            kept = [array.copy() for array in self._hidden]
            for array in self._hidden:
                array.fill(77 if array.dtype.kind == "u" else -77)
            try:
                body()
            finally:
                for array, before in zip(self._hidden, kept, strict=True):
                    array[:] = before
            self.replays += 1

        return replay


def without_padding(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Native attention, which takes neither padding nor ragged tables."""

    def attend(q, k, v, k_cache, v_cache, batch: AttentionMetadata, **more: Any) -> Tensor:
        bounds = batch.query_start
        tokens, rows = int(bounds[-1]), int((bounds.diff() > 0).sum())
        assert (batch.slot_mapping[:tokens] >= 0).all()
        assert (batch.slot_mapping[tokens:] == -1).all()
        assert batch.max_query_len is None or int(bounds.diff().max()) <= batch.max_query_len
        assert more["window"] is None or dropped_blocks_are_gone(batch, more["window"])
        out = torch.zeros_like(q)
        if tokens == 0:
            return out
        widths = -(-batch.seq_lens[:rows] // batch.block_size)
        tables = torch.full((rows, int(widths.max())), -1, dtype=torch.int32)
        for row, (start, width) in enumerate(zip(batch.table_start, widths, strict=False)):
            tables[row, :width] = batch.block_tables[start : start + width]
        exact = AttentionMetadata(
            tables,
            bounds[: rows + 1].contiguous(),
            batch.seq_lens[:rows].contiguous(),
            batch.slot_mapping[:tokens].contiguous(),
            batch.block_size,
        )
        k, v = (None if x is None else x[:tokens] for x in (k, v))
        out[:tokens] = attention(q[:tokens], k, v, k_cache, v_cache, exact, **more)
        return out

    return attend


def without_padded_states(bind: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Recurrent layers that take neither padding nor marks by token."""

    def bind_exact(parts: Any) -> Any:
        layer, size = bind(parts), outputs_of(parts.shape)

        def mix(x: Tensor, gates: Any, states: LayerStates, batch: StateBatch) -> Tensor:
            if batch.marks.dim() == 2:
                return layer(x, gates, states, batch)
            bounds = batch.bounds
            tokens, rows = int(bounds[-1]), int((bounds.diff() > 0).sum())
            assert (batch.reads[rows:] == -1).all()
            assert (batch.marks[tokens:] == -1).all()
            out = torch.zeros(len(x), *size, dtype=x.dtype)
            if tokens:
                (at,) = torch.nonzero(batch.marks >= 0, as_tuple=True)
                marks = torch.stack((at.int(), batch.marks[at]), 1)
                slots = (part[:rows].contiguous() for part in (batch.reads, batch.writes))
                exact = StateBatch(bounds[: rows + 1].contiguous(), *slots, marks)
                given = x[:tokens], None if gates is None else gates[:tokens]
                out[:tokens] = layer(*given, states, exact)
            return out

        return mix

    return bind_exact


def outputs_of(shape: ConvShape | DeltaShape | Mamba2Shape) -> tuple[int, ...]:
    """The numbers that a recurrent layer gives for a token, by head if it has heads."""
    if isinstance(shape, ConvShape):
        return (shape.channels,)
    if isinstance(shape, DeltaShape):
        return shape.value_heads, shape.value_dim
    return shape.heads, shape.head_dim


def dropped_blocks_are_gone(batch: AttentionMetadata, window: int) -> bool:
    """Whether tables have -1 exactly for the blocks that no query of their row can see."""
    counts = batch.query_start.diff().tolist()
    for count, context, start in zip(
        counts, batch.seq_lens.tolist(), batch.table_start.tolist(), strict=True
    ):
        if count:
            table = batch.block_tables[start : start + -(-context // batch.block_size)]
            unseen = max(0, context - count - window + 1) // batch.block_size
            if (table[:unseen] != -1).any() or (table[unseen:] < 0).any():
                return False
    return True


def graph_executor(
    config,
    resolved,
    decoder: Decoder,
    store,
    table: InputBatch,
    disk: None = None,
    *,
    seed: int | None = None,
) -> GraphExecutor:
    """Stands in for ``make_executor``: fewer sizes, and on the CPU a device that sees nothing.

    Args:
        seed: of the order in which that device runs branches.
    """
    assert disk is None, "captured steps have no disk"
    if decoder.ops.describe()["paged_attention"] == "cpu":
        attention = without_padding(decoder.ops.paged_attention)
        decoder.ops = replace(decoder.ops, paged_attention=attention)
    steps = Steps(
        max_tokens=resolved.max_num_batched_tokens,
        max_samples=resolved.max_num_seqs * (1 + config.speculation),
        depth=steps_in_flight(config, "cuda"),
        capture=config.graphs,
        sizes=SIZES,
        lanes=LANES,
        leases=is_resident(config, decoder.device),
        halves=None if resolved.half_sizes is None else HalvesSetup(resolved.half_sizes),
    )
    device: Device = BlindDevice(table, seed)
    if decoder.device != "cpu":
        device = CudaDevice(decoder.device)
    attend = device_attention(config, decoder, table)
    tier = device_tier(store, resolved.host_blocks, device, attend, overlaps=config.overlaps)
    return GraphExecutor(decoder, store, table, device, steps, tier)


def use_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every engine that is built from now on run its steps as captured functions."""
    monkeypatch.setattr("weft.engine.build.make_executor", graph_executor)
    monkeypatch.setattr("weft.engine.build.load_model", load_on_tensors)


def load_on_tensors(*given: Any, ops: OpTable, **more: Any) -> Decoder:
    """``load_model`` for a decoder whose arrays are tensors, as executors of devices need them."""

    def pack(parameter: str, array: np.ndarray) -> Any:
        packed = ops.pack(parameter, array)
        return to_torch(packed) if isinstance(packed, np.ndarray) else packed

    more["kept"] = None  # mapped weights are not packed, and so no tensors
    kept: dict[str, Any] = {"pack": pack}
    if ops.describe()["paged_attention"] != "triton":
        kinds = ("delta", "conv", "mamba2")
        kept |= {kind: without_padded_states(getattr(ops, kind)) for kind in kinds}
        # Not of layers that are not wrapped.
        kept["fused"] = ops.fused and replace(ops.fused, mixes=False)
    return load_model(*given, ops=replace(ops, **kept), **more)


def around_forward(
    monkeypatch: pytest.MonkeyPatch,
    executor: Any,
    around: Callable[[Tensor, Callable[[], Tensor]], Tensor],
) -> None:
    """Have ``around`` called with the ids of each forward pass, and with what computes it.

    Functions captured for a GPU do not call it.
    """
    functions = getattr(executor, "_functions", None)
    holder = functions or executor
    compute = holder._compute

    def watched(*given: Any) -> Tensor:
        return around(given[0], lambda: compute(*given))

    def watched_into(ids: Tensor, positions: Tensor, groups: Any, told: Tensor, out: Any) -> None:
        def hidden() -> Tensor:
            compute(ids, positions, groups, told, out)
            return out

        out.copy_(around(known_ids(ids, told), hidden))

    monkeypatch.setattr(holder, "_compute", watched if functions is None else watched_into)
