"""A small paged KV cache around a decoder: the least that a model can be proved with."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from weft.core.plan import StateRow, SubBatch
from weft.exec.states import StateStore, state_batch
from weft.kernels.arrays import Array, numpy_dtype, to_numpy, to_torch
from weft.kernels.delta import StateBatch
from weft.kernels.interface import AttentionMetadata
from weft.models.decoder import Decoder

Rows = list[tuple[str, list[int]]]  # the next tokens of each sequence of a step


@dataclass
class _Group:
    """One KV group: caches by layer, and free block ids in random order."""

    window: int | None
    block_size: int
    keys: Array  # [layers, blocks, Hkv, block_size, D]
    values: Array
    free: list[int]
    tables: dict[str, list[int]] = field(default_factory=dict)

    def extend(self, name: str, length: int) -> list[int]:
        table = self.tables.setdefault(name, [])
        while len(table) * self.block_size < length:
            table.append(self.free.pop())
        return table

    def drop_head(self, name: str, computed: int) -> None:
        """Free the blocks that no later query can see, and poison them."""
        if self.window is None:
            return
        table = self.tables[name]
        for index in range(max(0, computed - self.window + 1) // self.block_size):
            if table[index] >= 0:
                self.keys[:, table[index]] = self.values[:, table[index]] = float("nan")
                self.free.insert(0, table[index])
                table[index] = -1


class PagedRunner:
    """Runs ragged steps through a decoder with shuffled blocks; unwritten cache is NaN.

    Args:
        bound: run the whole pass as one native call.
    """

    def __init__(
        self, decoder: Decoder, *, blocks: int = 64, block_size: int = 16, bound: bool = False
    ) -> None:
        self.decoder = decoder
        self.lengths: dict[str, int] = {}
        self.groups = []
        shuffle = random.Random(7)
        for group in decoder.spec.kv_groups:
            shape = (len(group.layers), blocks, group.num_kv_heads, block_size, group.head_dim)
            free = list(range(blocks))
            shuffle.shuffle(free)
            kind = numpy_dtype(decoder.dtype)
            arrays = [self._wrap(np.full(shape, np.nan, kind)) for _ in range(group.arrays)]
            keys, values = arrays[0], arrays[-1]
            self.groups.append(_Group(group.window, block_size, keys, values, free))
        self._states = None
        if decoder.spec.states is not None:
            names = 2 * blocks
            garbage = partial(_garbage, self._wrap)
            self._states = StateStore(decoder.spec, names, garbage)
        self._slots: dict[str, tuple[int, int]] = {}  # what a sequence reads and writes next
        self._stack = None
        if bound:
            self._stack = decoder.bind(
                [g.keys for g in self.groups],
                [g.values for g in self.groups],
                None if self._states is None else self._states.layers,
            )
            assert self._stack is not None

    def step(self, rows: Rows) -> list[Tensor]:
        """Compute the next tokens of each row; return the float32 logits [n, V] of each."""
        starts = [self.lengths.get(name, 0) for name, _ in rows]
        batches = [self._batch(group, rows, starts) for group in self.groups]
        ids = self._wrap(np.array([token for _, tokens in rows for token in tokens], np.int64))
        places = [
            start + i
            for start, (_, tokens) in zip(starts, rows, strict=True)
            for i in range(len(tokens))
        ]
        positions = self._wrap(np.array(places, np.int64))
        states = self._state_batch(rows, starts)
        if self._stack is None:
            hidden = self.decoder.forward(ids, positions, self._attend(batches, states))
        elif states is not None:
            hidden = self._stack.run_recurrent(ids, positions, batches, states)
        else:
            hidden = self._stack.run(ids, positions, batches)
        for start, (name, tokens) in zip(starts, rows, strict=True):
            self.lengths[name] = start + len(tokens)
            for group in self.groups:
                group.drop_head(name, self.lengths[name])
        logits = to_torch(to_numpy(self.decoder.logits(hidden)))
        return list(logits.split([len(tokens) for _, tokens in rows]))

    def _wrap(self, array: np.ndarray) -> Array:
        """An array as the decoder takes it."""
        return array if self.decoder.on_numpy else to_torch(array).to(self.decoder.device)

    def _state_batch(self, rows: Rows, starts: list[int]) -> StateBatch | None:
        """Two slots a sequence, which it reads and writes in turns."""
        if self._states is None:
            return None
        states = []
        for name, _ in rows:
            read, write = self._slots.get(name, (-1, 2 * len(self._slots)))
            states.append(StateRow(read, write))
            self._slots[name] = (write, write ^ 1)
        counts = tuple(len(tokens) for _, tokens in rows)
        batch = SubBatch(tuple(range(len(rows))), tuple(starts), counts, (), states=tuple(states))
        return state_batch(batch, self._wrap)

    def _attend(self, batches: list[AttentionMetadata], states: StateBatch | None):
        def attend(layer, q, k, v):
            if self._states is not None and layer in self._states.layers:
                return self.decoder.mix(layer, q, k, self._states.layers[layer], states)
            params = self.decoder.attention_params(layer)
            group = self.groups[params.group]
            return self.decoder.ops.paged_attention(
                q,
                k,
                v,
                group.keys[params.index],
                group.values[params.index],
                batches[params.group],
                scale=params.scale,
                window=params.window,
                softcap=params.softcap,
                sinks=self.decoder.sinks(layer),
                value_dim=params.value_dim,
            )

        return attend

    def _batch(self, group: _Group, rows: Rows, starts: list[int]) -> AttentionMetadata:
        tables, bounds, slots, contexts = [], [0], [], []
        for start, (name, tokens) in zip(starts, rows, strict=True):
            table = group.extend(name, start + len(tokens))
            tables.append(list(table))
            bounds.append(bounds[-1] + len(tokens))
            contexts.append(start + len(tokens))
            for position in range(start, start + len(tokens)):
                block, offset = divmod(position, group.block_size)
                slots.append(table[block] * group.block_size + offset)
        width = max(len(table) for table in tables)
        padded = [table + [-1] * (width - len(table)) for table in tables]
        return AttentionMetadata(
            block_tables=self._wrap(np.array(padded, np.int32)),
            query_start=self._wrap(np.array(bounds, np.int32)),
            seq_lens=self._wrap(np.array(contexts, np.int32)),
            slot_mapping=self._wrap(np.array(slots, np.int64)),
            block_size=group.block_size,
        )


def _garbage(wrap, shape, dtype: str) -> Array:
    return wrap(np.full(shape, np.nan, dtype))


def run_chunks(runner: PagedRunner, name: str, tokens: list[int], chunk: int) -> Tensor:
    """Return the logits [n, V] of a sequence computed ``chunk`` tokens at a time."""
    parts = [tokens[i : i + chunk] for i in range(0, len(tokens), chunk)]
    return torch.cat([runner.step([(name, part)])[0] for part in parts])
