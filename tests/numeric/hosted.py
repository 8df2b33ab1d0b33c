"""Random rows that cross layers whose attention a host worker computes, and what is to come out."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from weft.core.kv_types import row_size
from weft.kernels.arrays import Array, numpy_dtype
from weft.kernels.cpu import attention
from weft.kernels.cpu.host import HostLayer, HostMailbox, SharedMemory
from weft.kernels.interface import AttentionMetadata

WAIT_S = 60.0  # longer than any test takes


@dataclass(frozen=True)
class Shape:
    rows: int = 12
    longest: int = 300
    tokens: int = 2
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    block_size: int = 16
    softcap: float | None = None
    dtype: str = "float32"
    cache_dtype: str = "float32"


class Hosted:
    """Three layers over the KV of a host: full, sliding with sinks and block tables of its own, and
    one that reads the KV of the first."""

    def __init__(self, shape: Shape, seed: int = 0, *, filled: bool = True) -> None:
        self.shape, self.numbers = shape, np.random.default_rng(seed)
        size = shape.block_size
        self.contexts = self.numbers.integers(1, shape.longest, shape.rows)
        self.width = -(-(shape.longest + shape.tokens) // size)
        blocks = shape.rows * self.width + 1
        cache = (blocks, shape.kv_heads, size, row_size(shape.cache_dtype, shape.head_dim))
        each = int(np.prod(cache)) * numpy_dtype(shape.cache_dtype).itemsize
        self.kv = SharedMemory.create("kv", 4 * each)
        caches = [self.kv.array(i * each, cache, shape.cache_dtype) for i in range(4)]
        self.tables = [
            self.numbers.permutation(blocks - 1).astype(np.int32).reshape(shape.rows, self.width)
            for _ in range(2)
        ]
        first = HostLayer(*caches[:2], shape.heads, shape.head_dim**-0.5, softcap=shape.softcap)
        sinks = tuple(float(i) - 2.0 for i in range(shape.heads))
        self.layers = [
            first,
            replace(
                first,
                k_cache=caches[2],
                v_cache=caches[3],
                group=1,
                window=40,
                softcap=None,
                sinks=sinks,
            ),
            replace(first, writes=False),
        ]
        for layer in self.layers[: 2 * filled]:
            self._fill(layer, blocks)
        # What no query sees may be anything.
        for row, context in enumerate(self.contexts):
            self.tables[1][row, : max(0, int(context) - 40) // size] = -1

    def _fill(self, layer: HostLayer, blocks: int) -> None:
        size = self.shape.block_size
        batch = AttentionMetadata(
            np.arange(blocks, dtype=np.int32)[:, None],
            np.arange(blocks + 1, dtype=np.int32) * size,
            np.full(blocks, size, np.int32),
            np.arange(blocks * size, dtype=np.int64),
            size,
        )
        k, v = (self._random(blocks * size, self.shape.kv_heads) for _ in range(2))
        attend(layer, self._random(blocks * size, self.shape.heads), k, v, batch)

    def _random(self, rows: int, heads: int) -> Array:
        shape = (rows, heads, self.shape.head_dim)
        return self.numbers.standard_normal(shape, np.float32).astype(numpy_dtype(self.shape.dtype))

    def inputs(self, token: int, layer: int) -> tuple[Array, Array | None, Array | None]:
        """q, k and v of all rows."""
        self.numbers = np.random.default_rng((token, layer))
        q = self._random(self.shape.rows, self.shape.heads)
        if not self.layers[layer].writes:
            return q, None, None
        return q, *(self._random(self.shape.rows, self.shape.kv_heads) for _ in range(2))

    def expected(self) -> tuple[dict[tuple[int, int], Array], list[Array]]:
        """Results of all rows by token and layer, and the caches after that, by direct calls."""
        own = [[layer.k_cache.copy(), layer.v_cache.copy()] for layer in self.layers[:2]]
        own.append(own[0])
        results = {}
        for token in range(self.shape.tokens):
            for i, layer in enumerate(self.layers):
                copied = replace(layer, k_cache=own[i][0], v_cache=own[i][1])
                batch = self._batch(layer.group, token)
                results[token, i] = attend(copied, *self.inputs(token, i), batch)
        return results, own[0] + own[1]

    def _batch(self, group: int, token: int) -> AttentionMetadata:
        size, positions = self.shape.block_size, self.contexts + token - 1
        tables, rows = self.tables[group], np.arange(self.shape.rows)
        slots = tables[rows, positions // size].astype(np.int64) * size + positions % size
        starts = np.arange(self.shape.rows + 1, dtype=np.int32)
        return AttentionMetadata(tables, starts, (positions + 1).astype(np.int32), slots, size)

    def mailbox(self, slots: int = 0) -> HostMailbox:
        return HostMailbox.create(
            self.layers,
            slots=slots or self.shape.rows,
            table_width=self.width,
            dtype=self.shape.dtype,
        )

    def begin(self, mailbox: HostMailbox, slots: list[int], rows: list[int], token: int) -> None:
        contexts = self.contexts[rows] + token
        mailbox.begin(slots, contexts, [table[rows] for table in self.tables])

    def submit(
        self, mailbox: HostMailbox, slots: list[int], rows: list[int], token: int, layer: int
    ) -> None:
        chosen = [None if x is None else x[rows] for x in self.inputs(token, layer)]
        mailbox.submit(slots, layer, *chosen)

    def caches(self) -> list[Array]:
        return [x for layer in self.layers[:2] for x in (layer.k_cache, layer.v_cache)]


def attend(
    layer: HostLayer, q: Array, k: Array | None, v: Array | None, batch: AttentionMetadata
) -> Array:
    """A direct call of the kernel."""
    return attention.paged_attention(
        q, k, v, layer.k_cache, layer.v_cache, batch,
        scale=layer.scale, window=layer.window, softcap=layer.softcap,
        sinks=np.array(layer.sinks, np.float32) if layer.sinks else None,
    )  # fmt: skip


def assert_same(hosted: Hosted, mailbox: HostMailbox, **options: Any) -> None:
    """``cross`` gives the very bits of direct calls, and leaves those in the caches."""
    expected, caches = hosted.expected()
    found = cross(hosted, mailbox, **options)
    assert len(found) == hosted.shape.rows * len(expected)
    for (row, token, layer), result in found.items():
        np.testing.assert_array_equal(bits(result), bits(expected[token, layer][row]))
    for actual, wanted in zip(hosted.caches(), caches, strict=True):
        np.testing.assert_array_equal(bits(actual), bits(wanted))
    assert set(mailbox.states()) == {"empty"}


def bits(x: Array) -> Array:
    return np.ascontiguousarray(x).view(np.uint8)


def cross(
    hosted: Hosted,
    mailbox: HostMailbox,
    seed: int = 0,
    disturb: Callable[[int], object] | None = None,
) -> dict[tuple[int, int, int], Array]:
    """Take all rows through all tokens and layers; return the results by row, token and layer.

    Which rows go on, how many at once, through which slots, and which takes are undone is random.

    Args:
        disturb: called with the number of results so far after each take.
    """
    dice = random.Random(seed)
    shape, last = hosted.shape, len(hosted.layers) - 1
    free = dice.sample(range(mailbox.slots), mailbox.slots)
    idle = dict.fromkeys(range(shape.rows), 0)  # row -> its next token
    at: dict[int, tuple[int, int]] = {}  # slot -> row, token
    found = {}
    while idle or at:
        starting = dice.sample(sorted(idle), min(len(idle), len(free), dice.randint(1, 5)))
        for row in starting:
            slot, token = free.pop(), idle.pop(row)
            at[slot] = row, token
            hosted.begin(mailbox, [slot], [row], token)
            hosted.submit(mailbox, [slot], [row], token, 0)
        assert mailbox.wait(WAIT_S)
        assert mailbox.failed() == {}
        layer = dice.choice(np.flatnonzero(mailbox.done_counts()).tolist())
        slots = mailbox.done(layer, dice.randint(1, 8)).tolist()
        out = mailbox.take(slots, layer)
        if dice.random() < 0.2:
            mailbox.put_back(slots)
            continue
        for slot, result in zip(slots, out, strict=True):
            row, token = at[slot]
            found[row, token, layer] = result
            if layer < last:
                hosted.submit(mailbox, [slot], [row], token, layer + 1)
                continue
            mailbox.release([slot])
            free.append(slot)
            del at[slot]
            if token + 1 < shape.tokens:
                idle[row] = token + 1
        if disturb is not None:
            disturb(len(found))
    return found
