"""Cases of paged attention: random caches, tables and queries, for tests of every kernel."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
from torch import Tensor

from weft.kernels.interface import AttentionMetadata
from weft.kernels.kv_storage import read_rows, row_size, write_rows

NAN = float("nan")
T = TypeVar("T", "Case", AttentionMetadata)


@dataclass(frozen=True)
class Shape:
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 64
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype = torch.float32
    fused: bool = False
    sinks: bool = False
    causal: bool = True


@dataclass(frozen=True)
class Case:
    q: Tensor
    k: Tensor | None
    v: Tensor | None
    k_cache: Tensor
    v_cache: Tensor
    batch: AttentionMetadata
    shape: Shape
    sinks: Tensor | None = None  # [H], of all sizes beside those of scores

    def run(self, kernel: object = None) -> Tensor:
        """Run a kernel, the CPU's by default, on copies of the caches: a case can be run again."""
        if kernel is None:
            from weft.kernels.cpu import attention as native

            kernel = native.paged_attention
        return self.run_in_place(kernel, self.k_cache.clone(), self.v_cache.clone())

    def run_in_place(self, kernel: object, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        assert callable(kernel)
        out = kernel(
            self.q,
            self.k,
            self.v,
            k_cache,
            v_cache,
            self.batch,
            scale=self.shape.head_size**-0.5,
            window=self.shape.window,
            softcap=self.shape.softcap,
            **({} if self.sinks is None else {"sinks": self.sinks}),
            **({} if self.shape.causal else {"causal": False}),
        )
        assert isinstance(out, Tensor)
        return out


def make_case(rows: list[tuple[int, int]], shape: Shape, seed: int = 0) -> Case:
    """Random inputs for rows of (query tokens, earlier tokens).

    Whatever no query may see holds NaN: positions out of every window, and the ends of blocks. The
    numbers are the same on every device.
    """
    with torch.device("cpu"):
        case = _case(rows, shape, seed)
    return _moved(replace(case, batch=_moved(case.batch)))


def _moved(parts: T) -> T:
    """The same with its tensors on the device where new ones are made."""
    where = torch.get_default_device()
    tensors = {f.name: getattr(parts, f.name) for f in fields(parts)}
    return replace(
        parts, **{name: x.to(where) for name, x in tensors.items() if isinstance(x, Tensor)}
    )


def _case(rows: list[tuple[int, int]], shape: Shape, seed: int) -> Case:
    random = torch.Generator().manual_seed(seed)
    size, counts = shape.block_size, [-(-(n + past) // shape.block_size) for n, past in rows]
    ids = torch.randperm(sum(counts) + 2, generator=random).int()  # two blocks belong to nobody
    tables = torch.full((len(rows), max(counts)), -1, dtype=torch.int32)
    row = row_size(shape.cache_dtype, shape.head_size)
    cache_shape = (len(ids), shape.kv_heads, size, row)
    k_cache, v_cache = (empty_cache(cache_shape, shape.cache_dtype) for _ in range(2))
    slots = []
    for row, (n, past) in enumerate(rows):
        blocks = ids[sum(counts[:row]) :][: counts[row]].long()
        first = 0 if shape.window is None else max(0, past + 1 - shape.window)
        tables[row, first // size : counts[row]] = blocks[first // size :].int()
        seen = torch.arange(first, past)
        numbers = torch.randn(2, len(seen), shape.kv_heads, shape.head_size, generator=random)
        if past > first:
            for cache, values in zip((k_cache, v_cache), numbers, strict=True):
                write_rows(cache, blocks[seen // size], seen % size, values)
        slots += [int(blocks[p // size]) * size + p % size for p in range(past, past + n)]
    q, k, v = fresh_tensors(len(slots), shape, random)
    batch = AttentionMetadata(
        block_tables=tables,
        query_start=torch.tensor([0, *(n for n, _ in rows)]).cumsum(0).int(),
        seq_lens=torch.tensor([n + past for n, past in rows], dtype=torch.int32),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        block_size=size,
    )
    sinks = 4 * torch.randn(shape.heads, generator=random) if shape.sinks else None
    return Case(q, k, v, k_cache, v_cache, batch, shape, sinks)


def empty_cache(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """NaN wherever nothing is written later: bytes that are one as a number and as a scale."""
    size = torch.empty(shape, dtype=dtype).nbytes
    return torch.full((size,), 255, dtype=torch.uint8).view(dtype).view(shape)


def same_numbers(a: Tensor, b: Tensor) -> bool:
    every = torch.arange(len(a))
    return torch.equal(read_rows(a, every).nan_to_num(9e9), read_rows(b, every).nan_to_num(9e9))


def fresh_tensors(
    tokens: int, shape: Shape, random: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    widths = (shape.heads, shape.kv_heads, shape.kv_heads)
    fused = torch.randn(tokens, sum(widths) * shape.head_size, generator=random).to(shape.dtype)
    parts = fused.split([n * shape.head_size for n in widths], dim=1)
    q, k, v = (part.unflatten(1, (-1, shape.head_size)) for part in parts)
    return (q, k, v) if shape.fused else (q.contiguous(), k.contiguous(), v.contiguous())


def only_row(case: Case, row: int) -> Case:
    """The same inputs with one row alone in the batch."""
    batch, tokens = case.batch, row_tokens(case, row)
    alone = replace(
        batch,
        block_tables=batch.block_tables[row : row + 1],
        query_start=torch.tensor([0, tokens.stop - tokens.start], dtype=torch.int32),
        seq_lens=batch.seq_lens[row : row + 1],
        slot_mapping=batch.slot_mapping[tokens],
    )
    assert case.k is not None
    assert case.v is not None
    return replace(case, q=case.q[tokens], k=case.k[tokens], v=case.v[tokens], batch=alone)


def row_tokens(case: Case, row: int) -> slice:
    return slice(int(case.batch.query_start[row]), int(case.batch.query_start[row + 1]))


def padded_batch(batch: AttentionMetadata, rows: int, tokens: int) -> AttentionMetadata:
    """The same rows, then padding; tables one after another in one flat tensor, last row first."""
    needed = (-(-batch.seq_lens // batch.block_size)).tolist()
    starts, flat = [0] * len(needed), [-7]
    for row in reversed(range(len(needed))):
        starts[row] = len(flat)
        flat += [*batch.block_tables[row, : needed[row]].tolist(), -9]
    total = int(batch.query_start[-1])

    def longer(values: Tensor, count: int, filler: int) -> Tensor:
        return torch.cat((values, torch.full((count,), filler, dtype=values.dtype)))

    return AttentionMetadata(
        block_tables=torch.tensor(flat, dtype=torch.int32),
        query_start=longer(batch.query_start, rows, total),
        seq_lens=longer(batch.seq_lens, rows, 10**9),
        slot_mapping=longer(batch.slot_mapping, tokens, -1),
        block_size=batch.block_size,
        table_start=longer(torch.tensor(starts, dtype=torch.int32), rows, 10**9),
        max_query_len=int((batch.query_start[1:] - batch.query_start[:-1]).max()),
    )
