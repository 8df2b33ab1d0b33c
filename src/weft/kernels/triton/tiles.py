"""Launch parameters of paged attention for a shape: tiles, warps, stages, splits.

By rule everything follows from shapes, types and the GPU's shared memory. A file of measured
launches takes its place, but for the rows of a tile of decodes: they say which rows are few.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import log2

import torch

from weft.kernels.kv_storage import KV_DTYPES, SCALED
from weft.kernels.triton.launch import power_of_2
from weft.kernels.tuning import (
    ATTENTION_ALTERNATIVES,
    DECODE,
    MOST_PARTS,
    PREFILL,
    TILE_PARTS,
    Launch,
    LaunchShape,
    Tuning,
    kv_kind,
)

MOST_FEW = 8  # tokens of a row, such as drafts to verify, up to which a row is cut into splits

_MOST_SUMS = 128  # float32 sums of a thread, which has 255 registers
_MOST_BUFFERS = 2  # tiles of keys and values that are loaded ahead
_WARP_ROWS = 16  # of a tile: more rows for a warp leave its registers
_WIDEST_DECODE = 64  # rows of a tile of decodes, unless one KV head has more query heads


@dataclass(frozen=True)
class Heads:
    """Heads of attention: KV heads, query heads of each, their size, and the types of both."""

    kv_heads: int
    group: int
    dim: int
    dtype: torch.dtype
    cache_dtype: torch.dtype

    def shape(self, op: str) -> LaunchShape:
        """The shape of the heads as the tuning keys it."""
        dtype = str(self.dtype).removeprefix("torch.")
        stored = str(self.cache_dtype).removeprefix("torch.")
        kv = next((name for name, kind in KV_DTYPES.items() if kind == self.cache_dtype), stored)
        return LaunchShape(op, kv_kind(dtype, kv), (self.kv_heads, self.group, self.dim))


@dataclass(frozen=True)
class Tile:
    """Rows (query heads times tokens) and keys of a tile, warps, and loads in flight."""

    block_m: int
    block_n: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Plan:
    """Launch plan: one for rows of at most ``few`` tokens, one for longer rows.

    A context is cut into at most ``splits`` parts of at least ``least`` tokens. ``programs`` of a
    multiprocessor share the parts of all rows.
    """

    few: int
    splits: int
    least: int
    programs: int
    decode: Tile
    prefill: Tile


# By the padded head size: keys of a tile of decodes and warps; rows and keys of prefills and warps;
# so large that compiled kernels keep their tiles in registers.
_Table = dict[int, tuple[tuple[int, int], tuple[int, int, int]]]
_HALF: _Table = {
    16: ((64, 4), (128, 64, 8)),
    32: ((64, 4), (128, 64, 8)),
    64: ((64, 4), (128, 64, 8)),
    128: ((64, 4), (128, 64, 8)),
    256: ((32, 4), (64, 32, 8)),
    512: ((16, 8), (32, 16, 8)),
}
_BYTE: _Table = {  # converted keys and values are in registers, too
    16: ((64, 4), (128, 32, 8)),
    32: ((64, 4), (128, 32, 8)),
    64: ((64, 4), (128, 32, 8)),
    128: ((64, 4), (128, 32, 8)),
    256: ((32, 8), (64, 32, 8)),
    512: ((16, 8), (32, 16, 8)),
}
# Hopper multiplies what is in shared memory, 64 rows at a time.
_HALF_HOPPER: _Table = _HALF | {256: ((32, 4), (128, 32, 8)), 512: ((16, 8), (64, 16, 8))}
_BYTE_HOPPER: _Table = _BYTE | {
    64: ((64, 4), (128, 64, 8)),
    128: ((64, 4), (128, 64, 8)),
}
_FLOAT: _Table = {
    16: ((32, 4), (32, 32, 4)),
    32: ((32, 4), (32, 32, 4)),
    64: ((32, 4), (32, 32, 4)),
    128: ((32, 4), (16, 32, 4)),
    256: ((16, 8), (16, 16, 8)),
    512: ((16, 8), (16, 16, 16)),
}
_HOPPER_SHARED = 227 * 1024  # bytes; GPUs with less are older, or have the older products
_BLACKWELL = 10  # major capability: scores pass through registers on their way from its own memory
_NARROW = 32  # keys of a decode's tile of the most rows, if they are converted in registers


def _table(dtype: torch.dtype, cache_dtype: torch.dtype, shared_bytes: int, major: int) -> _Table:
    if dtype == torch.float32:
        return _FLOAT
    hopper = shared_bytes >= _HOPPER_SHARED
    if cache_dtype.itemsize == 1:
        return _BYTE_HOPPER if hopper and major < _BLACKWELL else _BYTE
    return _HALF_HOPPER if hopper else _HALF


def plan(
    heads: Heads,
    max_query_len: int | None,
    shared_bytes: int,
    tuning: Tuning | None = None,
    *,
    major: int = 0,
) -> Plan:
    """Return the plan for heads, by the tuning or, without one, by rule in so much shared memory.

    Args:
        major: of the GPU's capability.

    Raises:
        ValueError: no kernel fits the shape, or a launch of the tuning does not.
        KernelUnavailable: the tuning is a file without the shape.
    """
    rule = by_rule(heads, max_query_len, shared_bytes, major)
    if tuning is None:
        return rule
    decode, prefill = (tuning.attention(heads.shape(op)) for op in (DECODE, PREFILL))
    try:
        return _with_prefill(_with_decode(rule, decode), prefill, heads.group)
    except KeyError as error:
        raise ValueError(
            f"the tuned launches of {heads.shape(DECODE)} and {heads.shape(PREFILL)} lack {error}"
        ) from error


def launches(plan: Plan) -> dict[str, Launch]:
    """Return what a tuning may change of a plan, by op."""
    decode, prefill = plan.decode, plan.prefill
    return {
        DECODE: {
            "SPLITS": plan.splits,
            "LEAST": plan.least,
            "PROGRAMS": plan.programs,
            **_launch(decode),
        },
        PREFILL: {"BLOCK_M": prefill.block_m, **_launch(prefill)},
    }


def candidates(heads: Heads, op: str, shared_bytes: int, *, major: int, most: int) -> list[Launch]:
    """Return launches of an op of attention that differ in their tiles, the rule's first.

    Those are left out whose sums a thread has no registers for, or that a program has no shared
    memory for. Of the others the nearest to the rule's are taken, as a search step by step would
    come to them first.

    Raises:
        ValueError: no kernel fits the shape.
    """
    chosen = by_rule(heads, None, shared_bytes, major)
    rule, size = launches(chosen)[op], padded(heads.dim)
    names = [name for name in TILE_PARTS if name in rule]
    found: list[tuple[float, int, Launch]] = []
    for values in product(*(ATTENTION_ALTERNATIVES[name] for name in names)):
        launch = {**rule, **dict(zip(names, values, strict=True))}
        tile = _tuned(launch.get("BLOCK_M", chosen.decode.block_m), launch)
        sums = tile.block_m * size // (32 * tile.warps)
        sizes = tile.block_m, tile.block_n, size, heads.dtype.itemsize, heads.cache_dtype.itemsize
        beside, loaded = _shared_bytes(*sizes)
        fits = beside + loaded * max(1, tile.stages // 2) <= shared_bytes
        if fits and heads.group <= tile.block_m and sums <= _MOST_SUMS and launch != rule:
            far = sum(abs(log2(launch[name] / rule[name])) for name in names)
            found.append((far, len(found), launch))
    return [rule, *(launch for *_, launch in sorted(found, key=lambda one: one[:2])[: most - 1])]


def _launch(tile: Tile) -> Launch:
    return {"BLOCK_N": tile.block_n, "num_warps": tile.warps, "num_stages": tile.stages}


def _with_decode(rule: Plan, launch: Launch | None) -> Plan:
    if launch is None:
        return rule
    splits, least = launch["SPLITS"], launch["LEAST"]
    if not 0 < splits <= MOST_PARTS or splits != power_of_2(splits) or least % launch["BLOCK_N"]:
        raise ValueError(
            f"a tuned launch of decode attention has {splits} parts of at least {least} tokens; "
            f"powers of 2 up to {MOST_PARTS} and multiples of its {launch['BLOCK_N']} keys are "
            "computed"
        )
    tile, programs = _tuned(rule.decode.block_m, launch), launch["PROGRAMS"]
    if programs < 1:
        raise ValueError(
            f"a tuned launch of decode attention has {programs} programs a multiprocessor; it must "
            "be at least 1"
        )
    return replace(rule, splits=splits, least=least, programs=programs, decode=tile)


def _with_prefill(rule: Plan, launch: Launch | None, group: int) -> Plan:
    if launch is None:
        return rule
    if launch["BLOCK_M"] < group:
        raise ValueError(
            f"a tuned launch of prefill attention has tiles of {launch['BLOCK_M']} rows for "
            f"{group} query heads of each KV head"
        )
    return replace(rule, prefill=_tuned(launch["BLOCK_M"], launch))


def _tuned(block_m: int, launch: Launch) -> Tile:
    return Tile(block_m, launch["BLOCK_N"], launch["num_warps"], launch["num_stages"])


@cache
def by_rule(heads: Heads, max_query_len: int | None, shared_bytes: int, major: int = 0) -> Plan:
    """Return the plan for heads in so much shared memory, by rule, not measured.

    Raises:
        ValueError: no kernel fits the shape.
    """
    group, dim, dtype, cache_dtype = heads.group, heads.dim, heads.dtype, heads.cache_dtype
    table = _table(dtype, cache_dtype, shared_bytes, major)
    size = padded(dim)
    if size not in table or group > 128:
        raise ValueError(
            f"no attention kernel for heads of size {dim} with {group} query heads for each KV "
            f"head; sizes up to {max(table)} and 128 query heads are served"
        )
    if cache_dtype in SCALED and dim % SCALED[cache_dtype].scale_bytes:
        raise ValueError(
            f"no attention kernel for heads of size {dim} with 8-bit KV: their scales lie behind "
            f"them in the cache, so it must be a multiple of {SCALED[cache_dtype].scale_bytes}"
        )
    (decode_n, decode_warps), (prefill_m, prefill_n, prefill_warps) = table[size]
    wanted = power_of_2(group * min(max_query_len or 1, MOST_FEW))
    least_m = max(16, power_of_2(group))
    decode_m = max(least_m, min(wanted, _WIDEST_DECODE))
    if decode_m > _WIDEST_DECODE and cache_dtype.itemsize < dtype.itemsize:
        decode_n = min(decode_n, _NARROW)
    sizes = (size, dtype.itemsize, cache_dtype.itemsize, shared_bytes)
    decode = _tile(decode_m, decode_n, decode_warps, *sizes)
    return Plan(
        few=decode_m // group,
        splits=min(MOST_PARTS, max(8, power_of_2(256 // heads.kv_heads))),
        least=_least(group, cache_dtype.itemsize),
        programs=_programs(decode, *sizes),
        decode=decode,
        prefill=_tile(max(least_m, prefill_m), prefill_n, prefill_warps, *sizes),
    )


def padded(dim: int) -> int:
    """Return the size that heads have in a tile."""
    return max(16, power_of_2(dim))


def _least(group: int, item: int) -> int:
    """Tokens of a split so that what it costs beside its KV is about an eighth of reading that.

    Its sums, 4 bytes a dimension and query head, are written and read once; keys and values have
    ``item`` bytes a dimension each: an eighth from 32 * group / item tokens on. Before its first
    tile a program waits for its item, its block table and that tile, one after the other, and in
    such a time (2 us, an estimate) its share of a GPU's bandwidth (of 4.8 TB/s among 264 programs,
    18 GB/s) reads 36 KB, 72 tokens of a head of size 128 in 16 bits: an eighth from 576 tokens on,
    of which the nearest power of 2 is taken. Fewer tokens would serve steps of one row that leave
    multiprocessors idle: 64 tokens take about 0.4 us (an estimate), 512 of them 3 us a layer.
    """
    return min(1024, max(512, power_of_2(-(-32 * group // item))))


def _tile(
    block_m: int, block_n: int, warps: int, size: int, item: int, stored: int, most: int
) -> Tile:
    """Return a tile with as many warps as its rows need and as many stages as fit.

    There is one stage for the products, and for each buffer one for its table entries. Beside the
    queries and the buffers lie a tile that is being multiplied and one converted.
    """
    beside, loaded = _shared_bytes(block_m, block_n, size, item, stored)
    stages = 1 + 2 * min(_MOST_BUFFERS, max(0, (most - beside - loaded) // loaded))
    return Tile(block_m, block_n, max(warps, block_m // _WARP_ROWS), stages)


def _shared_bytes(block_m: int, block_n: int, size: int, item: int, stored: int) -> tuple[int, int]:
    """What the queries and a converted tile take of shared memory, and a tile that is loaded."""
    converted = 0 if stored == item else 2 * block_n * size * item
    return block_m * size * item + converted, 2 * block_n * size * stored


def _programs(tile: Tile, size: int, item: int, stored: int, most: int) -> int:
    """How many programs of a tile run on a multiprocessor at once, so that none waits for another.

    A thread has at most 255 of 65536 registers, half as many with 16 heads of at most 64 and KV
    of their type. Shared memory is what its buffers take, and 4 KiB for what products exchange.
    """
    registers = 128 if size <= 64 and tile.block_m == 16 and stored == item else 256
    beside, loaded = _shared_bytes(tile.block_m, tile.block_n, size, item, stored)
    needed = beside + loaded * (tile.stages // 2) + 4096
    return max(1, min(65536 // (32 * tile.warps * registers), most // needed))
