"""Padded rows and tokens and ragged block tables: the reference gives the same as without."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from attention_cases import padded_batch
from depth import searching
from weft.kernels.interface import AttentionMetadata
from weft.kernels.kv_storage import read_rows, row_size
from weft.kernels.reference import paged_attention

SIZE, HEADS, KV_HEADS, DIM = 4, 4, 2, 8


def plain_batch(rows: list[tuple[int, int]]) -> AttentionMetadata:
    """Rows of (query tokens, earlier tokens) with blocks in falling order."""
    needed = [-(-(n + past) // SIZE) for n, past in rows]
    tables = torch.full((len(rows), max(needed)), -1, dtype=torch.int32)
    slots, free = [], sum(needed)
    for row, (n, past) in enumerate(rows):
        for index in range(needed[row]):
            free -= 1
            tables[row, index] = free
        slots += [int(tables[row, p // SIZE]) * SIZE + p % SIZE for p in range(past, past + n)]
    return AttentionMetadata(
        block_tables=tables,
        query_start=torch.tensor([0, *(n for n, _ in rows)]).cumsum(0).int(),
        seq_lens=torch.tensor([n + past for n, past in rows], dtype=torch.int32),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        block_size=SIZE,
    )


@searching(30)
@given(
    rows=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=4),
    pad_rows=st.integers(0, 3),
    pad_tokens=st.integers(0, 5),
    window=st.sampled_from([None, 1, 6]),
    dtype=st.sampled_from([torch.float32, torch.int8, torch.float8_e4m3fn]),
)
def test_padding_and_ragged_tables_change_nothing(
    rows: list[tuple[int, int]],
    pad_rows: int,
    pad_tokens: int,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    batch = plain_batch(rows)
    padded = padded_batch(batch, pad_rows, pad_tokens)
    blocks, tokens = int(batch.block_tables.max()) + 1, len(padded.slot_mapping)
    caches = [torch.zeros(blocks, KV_HEADS, SIZE, row_size(dtype, DIM), dtype=dtype)] * 2
    caches, others = [c.clone() for c in caches], [c.clone() for c in caches]
    q, k, v = (torch.randn(tokens, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    real = int(batch.query_start[-1])
    options = {"scale": 0.3, "window": window, "softcap": None}
    expected = paged_attention(q[:real], k[:real], v[:real], *caches, batch, **options)
    out = paged_attention(q, k, v, *others, padded, **options)
    assert torch.equal(out[:real], expected)
    assert not out[real:].any()
    every = torch.arange(blocks)
    for written, wanted in zip(others, caches, strict=True):
        assert torch.equal(read_rows(written, every), read_rows(wanted, every))
