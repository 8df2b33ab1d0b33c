"""The kernels of paged attention: split decode by a work list, and prefill of ragged rows.

Both share one loop over keys and values, FlashAttention's (Dao 2023, algorithm 1), whose rows
are the query heads of one KV head for some tokens: row m of a tile is head m % GROUP of token
m // GROUP. Scores are kept in powers of 2.

Latent attention has one row of the cache for all heads (DeepSeek-V2 2024, section 2.1): its last
VALUE of DIM numbers are the value, and are loaded once. The numbers before them, which are of the
key alone, have a product of their own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.triton import pdl
from weft.kernels.triton.loop import bound
from weft.kernels.triton.storage import decode, factors
from weft.kernels.triton.work_list import load_item, turn_of, turns_of

LOG2_E = tl.constexpr(1.4426950408889634)
LEAST_SCORE = tl.constexpr(-1e30)  # finite, so that a tile without a visible key gives no NaN


@triton.jit
def attend(
    q, of_keys, query, keys, values, key_scales, value_scales, table, stride_kb, stride_vb,
    first, start, plain, stop, scale, softcap,
    DIM: tl.constexpr, VALUE: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, BLOCK_N: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Return unnormalised sums [M, PADDED], largest scores [M] and sums of weights [M].

    Args:
        q: [M, PADDED] queries, 0 beyond VALUE; their type is that of the products' factors.
        of_keys: [M, N] what queries have for the numbers that are of keys alone, 0 beyond
            DIM - VALUE; not looked at if there are none.
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
                q, of_keys, query, keys, values, key_scales, value_scales, table, stride_kb,
                stride_vb, first, at, stop, scale, softcap, sums, top, total,
                DIM, VALUE, BLOCK_SIZE, WINDOW, SOFTCAP, BLOCK_N, False,
            )  # fmt: skip
        start = plain
    for at in tl.range(bound(start), bound(stop), BLOCK_N):
        sums, top, total = _step(
            q, of_keys, query, keys, values, key_scales, value_scales, table, stride_kb,
            stride_vb, first, at, stop, scale, softcap, sums, top, total,
            DIM, VALUE, BLOCK_SIZE, WINDOW, SOFTCAP, BLOCK_N, True,
        )  # fmt: skip
    return sums, top, total


@triton.jit
def _step(
    q, of_keys, query, keys, values, key_scales, value_scales, table, stride_kb, stride_vb,
    first, at, stop, scale, softcap, sums, top, total,
    DIM: tl.constexpr, VALUE: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Take BLOCK_N positions from ``at`` on into the running sums."""
    BEFORE: tl.constexpr = DIM - VALUE  # numbers of a row that are of the key alone
    place = tl.arange(0, BLOCK_N)
    position = at + place
    # A tile begins with a block. With a window, what could stay the same takes too many registers.
    if BLOCK_N % BLOCK_SIZE == 0 and (WINDOW == 0 or key_scales is not None):
        offset = place % BLOCK_SIZE
        entry = table + at // BLOCK_SIZE + place // BLOCK_SIZE
    else:
        offset = position % BLOCK_SIZE
        entry = table + position // BLOCK_SIZE
    dim = tl.arange(0, q.shape[1])[None, :]
    live = (position >= first) & (position < stop)
    if MASKED:
        block = tl.load(entry, mask=live, other=0).to(tl.int64)
    else:
        block = tl.load(entry).to(tl.int64)
    # Integers are numbers: those that are not to be seen, perhaps of block 0, have no weight.
    ROWS: tl.constexpr = MASKED and keys.dtype.element_ty != tl.int8
    row = (offset * DIM)[:, None]
    at_keys = keys + (block * stride_kb)[:, None] + row
    k = _rows(at_keys + BEFORE + dim, live, dim, VALUE, ROWS)
    if BEFORE:
        early = tl.arange(0, of_keys.shape[1])[None, :]
        r = _rows(at_keys + early, live, early, BEFORE, ROWS)
        v = decode(k, q.dtype)
        scores = tl.dot(of_keys, tl.trans(decode(r, q.dtype)), input_precision="ieee")
        scores = tl.dot(q, tl.trans(v), scores, input_precision="ieee")
    else:
        at_values = values + (block * stride_vb)[:, None] + row
        v = _rows(at_values + dim, live, dim, VALUE, ROWS)
        scores = tl.dot(q, tl.trans(factors(k, q.dtype, False)), input_precision="ieee")
    if key_scales is not None:
        factor = _scales(
            key_scales, table, block, offset, live, first, at, stop, stride_kb,
            DIM, BLOCK_SIZE, BLOCK_N,
        )  # fmt: skip
        scores *= (factor * scale)[None, :]
    elif SOFTCAP:
        scores *= scale
    if SOFTCAP:
        scores = softcap * (1 - 2 / (tl.exp2(scores * (2 * LOG2_E / softcap)) + 1))  # c tanh(s / c)
    turn = LOG2_E if SOFTCAP or key_scales is not None else scale * LOG2_E
    if MASKED:
        visible = live[None, :] & (position[None, :] <= query[:, None])
        if WINDOW:
            visible &= position[None, :] > query[:, None] - WINDOW
        scores = tl.where(visible, scores, float("-inf"))

    # Fused where it says so: else the compiler would, of unmasked scores alone, and the bits of a
    # token would depend on where a prompt is cut.
    new_top = tl.maximum(top, tl.max(scores, 1) * turn)
    weights = tl.exp2(tl.fma(scores, turn, -new_top[:, None]))
    fade = tl.exp2(top - new_top)
    total = tl.fma(total, fade, tl.sum(weights, 1))
    if value_scales is not None:
        if BEFORE == 0:
            factor = _scales(
                value_scales, table, block, offset, live, first, at, stop, stride_vb,
                DIM, BLOCK_SIZE, BLOCK_N,
            )  # fmt: skip
        if q.dtype == tl.float16:  # whose range small weights times small scales may leave
            v = (decode(v, tl.float32) * factor[:, None]).to(tl.float16)
        else:
            weights *= factor[None, :]
    # Products of 64 rows and more take the values from shared memory, whoever converts them.
    v = factors(v, q.dtype, q.shape[0] < 64)
    sums = tl.dot(weights.to(q.dtype), v, sums * fade[:, None], input_precision="ieee")
    return sums, new_top, total


@triton.jit
def _rows(at, live, dim, SIZE: tl.constexpr, MASKED: tl.constexpr):
    """Load the first SIZE numbers of rows [N, M] and 0 behind them; with MASKED of live rows."""
    if dim.shape[1] == SIZE:
        return tl.load(at, mask=live[:, None], other=0.0) if MASKED else tl.load(at)
    inside = dim < SIZE
    return tl.load(at, mask=live[:, None] & inside if MASKED else inside, other=0.0)


@triton.jit
def _scales(
    scales, table, block, offset, live, first, at, stop, stride,
    DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Load the scales [N] of the rows from ``at`` on; 0 of those that are not live.

    The scales of a block lie together: in whole blocks a few threads load them, several at once.
    """
    if BLOCK_N % BLOCK_SIZE == 0:
        number = at // BLOCK_SIZE + tl.arange(0, BLOCK_N // BLOCK_SIZE)
        there = (number * BLOCK_SIZE < stop) & ((number + 1) * BLOCK_SIZE > first)
        listed = tl.load(table + number, mask=there, other=0).to(tl.int64) * (stride // 4)
        within = BLOCK_SIZE * DIM // 4 + tl.arange(0, BLOCK_SIZE)
        factor = tl.reshape(tl.load(scales + listed[:, None] + within[None, :]), [BLOCK_N])
        return tl.where(live, factor, 0.0)
    where = scales + block * (stride // 4) + (BLOCK_SIZE * DIM // 4 + offset)
    return tl.load(where, mask=live, other=0.0)


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
def load_rows(
    q, start, token, count, head, stride_qt, stride_qh,
    DIM: tl.constexpr, VALUE: tl.constexpr, PADDED: tl.constexpr, EARLY: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Return what ``load_queries`` does, and in front the numbers for keys alone [M, EARLY]."""
    BEFORE: tl.constexpr = DIM - VALUE
    x, tokens, real = load_queries(
        q + BEFORE, start, token, count, head, stride_qt, stride_qh,
        VALUE, PADDED, GROUP, BLOCK_M, TYPE,
    )  # fmt: skip
    early = x
    if BEFORE:
        early, _, _ = load_queries(
            q, start, token, count, head, stride_qt, stride_qh, BEFORE, EARLY, GROUP, BLOCK_M, TYPE
        )
    return early, x, tokens, real


@triton.jit
def store_outputs(
    out, x, start, token, real, head, first,
    HEADS: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Store a tile that was laid out by ``load_queries`` in the last VALUE of out [T, H, D].

    Args:
        first: of the VALUE numbers the first that is in the tile.
    """
    m = tl.arange(0, x.shape[0])
    dim = first + tl.arange(0, x.shape[1])[None, :]
    at = (start + token).to(tl.int64) * (HEADS * DIM) + (head * GROUP + m % GROUP) * DIM
    to = out + (DIM - VALUE) + at[:, None] + dim
    tl.store(to, x.to(out.dtype.element_ty), mask=real[:, None] & (dim < VALUE))


@triton.jit
def first_place(start, row, rows, tokens, FEW: tl.constexpr):
    """The place of a row's first token in the workspace of min(tokens, rows * FEW) places."""
    return tl.where(tokens <= rows * FEW, start, row * FEW)


@triton.jit
def clear(out, token, tokens, step, HEADS: tl.constexpr, DIM: tl.constexpr, AT_ONCE: tl.constexpr):
    """Store 0 for every ``step``-th token from ``token`` on."""
    for empty in range(bound(token), bound(tokens), bound(step)):
        for at in range(0, HEADS * DIM, AT_ONCE):
            number = at + tl.arange(0, AT_ONCE)
            where = (tl.zeros([AT_ONCE], tl.int64) + empty) * (HEADS * DIM) + number
            zeros = tl.zeros([AT_ONCE], out.dtype.element_ty)
            tl.store(out + where, zeros, mask=number < HEADS * DIM)


@triton.jit(do_not_specialize=["rows", "tokens", "stride_table"])
def decode_kernel(
    q, keys, values, key_scales, value_scales, tables, table_start, query_start,
    items, arrived, out, partial_sums, partial_stats,
    rows, tokens, stride_qt, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh, stride_table,
    scale, softcap, sinks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr,
    PADDED: tl.constexpr, EARLY: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, TYPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr, SLICE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute the items of a list: each for every KV head is a piece of work.

    Grid: any number of programs, which share the work. A row of one split is finished at once; of
    several, by whoever computes the last one, SLICE numbers at a time. Tokens of no row become 0.
    """
    FEW: tl.constexpr = BLOCK_M // GROUP
    KV_HEADS: tl.constexpr = HEADS // GROUP
    pdl.wait(PDL)
    pdl.launch_dependents(PDL)
    program, programs = tl.program_id(0), tl.num_programs(0)
    for turn in range(bound(turns_of(tl.load(items) * KV_HEADS, program, programs))):
        work = turn_of(turn, program, programs)
        head = work % KV_HEADS
        row, start, count, context, low, high, split, splits = load_item(items, work // KV_HEADS)
        first = low * 0
        if WINDOW:
            first = tl.maximum(context - count - (WINDOW - 1), 0)
        early, x, token, real = load_rows(
            q, start, 0, count, head, stride_qt, stride_qh,
            DIM, VALUE, PADDED, EARLY, GROUP, BLOCK_M, TYPE,
        )  # fmt: skip
        query = tl.where(real, context - count + token, -1)
        table = table_of(tables, table_start, stride_table, row)
        k_scales, v_scales = key_scales, value_scales
        if key_scales is not None:
            k_scales += head.to(tl.int64) * (stride_kh // 4)
            v_scales += head.to(tl.int64) * (stride_vh // 4)
        sums, top, total = attend(
            x, early, query,
            keys + head.to(tl.int64) * stride_kh, values + head.to(tl.int64) * stride_vh,
            k_scales, v_scales, table, stride_kb, stride_vb, first, low, low, high, scale, softcap,
            DIM, VALUE, BLOCK_SIZE, WINDOW, SOFTCAP, BLOCK_N, False,
        )  # fmt: skip
        if splits == 1:
            result = divide(sums, top, total, real, sinks, head, GROUP)
            store_outputs(out, result, start, token, real, head, 0, HEADS, DIM, VALUE, GROUP)
        else:
            m = tl.arange(0, BLOCK_M)
            dim = tl.arange(0, PADDED)[None, :]
            place = first_place(start, row, rows, tokens, FEW) + token
            at = (place.to(tl.int64) * HEADS + head * GROUP + m % GROUP) * SPLITS
            mask = real[:, None] & (dim < VALUE)
            tl.store(partial_sums + (at + split)[:, None] * VALUE + dim, sums, mask=mask)
            tl.store(partial_stats + (at + split) * 2, top, mask=real)
            tl.store(partial_stats + (at + split) * 2 + 1, total, mask=real)
            tl.debug_barrier()  # all threads have stored before one of them says so
            counter = arrived + row * KV_HEADS + head
            if tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1:
                tl.store(counter, 0)
                for column in range(0, PADDED, SLICE):
                    whole, most, weight = merge(
                        partial_sums, partial_stats, at, real, splits, column, VALUE, SLICE, SPLITS
                    )
                    result = divide(whole, most, weight, real, sinks, head, GROUP)
                    store_outputs(
                        out, result, start, token, real, head, column, HEADS, DIM, VALUE, GROUP
                    )
    clear(out, tl.load(query_start + rows) + program, tokens, programs, HEADS, DIM, 1024)


@triton.jit
def merge(
    partial_sums, partial_stats, at, real, splits, first,
    DIM: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Return what splits have summed up at ``at`` [M], in their order, as ``attend`` does.

    It is read from the L2 cache, where other programs have written it.

    Args:
        first: of the DIM numbers of sums the first of WIDTH that are merged.
    """
    split = tl.arange(0, SPLITS)[None, :]
    every = partial_stats + (at[:, None] + split) * 2
    whole = real[:, None] & (split < splits)
    tops = tl.load(every, mask=whole, other=LEAST_SCORE, cache_modifier=".cg")
    totals = tl.load(every + 1, mask=whole, other=0.0, cache_modifier=".cg")
    top = tl.max(tops, 1)
    total = tl.sum(totals * tl.exp2(tops - top[:, None]), 1)
    sums = tl.zeros([at.shape[0], WIDTH], tl.float32)
    for i in range(0, bound(splits), 4):  # all of four is on its way before any of it is needed
        a, score_a = _part(partial_sums, partial_stats, at, real, i, splits, first, DIM, WIDTH)
        b, score_b = _part(partial_sums, partial_stats, at, real, i + 1, splits, first, DIM, WIDTH)
        c, score_c = _part(partial_sums, partial_stats, at, real, i + 2, splits, first, DIM, WIDTH)
        d, score_d = _part(partial_sums, partial_stats, at, real, i + 3, splits, first, DIM, WIDTH)
        sums += a * tl.exp2(score_a - top)[:, None]
        sums += b * tl.exp2(score_b - top)[:, None]
        sums += c * tl.exp2(score_c - top)[:, None]
        sums += d * tl.exp2(score_d - top)[:, None]
    return sums, top, total


@triton.jit
def divide(sums, top, total, real, sinks, head, GROUP: tl.constexpr):
    """Return the sums [M, PADDED] of ``attend`` divided by those of weights, with that of a sink.

    A query comes here once, after all of its splits, so that its sink counts once.
    """
    if sinks is not None:
        m = tl.arange(0, sums.shape[0])
        sink = tl.load(sinks + head * GROUP + m % GROUP) * LOG2_E
        most = tl.maximum(top, sink)
        fade = tl.exp2(top - most)
        total = total * fade + tl.exp2(sink - most)
        sums *= fade[:, None]
    return sums / tl.where(real, total, 1.0)[:, None]


@triton.jit
def _part(
    partial_sums, partial_stats, at, real, split, splits, first,
    DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """What one split has summed up [M, WIDTH], and its largest scores [M]."""
    there = real & (split < splits)
    score = tl.load(
        partial_stats + (at + split) * 2, mask=there, other=LEAST_SCORE, cache_modifier=".cg"
    )
    dim = first + tl.arange(0, WIDTH)[None, :]
    mask = there[:, None] & (dim < DIM)
    where = partial_sums + (at + split)[:, None] * DIM + dim
    return tl.load(where, mask=mask, other=0.0, cache_modifier=".cg"), score


@triton.jit(do_not_specialize=["rows", "stride_table"])
def prefill_kernel(
    q, keys, values, key_scales, value_scales, tables, table_start, query_start, seq_lens, out,
    rows, stride_qt, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh, stride_table,
    scale, softcap, sinks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr,
    PADDED: tl.constexpr, EARLY: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, TYPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    FEW: tl.constexpr,
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
    early, x, token, real = load_rows(
        q, start, begin, count, head, stride_qt, stride_qh,
        DIM, VALUE, PADDED, EARLY, GROUP, BLOCK_M, TYPE,
    )  # fmt: skip
    query = tl.where(real, context - count + token, -1)
    table = table_of(tables, table_start, stride_table, row)
    keys += head.to(tl.int64) * stride_kh
    values += head.to(tl.int64) * stride_vh
    if key_scales is not None:
        key_scales += head.to(tl.int64) * (stride_kh // 4)
        value_scales += head.to(tl.int64) * (stride_vh // 4)
    sums, top, total = attend(
        x, early, query, keys, values, key_scales, value_scales, table, stride_kb, stride_vb,
        first, low, plain, stop, scale, softcap,
        DIM, VALUE, BLOCK_SIZE, WINDOW, SOFTCAP, BLOCK_N, WINDOW == 0,
    )  # fmt: skip
    result = divide(sums, top, total, real, sinks, head, GROUP)
    store_outputs(out, result, start, token, real, head, 0, HEADS, DIM, VALUE, GROUP)
