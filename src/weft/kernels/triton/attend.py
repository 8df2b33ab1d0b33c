"""The kernels of paged attention: split decode, its merge, and prefill of ragged rows.

All three share one loop over keys and values, FlashAttention's (Dao 2023, algorithm 1), whose rows
are the query heads of one KV head for some tokens: row m of a tile is head m % GROUP of token
m // GROUP. Scores are kept in powers of 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.triton.loop import bound
from weft.kernels.triton.storage import decode

LOG2_E = tl.constexpr(1.4426950408889634)
LEAST_SCORE = tl.constexpr(-1e30)  # finite, so that a tile without a visible key gives no NaN
DOUBLINGS = tl.constexpr(16)  # of a split: enough for contexts of 2^26 tokens


@triton.jit
def attend(
    q, query, keys, values, key_scales, value_scales, table, stride_kb, stride_vb,
    first, start, plain, stop, scale, softcap,
    DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_N: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Return unnormalised sums [M, PADDED], largest scores [M] and sums of weights [M].

    Args:
        q: [M, PADDED] queries, 0 beyond DIM; their type is that of the products' factors.
        query: [M] positions of the queries; -1 sees nothing.
        keys, values, key_scales, value_scales: the cache from this head's part of block 0 on; the
            scales None or the same memory as float32.
        first: positions before it are not read, nor are the blocks wholly before it.
        start, stop: the positions to read; start is a multiple of BLOCK_N.
        plain: with PLAIN, whole tiles up to here are seen by every query.
    """
    top = tl.full([q.shape[0]], LEAST_SCORE, tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    sums = tl.zeros(q.shape, tl.float32)
    if PLAIN:
        for at in tl.range(bound(start), bound(plain), BLOCK_N):
            sums, top, total = _step(
                q, query, keys, values, key_scales, value_scales, table, stride_kb, stride_vb,
                first, at, stop, scale, softcap, sums, top, total,
                DIM, BLOCK_SIZE, WINDOW, SOFTCAP, BLOCK_N, False,
            )  # fmt: skip
        start = plain
    for at in tl.range(bound(start), bound(stop), BLOCK_N):
        sums, top, total = _step(
            q, query, keys, values, key_scales, value_scales, table, stride_kb, stride_vb,
            first, at, stop, scale, softcap, sums, top, total,
            DIM, BLOCK_SIZE, WINDOW, SOFTCAP, BLOCK_N, True,
        )  # fmt: skip
    return sums, top, total


@triton.jit
def _step(
    q, query, keys, values, key_scales, value_scales, table, stride_kb, stride_vb,
    first, at, stop, scale, softcap, sums, top, total,
    DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Take BLOCK_N positions from ``at`` on into the running sums."""
    position = at + tl.arange(0, BLOCK_N)
    offset = position % BLOCK_SIZE
    dim = tl.arange(0, q.shape[1])[None, :]
    live = (position >= first) & (position < stop)
    if MASKED:
        block = tl.load(table + position // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
        mask = live[:, None] & (dim < DIM)
    else:
        block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
        mask = (position >= 0)[:, None] & (dim < DIM)
    row = (offset * DIM)[:, None] + dim
    k = tl.load(keys + (block * stride_kb)[:, None] + row, mask=mask, other=0.0)
    v = tl.load(values + (block * stride_vb)[:, None] + row, mask=mask, other=0.0)

    scores = tl.dot(q, tl.trans(decode(k, q.dtype)), input_precision="ieee")
    if key_scales is not None:
        scales = BLOCK_SIZE * DIM // 4 + offset
        factor = tl.load(key_scales + block * (stride_kb // 4) + scales, mask=live, other=0.0)
        scores *= (factor * scale)[None, :]
    else:
        scores *= scale
    if SOFTCAP:
        scores = softcap * (1 - 2 / (tl.exp2(scores * (2 * LOG2_E / softcap)) + 1))  # c tanh(s / c)
    scores *= LOG2_E
    if MASKED:
        visible = live[None, :] & (position[None, :] <= query[:, None])
        if WINDOW:
            visible &= position[None, :] > query[:, None] - WINDOW
        scores = tl.where(visible, scores, float("-inf"))

    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - new_top[:, None])
    fade = tl.exp2(top - new_top)
    total = total * fade + tl.sum(weights, 1)
    if value_scales is not None:
        factor = tl.load(value_scales + block * (stride_vb // 4) + scales, mask=live, other=0.0)
        if q.dtype == tl.float16:  # whose range small weights times small scales may leave
            v = (decode(v, tl.float32) * factor[:, None]).to(tl.float16)
        else:
            weights *= factor[None, :]
    sums = tl.dot(
        weights.to(q.dtype), decode(v, q.dtype), sums * fade[:, None], input_precision="ieee"
    )
    return sums, new_top, total


@triton.jit
def table_of(tables, table_start, stride_table, row):
    """Return where the block table of a row begins."""
    at = row.to(tl.int64) * stride_table if table_start is None else tl.load(table_start + row)
    return tables + at


@triton.jit
def load_queries(
    q, start, token, count, head, stride_qt, stride_qh,
    DIM: tl.constexpr, PADDED: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    TYPE: tl.constexpr,
):  # fmt: skip
    """Return a tile of queries [M, PADDED] from ``token`` of a row on, tokens [M] and a mask [M].

    Rows of the tile that are no query are 0.
    """
    m = tl.arange(0, BLOCK_M)
    token += m // GROUP
    real = (m < BLOCK_M // GROUP * GROUP) & (token < count)
    dim = tl.arange(0, PADDED)[None, :]
    at = (start + token).to(tl.int64) * stride_qt + (head * GROUP + m % GROUP) * stride_qh
    x = tl.load(q + at[:, None] + dim, mask=real[:, None] & (dim < DIM), other=0.0)
    return x.to(TYPE), token, real


@triton.jit
def store_outputs(
    out, x, start, token, real, head,
    HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Store a tile that was laid out by ``load_queries`` in out [T, H, D]."""
    m = tl.arange(0, x.shape[0])
    dim = tl.arange(0, PADDED)[None, :]
    at = (start + token).to(tl.int64) * (HEADS * DIM) + (head * GROUP + m % GROUP) * DIM
    tl.store(out + at[:, None] + dim, x.to(out.dtype.element_ty), mask=real[:, None] & (dim < DIM))


@triton.jit
def cut(
    context, count,
    WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Return the first position that a row sees, and begin, size and number of its splits.

    They depend on the row's own context alone: LEAST tokens, doubled until SPLITS are enough.
    """
    first = context * 0
    if WINDOW:
        first = tl.maximum(context - count - (WINDOW - 1), 0)
    begin = first // BLOCK_N * BLOCK_N
    sizes = LEAST << tl.arange(0, DOUBLINGS)
    size = LEAST << tl.sum((sizes < tl.cdiv(context - begin, SPLITS)).to(tl.int32), 0)
    return first, begin, size, tl.cdiv(context - begin, size)


@triton.jit
def first_place(start, row, rows, tokens, FEW: tl.constexpr):
    """The place of a row's first token in the workspace of min(tokens, rows * FEW) places."""
    return tl.where(tokens <= rows * FEW, start, row * FEW)


@triton.jit(do_not_specialize=["rows", "tokens", "stride_table"])
def decode_kernel(
    q, keys, values, key_scales, value_scales, tables, table_start, query_start, seq_lens,
    out, partial_sums, partial_stats,
    rows, tokens, stride_qt, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh, stride_table,
    scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, TYPE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Rows of at most BLOCK_M // GROUP tokens, whose splits some programs take in turn.

    Grid: rows, KV heads, these programs. A row of one split is finished here. Tokens of no row
    become 0.
    """
    FEW: tl.constexpr = BLOCK_M // GROUP
    row, head, program = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if program == 0:
        for token in range(bound(tl.load(query_start + rows) + row), bound(tokens), bound(rows)):
            zeros = tl.zeros([triton.next_power_of_2(GROUP), PADDED], tl.float32)
            g = tl.arange(0, triton.next_power_of_2(GROUP))
            store_outputs(out, zeros, token, g * 0, g < GROUP, head, HEADS, DIM, PADDED, GROUP)
    start = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - start
    if (count == 0) | (count > FEW):
        return
    context = tl.load(seq_lens + row)
    first, begin, size, splits = cut(context, count, WINDOW, BLOCK_N, SPLITS, LEAST)
    if program >= splits:
        return
    x, token, real = load_queries(
        q, start, 0, count, head, stride_qt, stride_qh, DIM, PADDED, GROUP, BLOCK_M, TYPE
    )
    query = tl.where(real, context - count + token, -1)
    table = table_of(tables, table_start, stride_table, row)
    keys += head.to(tl.int64) * stride_kh
    values += head.to(tl.int64) * stride_vh
    if key_scales is not None:
        key_scales += head.to(tl.int64) * (stride_kh // 4)
        value_scales += head.to(tl.int64) * (stride_vh // 4)
    for split in range(bound(program), bound(splits), bound(tl.num_programs(2))):
        low = begin + split * size
        high = tl.minimum(low + size, context)
        sums, top, total = attend(
            x, query, keys, values, key_scales, value_scales, table, stride_kb, stride_vb,
            first, low, low, high, scale, softcap,
            DIM, BLOCK_SIZE, WINDOW, SOFTCAP, BLOCK_N, False,
        )  # fmt: skip
        if splits == 1:
            result = sums / tl.where(real, total, 1.0)[:, None]
            store_outputs(out, result, start, token, real, head, HEADS, DIM, PADDED, GROUP)
        else:
            m = tl.arange(0, BLOCK_M)
            dim = tl.arange(0, PADDED)[None, :]
            place = first_place(start, row, rows, tokens, FEW) + token
            at = (place.to(tl.int64) * HEADS + head * GROUP + m % GROUP) * SPLITS + split
            mask = real[:, None] & (dim < DIM)
            tl.store(partial_sums + at[:, None] * DIM + dim, sums, mask=mask)
            tl.store(partial_stats + at * 2, top, mask=real)
            tl.store(partial_stats + at * 2 + 1, total, mask=real)


@triton.jit(do_not_specialize=["rows", "tokens"])
def merge_kernel(
    query_start, seq_lens, out, partial_sums, partial_stats, rows, tokens,
    HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Add up the splits of rows that have more than one, always all SPLITS in the same order.

    Grid: rows, query heads.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    start = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - start
    if (count == 0) | (count > FEW):
        return
    _, _, _, splits = cut(tl.load(seq_lens + row), count, WINDOW, BLOCK_N, SPLITS, LEAST)
    if splits == 1:
        return
    split = tl.arange(0, SPLITS)
    real = split < splits
    dim = tl.arange(0, PADDED)[None, :]
    for token in range(bound(start), bound(start + count)):
        place = first_place(start, row, rows, tokens, FEW) + token - start
        at = ((place + tl.zeros([SPLITS], tl.int64)) * HEADS + head) * SPLITS + split
        top = tl.load(partial_stats + at * 2, mask=real, other=LEAST_SCORE)
        total = tl.load(partial_stats + at * 2 + 1, mask=real, other=0.0)
        mask = real[:, None] & (dim < DIM)
        sums = tl.load(partial_sums + at[:, None] * DIM + dim, mask=mask, other=0.0)
        share = tl.exp2(top - tl.max(top, 0))
        result = tl.sum(sums * share[:, None], 0) / tl.sum(total * share, 0)
        where = (token + tl.zeros([PADDED], tl.int64)) * (HEADS * DIM) + head * DIM
        dims = tl.arange(0, PADDED)
        tl.store(out + where + dims, result.to(out.dtype.element_ty), mask=dims < DIM)


@triton.jit(do_not_specialize=["rows", "stride_table"])
def prefill_kernel(
    q, keys, values, key_scales, value_scales, tables, table_start, query_start, seq_lens, out,
    rows, stride_qt, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh, stride_table,
    scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, TYPE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Rows of more than FEW tokens, in tiles of BLOCK_M // GROUP tokens.

    Grid: T // tokens of a tile + rows, KV heads; later tiles, which have more to read, come first.
    Tile query_start[r] // tokens of a tile + r is the first of row r.
    """
    TILE: tl.constexpr = BLOCK_M // GROUP
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    row = tile * 0
    beyond = row + rows
    while beyond - row > 1:
        middle = (row + beyond) // 2
        later = tl.load(query_start + middle) // TILE + middle <= tile
        row = tl.where(later, middle, row)
        beyond = tl.where(later, beyond, middle)
    start = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - start
    begin = (tile - start // TILE - row) * TILE  # within the row's queries
    if (count <= FEW) | (begin >= count):
        return
    context = tl.load(seq_lens + row)
    position = context - count + begin
    stop = tl.minimum(position + TILE, context)
    first = position * 0
    if WINDOW:
        first = tl.maximum(position - (WINDOW - 1), 0)
    low = first // BLOCK_N * BLOCK_N
    plain = low if WINDOW else (position + 1) // BLOCK_N * BLOCK_N
    x, token, real = load_queries(
        q, start, begin, count, head, stride_qt, stride_qh, DIM, PADDED, GROUP, BLOCK_M, TYPE
    )
    query = tl.where(real, context - count + token, -1)
    table = table_of(tables, table_start, stride_table, row)
    keys += head.to(tl.int64) * stride_kh
    values += head.to(tl.int64) * stride_vh
    if key_scales is not None:
        key_scales += head.to(tl.int64) * (stride_kh // 4)
        value_scales += head.to(tl.int64) * (stride_vh // 4)
    sums, _, total = attend(
        x, query, keys, values, key_scales, value_scales, table, stride_kb, stride_vb,
        first, low, plain, stop, scale, softcap,
        DIM, BLOCK_SIZE, WINDOW, SOFTCAP, BLOCK_N, WINDOW == 0,
    )  # fmt: skip
    result = sums / tl.where(real, total, 1.0)[:, None]
    store_outputs(out, result, start, token, real, head, HEADS, DIM, PADDED, GROUP)
