"""Samples tokens on the device: ``reference_sampling.sample_rows`` without a sort.

Tokens are ranked by their logits, as integers in the order of the floats. What top-k and top-p keep
is found by bisection over these integers, on the few tokens that can be kept where there are few:
several programs a row write out those of a span each, one program chooses among them.
Weights are summed as integers, so that no sum depends on its order and equal masses are equal.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.sampling import SETTINGS
from weft.kernels.triton.launch import power_of_2

_SPAN = 8192  # logits of one program that looks for the largest
_BLOCK = 4096  # logits that a program looks at at once
_SETS = 64  # of a span, whose largest logits tell which tokens top-k can keep
_REGION = 1024  # tokens of a span that are written out to be ranked
_CANDIDATES = 8192  # tokens of a row that are; if there are more, the row itself is read

_SETTINGS = tl.constexpr(len(SETTINGS))
_TEMPERATURE = tl.constexpr(SETTINGS.index("temperature"))
_TOP_K = tl.constexpr(SETTINGS.index("top_k"))
_TOP_P = tl.constexpr(SETTINGS.index("top_p"))
_MIN_P = tl.constexpr(SETTINGS.index("min_p"))

_ONE = tl.constexpr(2.0**42)  # a weight of 1: 2^20 of them do not overflow
_ALL = tl.constexpr(2**62)  # more than any count or mass
_LOWEST = tl.constexpr(-2139095041)  # the rank of minus infinity


@triton.jit
def _rank(x):
    """int32 in the order of finite float32 numbers; the same for 0 and -0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _weight(x, top, temperature):
    """exp of how far a logit is below the largest one, in float32."""
    return tl.exp((x - top) / temperature)


@triton.jit
def _mass(weight):
    """A weight as an integer."""
    return (weight * _ONE).to(tl.int64)


@triton.jit
def _above(values, size, least, top, temperature, BLOCK: tl.constexpr):
    """Count and mass of the logits of a rank of at least ``least``."""
    offset = tl.arange(0, BLOCK)
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.int64)
    start = tl.zeros([], tl.int32)
    while start < size:
        at = start + offset
        x = tl.load(values + at, mask=at < size, other=float("-inf"))
        found = (at < size) & (_rank(x) >= least)
        count += found.to(tl.int32)
        mass += tl.where(found, _mass(_weight(x, top, temperature)), 0)
        start += BLOCK
    return tl.sum(count, axis=0).to(tl.int64), tl.sum(mass, axis=0)


@triton.jit
def _cut(values, size, low, high, wanted, share, top, temperature, BLOCK: tl.constexpr):
    """Keep the likeliest tokens until they are ``wanted``, or their mass is ``share``.

    All tokens together must be enough, ranks lie in [low, high). Returns (low, high, ties, kept,
    mass): all ranks from ``high`` on are kept, and of the ``ties`` tokens in [low, high), which are
    equally likely, the first ``kept``; ``mass`` is that of all these.
    """
    count_low, mass_low = _above(values, size, low, top, temperature, BLOCK)
    count_high = tl.zeros([], tl.int64)
    mass_high = tl.zeros([], tl.int64)
    while (high - low > 1) & (count_low - count_high > 1):
        middle = low + (high - low) // 2
        count, mass = _above(values, size, middle, top, temperature, BLOCK)
        enough = (count >= wanted) | (mass >= share)
        low = tl.where(enough, middle, low)
        count_low = tl.where(enough, count, count_low)
        mass_low = tl.where(enough, mass, mass_low)
        high = tl.where(enough, high, middle)
        count_high = tl.where(enough, count_high, count)
        mass_high = tl.where(enough, mass_high, mass)
    ties = count_low - count_high
    weight = tl.maximum((mass_low - mass_high) // ties, 1)
    kept = tl.minimum(wanted - count_high, (share - mass_high + weight - 1) // weight)
    kept = tl.minimum(tl.maximum(kept, 1), ties)
    return low, high, ties, kept, mass_high + kept * ((mass_low - mass_high) // ties)


@triton.jit
def _last_tie(values, size, low, high, kept, BLOCK: tl.constexpr):
    """The place of the last kept one of the tokens whose ranks are in [low, high)."""
    offset = tl.arange(0, BLOCK)
    seen = tl.zeros([], tl.int64)
    before = tl.zeros([], tl.int64)
    start = tl.zeros([], tl.int32)
    while start < size:
        at = start + offset
        rank = _rank(tl.load(values + at, mask=at < size, other=float("-inf")))
        met = ((at < size) & (rank >= low) & (rank < high)).to(tl.int64)
        before += tl.sum(
            ((at < size) & (seen + tl.cumsum(met, axis=0) < kept)).to(tl.int64), axis=0
        )
        seen += tl.sum(met, axis=0)
        start += BLOCK
    return before


@triton.jit
def _kept(values, start, size, low, high, last, min_p, top, temperature, BLOCK: tl.constexpr):
    """Masses of a block of logits, 0 for those that are not kept."""
    at = start + tl.arange(0, BLOCK)
    x = tl.load(values + at, mask=at < size, other=float("-inf"))
    rank, weight = _rank(x), _weight(x, top, temperature)
    kept = (at < size) & (weight >= min_p) & ((rank >= high) | ((rank >= low) & (at <= last)))
    return tl.where(kept, _mass(weight), 0)


@triton.jit
def _draw(values, size, low, high, last, min_p, top, temperature, number, BLOCK: tl.constexpr):
    """The place on which a number in [0, 1) falls when every kept token has its weight."""
    masses = tl.zeros([BLOCK], tl.int64)
    start = tl.zeros([], tl.int32)
    while start < size:
        masses += _kept(values, start, size, low, high, last, min_p, top, temperature, BLOCK)
        start += BLOCK
    total = tl.sum(masses, axis=0)
    target = tl.minimum((number * total.to(tl.float64)).to(tl.int64), total - 1)
    before = tl.zeros([], tl.int64)
    start = tl.zeros([], tl.int32)
    place = tl.zeros([], tl.int32) - 1
    while place < 0:
        mass = _kept(values, start, size, low, high, last, min_p, top, temperature, BLOCK)
        passed = before + tl.cumsum(mass, axis=0) <= target
        here = tl.sum(passed.to(tl.int32), axis=0)
        place = tl.where(here < BLOCK, start + here, place)
        before += tl.sum(mass, axis=0)
        start += BLOCK
    return place


@triton.jit
def uniform(seed, counter):
    """The float64 in [0, 1) of a seed and a counter, both int64; see ``sample.cpp``."""
    low = (counter & 0xFFFFFFFF).to(tl.uint32)
    high = ((counter >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = low - low
    first, second, _, _ = tl.philox(seed, low, high, zero, zero)
    mantissa = (first.to(tl.int64) << 21) ^ (second >> 11).to(tl.int64)
    return mantissa.to(tl.float64) * (2.0**-53)


@triton.jit
def _kth(ranks, wanted, low, high):
    """The largest number in [low, high) that at least ``wanted`` ranks reach; ``low`` if none."""
    while high - low > 1:
        middle = low + (high - low) // 2
        enough = tl.sum((ranks >= middle).to(tl.int32), axis=0) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def _is_cut(settings, row):
    """Whether top-k or top-p cut a row, as far as its settings tell."""
    settings += _SETTINGS * row
    limited = (tl.load(settings + _TOP_K) > 0) | (tl.load(settings + _TOP_P) < 1.0)
    return (tl.load(settings + _TEMPERATURE) > 0.0) & limited


@triton.jit
def _largest(
    logits, stride, settings, largest, indices, finite, sets,
    SIZE: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr, SETS: tl.constexpr,
):  # fmt: skip
    """The first of the largest logits of a span of a row, and whether all are finite.

    Of a row that is cut also the largest of ``SETS`` disjoint sets, minus infinity of empty ones.
    """
    row, span, spans = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    offset = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    place = tl.full([BLOCK], SIZE - 1, tl.int32)
    all_finite = tl.full([BLOCK], 1, tl.int32)
    for start in range(0, SPAN, BLOCK):
        at = span * SPAN + start + offset
        x = tl.load(logits + row * stride + at, mask=at < SIZE, other=float("-inf"))
        better = x > best
        best = tl.where(better, x, best)
        place = tl.where(better, at, place)
        all_finite &= ((at >= SIZE) | (tl.abs(x) < float("inf"))).to(tl.int32)
    top = tl.max(best, axis=0)
    to = row * spans + span
    tl.store(largest + to, top)
    tl.store(indices + to, tl.min(tl.where(best == top, place, SIZE - 1), axis=0))
    tl.store(finite + to, tl.min(all_finite, axis=0))
    if _is_cut(settings, row):
        each = tl.max(tl.reshape(best, [SETS, BLOCK // SETS]), axis=1)
        tl.store(sets + to * SETS + tl.arange(0, SETS), each)


@triton.jit
def _candidates(
    logits, stride, settings, largest, all_finite, sets, lows, masses, counts, values, ids,
    SIZE: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr, SPANS: tl.constexpr,
    SPANS_BLOCK: tl.constexpr, SETS: tl.constexpr, SETS_BLOCK: tl.constexpr, REGION: tl.constexpr,
):  # fmt: skip
    """Write out those tokens of a span of a row that can be kept; how many, and the span's mass.

    Their ids ascend. Counts above ``REGION`` tell that some have found no room. ``lows``: no token
    of a lower rank is kept.
    """
    row, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    spans = tl.arange(0, SPANS_BLOCK)
    part, there = row * SPANS + spans, spans < SPANS
    is_finite = tl.min(tl.load(all_finite + part, mask=there, other=1), axis=0) > 0
    if is_finite & _is_cut(settings, row):
        settings += _SETTINGS * row
        temperature = tl.load(settings + _TEMPERATURE).to(tl.float32)
        temperature = tl.maximum(temperature, 1.1754943508222875e-38)  # which is never denormal
        top_k = tl.load(settings + _TOP_K).to(tl.int64)
        top_p = tl.load(settings + _TOP_P).to(tl.float64)
        top_k = tl.where(top_k < SIZE, top_k, 0)
        top = tl.max(tl.load(largest + part, mask=there, other=float("-inf")), axis=0)
        number = tl.arange(0, SETS_BLOCK)
        heads = tl.load(
            sets + row * (SPANS * SETS) + number, mask=number < SPANS * SETS, other=float("-inf")
        )
        low = tl.full([], _LOWEST, tl.int64)
        if top_k > 0:
            low = _kth(_rank(heads), top_k, low, _rank(top).to(tl.int64) + 1)
        # With top-p alone those of more than the mean of half of what is left out at the least.
        known = tl.sum(_mass(_weight(heads, top, temperature)), axis=0)
        left_out = ((1.0 - top_p) * known.to(tl.float64)).to(tl.int64)
        least = tl.where(top_k > 0, -1, left_out // (2 * SIZE))
        found = tl.zeros([], tl.int32)
        total = tl.zeros([], tl.int64)
        region = (row * SPANS + span) * REGION
        for start in range(0, SPAN, BLOCK):
            at = span * SPAN + start + tl.arange(0, BLOCK)
            x = tl.load(logits + row * stride + at, mask=at < SIZE, other=float("-inf"))
            mass = _mass(_weight(x, top, temperature))
            total += tl.sum(mass, axis=0)
            wanted = ((at < SIZE) & (_rank(x) >= low) & (mass > least)).to(tl.int32)
            to = found + tl.cumsum(wanted, axis=0) - 1
            fits = (wanted > 0) & (to < REGION)
            tl.store(values + region + to, x, mask=fits)
            tl.store(ids + region + to, at, mask=fits)
            found += tl.sum(wanted, axis=0)
        tl.store(counts + row * SPANS + span, found)
        tl.store(masses + row * SPANS + span, total)
        if span == 0:
            tl.store(lows + row, low)


@triton.jit
def _gather(
    values, ids, to_values, to_ids, counts, found, REGION: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write the tokens of all spans of a row, ``counts`` of each, one after another.

    BLOCK: of them at once, for each of which all spans are looked at.
    """
    ends = tl.cumsum(counts, axis=0)
    start = tl.zeros([], tl.int32)
    while start < found:
        at = start + tl.arange(0, BLOCK)
        passed = ends[None, :] <= at[:, None]
        span = tl.sum(passed.to(tl.int32), axis=1)
        before = tl.max(tl.where(passed, ends[None, :], 0), axis=1)
        source = span * REGION + at - before
        tl.store(to_values + at, tl.load(values + source, mask=at < found), mask=at < found)
        tl.store(to_ids + at, tl.load(ids + source, mask=at < found), mask=at < found)
        start += BLOCK


@triton.jit
def _sample(
    logits, stride, largest, indices, all_finite, settings, seeds, counters, lows, masses, counts,
    parts, part_ids, values, ids, tokens, finite,
    SIZE: tl.constexpr, SPANS: tl.constexpr, SPANS_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    REGION: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    span = tl.arange(0, SPANS_BLOCK)
    part, there = row * SPANS + span, span < SPANS
    best = tl.load(largest + part, mask=there, other=float("-inf"))
    top = tl.max(best, axis=0)
    place = tl.load(indices + part, mask=there, other=SIZE - 1)
    token = tl.min(tl.where(best == top, place, SIZE - 1), axis=0)
    is_finite = tl.min(tl.load(all_finite + part, mask=there, other=1), axis=0) > 0
    tl.store(finite + row, is_finite)
    settings += _SETTINGS * row
    temperature = tl.load(settings + _TEMPERATURE).to(tl.float32)
    if (temperature > 0.0) & is_finite:
        temperature = tl.maximum(temperature, 1.1754943508222875e-38)  # which is never denormal
        top_k = tl.load(settings + _TOP_K).to(tl.int64)
        top_p = tl.load(settings + _TOP_P).to(tl.float64)
        min_p = tl.load(settings + _MIN_P).to(tl.float32)
        top_k = tl.where(top_k < SIZE, top_k, 0)
        values += row * CANDIDATES
        ids += row * CANDIDATES
        source = logits + row * stride
        size = tl.full([], SIZE, tl.int32)
        low = tl.full([], _LOWEST, tl.int64)  # all tokens are kept
        high = tl.full([], _LOWEST, tl.int64)
        last = tl.full([], SIZE, tl.int64)
        listed = tl.full([], 0, tl.int32) > 0
        if (top_k > 0) | (top_p < 1.0):
            end = _rank(top).to(tl.int64) + 1
            low = tl.load(lows + row)
            total = tl.sum(tl.load(masses + part, mask=there, other=0), axis=0)
            count = tl.load(counts + part, mask=there, other=0)
            found = tl.sum(count, axis=0)
            listed = (found <= CANDIDATES) & (tl.max(count, axis=0) <= REGION)
            if listed:
                first = row * SPANS * REGION
                _gather(
                    parts + first, part_ids + first, values, ids, count, found,
                    REGION, BLOCK // SPANS_BLOCK,
                )  # fmt: skip
            tl.debug_barrier()
            source = tl.where(listed, values, source)
            size = tl.where(listed, found, size)
            ties = tl.zeros([], tl.int64)
            kept = tl.zeros([], tl.int64)
            high = end
            if top_k > 0:
                low, high, ties, kept, total = _cut(
                    source, size, low, end, top_k, _ALL, top, temperature, BLOCK
                )
            if top_p < 1.0:
                exact = top_p * total.to(tl.float64)
                share = exact.to(tl.int64)
                share = tl.maximum(share + (share.to(tl.float64) < exact).to(tl.int64), 1)
                most_kept = tl.where(top_k > 0, top_k, _ALL)
                low, high, ties, kept, total = _cut(
                    source, size, low, end, most_kept, share, top, temperature, BLOCK
                )
            if kept < ties:
                last = _last_tie(source, size, low, high, kept, BLOCK)
        number = uniform(tl.load(seeds + row), tl.load(counters + row))
        token = _draw(source, size, low, high, last, min_p, top, temperature, number, BLOCK)
        if listed:
            token = tl.load(ids + token)
    tl.store(tokens + row, token.to(tl.int64))


def sample(
    logits: Tensor,
    settings: Tensor,
    seeds: Tensor,
    counters: Tensor,
    tokens: Tensor,
    finite: Tensor,
) -> None:
    """Choose a token for each row; see ``interface.Sample``.

    Raises:
        ValueError: the shapes or types cannot be served.
    """
    rows, size = logits.shape
    if logits.dtype != torch.float32 or logits.stride(1) != 1 or not 0 < size < 2**20:
        raise ValueError(f"cannot choose from {list(logits.shape)} of {logits.dtype}")
    if rows == 0:
        return
    spans, device = triton.cdiv(size, _SPAN), logits.device
    most = min(_CANDIDATES, power_of_2(size))
    largest = torch.empty((rows, spans), dtype=torch.float32, device=device)
    indices = torch.empty((rows, spans), dtype=torch.int32, device=device)
    all_finite, counts = torch.empty_like(indices), torch.empty_like(indices)
    sets = torch.empty((rows, spans, _SETS), dtype=torch.float32, device=device)
    masses = torch.empty((rows, spans), dtype=torch.int64, device=device)
    lows = torch.empty(rows, dtype=torch.int64, device=device)
    parts, values = (
        torch.empty((rows, length), dtype=torch.float32, device=device)
        for length in (spans * _REGION, most)
    )
    part_ids, ids = (
        torch.empty(of.shape, dtype=torch.int32, device=device) for of in (parts, values)
    )
    settings, block = settings.contiguous(), min(_BLOCK, _SPAN)
    sizes = {"SIZE": size, "SPANS": spans, "SPANS_BLOCK": power_of_2(spans)}
    _largest[(rows, spans)](
        logits, logits.stride(0), settings, largest, indices, all_finite, sets, SIZE=size,
        SPAN=_SPAN, BLOCK=block, SETS=_SETS, num_warps=8, num_stages=2,
    )  # fmt: skip
    _candidates[(rows, spans)](
        logits, logits.stride(0), settings, largest, all_finite, sets, lows, masses, counts, parts,
        part_ids, **sizes, SPAN=_SPAN, BLOCK=block, SETS=_SETS,
        SETS_BLOCK=power_of_2(spans * _SETS), REGION=_REGION, num_warps=8, num_stages=2,
    )  # fmt: skip
    _sample[(rows,)](
        logits, logits.stride(0), largest, indices, all_finite, settings, seeds.contiguous(),
        counters.contiguous(), lows, masses, counts, parts, part_ids, values, ids, tokens, finite,
        **sizes, BLOCK=_BLOCK, REGION=_REGION, CANDIDATES=most, num_warps=16, num_stages=2,
    )  # fmt: skip
