"""Prompts whose KV lies on the host, but whose attention the device computes (NEO section 3.1).

In each layer the KV before a chunk comes to a scratch store of one layer; the device attends there,
and the blocks that the chunk has written leave for the host beside what follows. Prompts for which
the scratch store has not enough blocks at once take turns.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.core.plan import SubBatch
from weft.exec.device import Device, tensor_memory
from weft.exec.input_batch import InputBatch
from weft.exec.store import KVStore
from weft.kernels.arrays import dtype_name
from weft.kernels.block_arrays import BlockArrays
from weft.kernels.interface import AttentionMetadata
from weft.models.decoder import Decoder


@dataclass
class _Pairs:
    """Blocks of the host, and of the scratch store where their KV is meanwhile."""

    host: list[int]
    scratch: list[int]

    def add(self, host: NDArray[np.int32], scratch: NDArray[np.int32]) -> None:
        self.host += host.tolist()
        self.scratch += scratch.tolist()


@dataclass(frozen=True)
class _GroupPiece:
    """A KV group of some prompts.

    Attributes:
        before: blocks with KV that precedes the chunks.
        written: blocks that the chunks write.
        seen: both, for layers that read the KV of another one.
    """

    batch: AttentionMetadata
    before: _Pairs
    written: _Pairs
    seen: _Pairs


class HostPrompts:
    """The scratch store, which has the blocks of one longest sequence.

    Attributes:
        layers: KV of the host, by group and layer of the group.
        scratch: of the device, by group.
        most_blocks: of several prompts that have room at once.
    """

    def __init__(self, decoder: Decoder, host: KVStore, table: InputBatch, device: Device) -> None:
        self.decoder, self.device, self.block_size = decoder, device, host.block_size
        self._table = table
        self._windows = [group.window for group in decoder.spec.kv_groups]
        self.layers = [
            [BlockArrays(pair) for pair in zip(*of_group, strict=True)]
            for of_group in zip(host.keys, host.values, strict=True)
        ]
        memory = tensor_memory(str(device.where))
        self.scratch = [
            BlockArrays(
                [memory((blocks.shape[1], *t.shape[1:]), dtype_name(t.dtype)) for t in like.arrays]
            )
            for blocks, (like, *_) in zip(table.tables, self.layers, strict=True)
        ]

        self.most_blocks = min(arrays.num_blocks for arrays in self.scratch)

    def pieces(self, first: int, batch: SubBatch) -> list[PromptPiece]:
        """Return the attention of prompts, whose tokens begin at ``first`` of their sub-batch."""
        pieces, start, used = list[PromptPiece](), 0, 0
        for index in range(len(batch.rows)):
            blocks = -(-(batch.starts[index] + batch.counts[index]) // self.block_size)
            if used and used + blocks > self.most_blocks:
                pieces.append(PromptPiece(self, first, batch, range(start, index)))
                start, used = index, 0
                first = pieces[-1].end
            used += blocks
        if batch.rows:
            pieces.append(PromptPiece(self, first, batch, range(start, len(batch.rows))))
        return pieces

    def group_piece(self, group: int, batch: SubBatch, rows: Seq[int]) -> _GroupPiece:
        """Return where the rows at these places of a sub-batch have the KV of a group."""
        size, window, used = self.block_size, self._windows[group], 0
        before, written, seen = (_Pairs([], []) for _ in range(3))
        tables, slots = list[NDArray[np.int32]](), list[NDArray[np.int64]]()
        starts = list[int]()
        for i in rows:
            start, context = batch.starts[i], batch.starts[i] + batch.counts[i]
            width, own = -(-context // size), start // size
            gone = 0 if window is None else max(0, start - window + 1) // size
            host = self._table.tables[group][batch.rows[i], :width]
            scratch = np.full(width, -1, np.int32)
            scratch[gone:] = np.arange(used, used + width - gone)
            used += width - gone
            begun = -(-start // size)
            before.add(host[gone:begun], scratch[gone:begun])
            written.add(host[own:], scratch[own:])
            seen.add(host[gone:], scratch[gone:])
            starts.append(sum(len(table) for table in tables))
            tables.append(scratch)
            at = np.arange(start, context)
            slots.append(scratch[at // size].astype(np.int64) * size + at % size)
        counts = [batch.counts[i] for i in rows]
        lengths = [batch.starts[i] + batch.counts[i] for i in rows]
        return _GroupPiece(
            AttentionMetadata(
                block_tables=self._send(np.concatenate(tables)),
                query_start=self._send(np.cumsum([0, *counts], dtype=np.int32)),
                seq_lens=self._send(np.array(lengths, np.int32)),
                slot_mapping=self._send(np.concatenate(slots)),
                block_size=size,
                table_start=self._send(np.array(starts, np.int32)),
            ),
            before,
            written,
            seen,
        )

    def _send(self, numbers: NDArray[np.generic]) -> Tensor:
        return self.device.send(torch.from_numpy(numbers))


class PromptPiece:
    """Prompts that have room in the scratch store at once.

    Attributes:
        end: the token of the sub-batch behind theirs.
    """

    def __init__(self, on: HostPrompts, first: int, batch: SubBatch, rows: Seq[int]) -> None:
        self._on = on
        self.end = first + sum(batch.counts[i] for i in rows)
        self._tokens = slice(first, self.end)
        self._groups = [on.group_piece(group, batch, rows) for group in range(len(on.layers))]

    def attend(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, out: Tensor
    ) -> None:
        """Attend to the prompts, and write to ``out`` [N, H, D] and to the host."""
        on, tokens, params = self._on, self._tokens, self._on.decoder.attention_params(layer)
        group, scratch = self._groups[params.group], on.scratch[params.group]
        host, (keys, values) = on.layers[params.group][params.index], scratch.arrays
        on.device.join()  # what is in the scratch store has left
        read = group.seen if k is None else group.before
        if read.host:
            on.device.copy_blocks(host, scratch, read.host, read.scratch)
            on.device.join()
        out[tokens] = on.decoder.ops.paged_attention(
            q[tokens],
            None if k is None else k[tokens],
            None if v is None else v[tokens],
            keys,
            values,
            group.batch,
            scale=params.scale,
            window=params.window,
            softcap=params.softcap,
            sinks=on.decoder.sinks(layer),
        )
        if k is not None:
            on.device.copy_blocks(scratch, host, group.written.scratch, group.written.host)
