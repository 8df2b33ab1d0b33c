"""Launch parameters of paged attention for a shape: tiles, warps, stages, splits.

By rule everything follows from shapes, types and the GPU's shared memory. A file of measured
launches takes its place, but for the rows of a tile of decodes: they say which rows are few.
"""

from __future__ import annotations

from collections.abc import Sequence
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
_ONE_BUFFER = 64  # keys beyond which one is: a second program has the shared memory of the other
_WARP_ROWS = 16  # of a tile: more rows for a warp leave its registers
_WIDEST_DECODE = 64  # rows of a tile of decodes, unless one KV head has more query heads
_LATENT_ROWS = 32  # of latent attention: registers hold no more sums, beside all else of a decode


@dataclass(frozen=True)
class Heads:
    """Heads of attention: KV heads, query heads of each, their size, and the types of both.

    Attributes:
        value_dim: of latent attention, numbers of a row that are values; None: as many as of keys.
    """

    kv_heads: int
    group: int
    dim: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    value_dim: int | None = None

    @classmethod
    def of(cls, sizes: Sequence[int], dtype: torch.dtype, cache_dtype: torch.dtype) -> Heads:
        """Return heads of the numbers that ``sizes`` gives."""
        kv_heads, group, dim, *latent = sizes
        return cls(kv_heads, group, dim, dtype, cache_dtype, *latent)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of the heads as the tuning keys them."""
        latent = () if self.value_dim is None else (self.value_dim,)
        return (self.kv_heads, self.group, self.dim, *latent)

    @property
    def value(self) -> int:
        """Padded numbers of a value, or of a head."""
        return padded(self.dim if self.value_dim is None else self.value_dim)

    @property
    def early(self) -> int:
        """Padded numbers of a latent row that are of the key alone; 0 of other heads."""
        return 0 if self.value_dim is None else padded(self.dim - self.value_dim)

    @property
    def loaded(self) -> int:
        """Numbers that a tile loads for each token: keys and values, or a latent row once."""
        return 2 * self.value if self.value_dim is None else self.value + self.early

    def shape(self, op: str) -> LaunchShape:
        """The shape of the heads as the tuning keys it."""
        dtype = str(self.dtype).removeprefix("torch.")
        stored = str(self.cache_dtype).removeprefix("torch.")
        kv = next((name for name, kind in KV_DTYPES.items() if kind == self.cache_dtype), stored)
        return LaunchShape(op, kv_kind(dtype, kv), self.sizes)


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

    A tile has ``group`` query heads: all of a KV head, or of latent attention some, since its one
    row has more than fit. A context is cut into at most ``splits`` parts of at least ``least``
    tokens. ``programs`` of a multiprocessor share the parts of all rows.
    """

    group: int
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
# Hopper multiplies what is in shared memory, 64 rows at a time; heads of 128 were measured.
_HALF_HOPPER: _Table = _HALF | {256: ((32, 4), (128, 32, 8)), 512: ((16, 8), (64, 16, 8))}
_BYTE_HOPPER: _Table = _BYTE | {
    64: ((64, 4), (128, 64, 8)),
    128: ((128, 4), (128, 64, 8)),
}
_FLOAT: _Table = {
    16: ((32, 4), (32, 32, 4)),
    32: ((32, 4), (32, 32, 4)),
    64: ((32, 4), (32, 32, 4)),
    128: ((32, 4), (16, 32, 4)),
    256: ((16, 8), (16, 16, 8)),
    512: ((16, 8), (16, 16, 16)),
}
# Of latent attention, by the padded size of values.
_LATENT: _Table = _BYTE | {256: ((32, 8), (64, 32, 8)), 512: ((16, 8), (32, 16, 8))}
_LATENT_LARGE: _Table = _LATENT | {512: ((32, 8), (32, 32, 8))}
_LATENT_HALF_LARGE: _Table = _LATENT_LARGE | {512: ((32, 8), (64, 32, 8))}
_HOPPER_SHARED = 227 * 1024  # bytes; GPUs with less are older, or have the older products
_BLACKWELL = 10  # major capability: scores pass through registers on their way from its own memory
_NARROW = 32  # keys of a decode's tile of the most rows, if they are converted in registers


def _table(heads: Heads, shared_bytes: int, major: int) -> _Table:
    if heads.dtype == torch.float32:
        return _FLOAT
    hopper = shared_bytes >= _HOPPER_SHARED
    if heads.value_dim is not None:
        plain = heads.cache_dtype.itemsize == heads.dtype.itemsize
        return _LATENT if not hopper else _LATENT_HALF_LARGE if plain else _LATENT_LARGE
    if heads.cache_dtype.itemsize == 1:
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
        return _with_prefill(_with_decode(rule, decode), prefill)
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
    rule = launches(chosen)[op]
    names = [name for name in TILE_PARTS if name in rule]
    found: list[tuple[float, int, Launch]] = []
    for values in product(*(ATTENTION_ALTERNATIVES[name] for name in names)):
        launch = {**rule, **dict(zip(names, values, strict=True))}
        tile = _tuned(launch.get("BLOCK_M", chosen.decode.block_m), launch)
        sums = tile.block_m * heads.value // (32 * tile.warps)
        beside, loaded = _shared_bytes(heads, tile.block_m, tile.block_n)
        fits = beside + loaded * max(1, tile.stages // 2) <= shared_bytes
        if fits and chosen.group <= tile.block_m and sums <= _MOST_SUMS and launch != rule:
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


def _with_prefill(rule: Plan, launch: Launch | None) -> Plan:
    if launch is None:
        return rule
    if launch["BLOCK_M"] < rule.group:
        raise ValueError(
            f"a tuned launch of prefill attention has tiles of {launch['BLOCK_M']} rows for "
            f"{rule.group} query heads of each KV head"
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
    group, dim, cache_dtype = heads.group, heads.dim, heads.cache_dtype
    table = _table(heads, shared_bytes, major)
    if heads.value_dim is not None and heads.value not in table:
        raise ValueError(
            f"no attention kernel for latents of {heads.value_dim} numbers; up to {max(table)} are "
            "served"
        )
    if heads.value not in table or (group > 128 and heads.value_dim is None):
        raise ValueError(
            f"no attention kernel for heads of size {dim} with {group} query heads for each KV "
            f"head; sizes up to {max(table)} and 128 query heads are served"
        )
    if cache_dtype in SCALED and dim % SCALED[cache_dtype].scale_bytes:
        raise ValueError(
            f"no attention kernel for heads of size {dim} with 8-bit KV: their scales lie behind "
            f"them in the cache, so it must be a multiple of {SCALED[cache_dtype].scale_bytes}"
        )
    (decode_n, decode_warps), (prefill_m, prefill_n, prefill_warps) = table[heads.value]
    widest = _WIDEST_DECODE
    if heads.value_dim is not None:
        widest = max(16, min(_LATENT_ROWS, prefill_m))
        group = _divisor(group, widest)
    wanted = power_of_2(group * min(max_query_len or 1, MOST_FEW))
    least_m = max(16, power_of_2(group))
    decode_m = max(least_m, min(wanted, widest))
    if decode_m > _WIDEST_DECODE and cache_dtype.itemsize < heads.dtype.itemsize:
        decode_n = min(decode_n, _NARROW)
    decode = _tile(decode_m, decode_n, decode_warps, heads, shared_bytes)
    return Plan(
        group=group,
        few=decode_m // group,
        splits=min(MOST_PARTS, max(8, power_of_2(256 // heads.kv_heads))),
        least=_least(group * 2 * heads.value // heads.loaded, cache_dtype.itemsize),
        programs=_programs(decode, heads, shared_bytes),
        decode=decode,
        prefill=_tile(max(least_m, prefill_m), prefill_n, prefill_warps, heads, shared_bytes),
    )


def _divisor(count: int, most: int) -> int:
    """Return the largest divisor of a count that is at most ``most``."""
    return next(size for size in range(min(count, most), 0, -1) if count % size == 0)


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


def _tile(block_m: int, block_n: int, warps: int, heads: Heads, most: int) -> Tile:
    """Return a tile with as many warps as its rows need and as many stages as fit.

    There is one stage for the products, and for each buffer one for its table entries. Beside the
    queries and the buffers lie a tile that is being multiplied and one converted.
    """
    beside, loaded = _shared_bytes(heads, block_m, block_n)
    ahead = _MOST_BUFFERS if block_n <= _ONE_BUFFER else 1
    stages = 1 + 2 * min(ahead, max(0, (most - beside - loaded) // loaded))
    return Tile(block_m, block_n, max(warps, block_m // _WARP_ROWS), stages)


def _shared_bytes(heads: Heads, block_m: int, block_n: int) -> tuple[int, int]:
    """What the queries and a converted tile take of shared memory, and a tile that is loaded."""
    item, stored = heads.dtype.itemsize, heads.cache_dtype.itemsize
    converted = 0 if stored == item else block_n * heads.loaded * item
    queries = block_m * (heads.value + heads.early) * item
    return queries + converted, block_n * heads.loaded * stored


def _programs(tile: Tile, heads: Heads, most: int) -> int:
    """How many programs of a tile run on a multiprocessor at once, so that none waits for another.

    A thread has at most 255 of 65536 registers, half as many with 16 heads of at most 64 and KV
    of their type. Shared memory is what its buffers take, and 4 KiB for what products exchange.
    """
    plain = heads.cache_dtype.itemsize == heads.dtype.itemsize
    registers = 128 if heads.value <= 64 and tile.block_m == 16 and plain else 256
    beside, loaded = _shared_bytes(heads, tile.block_m, tile.block_n)
    needed = beside + loaded * (tile.stages // 2) + 4096
    return max(1, min(65536 // (32 * tile.warps * registers), most // needed))
