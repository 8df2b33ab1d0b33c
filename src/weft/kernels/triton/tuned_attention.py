"""Measures launches of paged attention on a device: tiles, warps, stages and splits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch

from weft.kernels.candidates import MOST
from weft.kernels.gpus import Gpu
from weft.kernels.interface import AttentionMetadata
from weft.kernels.kv_storage import cache_dtype, row_size, write_rows
from weft.kernels.triton.attention import paged_attention
from weft.kernels.triton.device import copies_beyond_caches
from weft.kernels.triton.tiles import Heads, candidates
from weft.kernels.triton.tuned import CANNOT_RUN, DTYPES, Trial, rule
from weft.kernels.tuning import ATTENTION_ALTERNATIVES, DECODE, Launch, LaunchShape, Tuning, search
from weft.kernels.unavailable import KernelUnavailable


@dataclass(frozen=True)
class Rows:
    """Rows alike: how many, their new tokens, and their tokens in all."""

    count: int
    queries: int
    context: int


# What a launch is chosen for, each counting as much as the others: one launch serves all steps, as
# results would else depend on the batch.
DECODES = (Rows(1, 1, 8192), Rows(32, 1, 4096), Rows(128, 1, 1024), Rows(256, 1, 272))
CUTS = {"SPLITS", "LEAST", "PROGRAMS"}  # how contexts are cut and shared
PREFILLS = (Rows(1, 2048, 2048), Rows(2, 512, 4096))


def launches_to_measure(shape: LaunchShape, gpu: Gpu, most: int = MOST) -> list[Launch]:
    """Return the launches of a shape that are worth measuring on a GPU, the rule's first.

    Raises:
        KernelUnavailable: nothing serves the shape.
    """
    major, _ = gpu.capability
    try:
        return candidates(heads_of(shape), shape.op, gpu.shared_bytes, major=major, most=most)
    except ValueError as error:
        raise KernelUnavailable(f"no launch of {shape} runs on {gpu.name}: {error}") from error


def tune_attention(
    shape: LaunchShape,
    block_size: int,
    device: torch.device,
    launches: Sequence[Launch],
    seconds: Callable[[Callable[[int], None], int], float],
    prepare: Callable[[list[Launch]], None] = lambda _: None,
) -> tuple[Launch, float]:
    """Return the best launch that is found for a shape, and its time as a share of the first one's.

    First the given ones are measured, then how the best one cuts contexts, if it does.

    Args:
        block_size: tokens of a block of KV.
        seconds: ``tuned.graph_seconds``, or another clock.
        prepare: is told of launches before they are measured, to compile them.

    Raises:
        KernelUnavailable: the first launch does not run.
    """
    heads, trial = heads_of(shape), Trial(rule(device, "start"))
    cases = [
        attention_calls(heads, rows, block_size, device, trial)
        for rows in (DECODES if shape.op == DECODE else PREFILLS)
    ]
    first, *others = launches
    trial.chosen[shape.op] = first
    try:
        by_rule = [seconds(*case) for case in cases]
    except (ValueError, *CANNOT_RUN) as error:
        raise KernelUnavailable(f"no launch of {shape} runs on {device}: {error}") from error
    known: dict[tuple[tuple[str, int], ...], float] = {tuple(sorted(first.items())): 1.0}

    def cost(launch: Launch) -> float:
        key = tuple(sorted(launch.items()))
        if key not in known:
            trial.chosen[shape.op] = launch
            try:
                times = [seconds(*case) for case in cases]
            except (ValueError, *CANNOT_RUN):
                known[key] = math.inf
            else:
                shares = [took / before for took, before in zip(times, by_rule, strict=True)]
                known[key] = sum(shares) / len(shares)
        return known[key]

    best = first
    for launch in others:
        if cost(launch) < 0.99 * cost(best):  # measured times differ by as much
            best = launch
    cuts = {
        name: values
        for name, values in ATTENTION_ALTERNATIVES.items()
        if name in CUTS & best.keys()
    }
    if cuts:
        compiled = [name for name in cuts if name != "PROGRAMS"]  # which no kernel depends on
        changes = product(*(cuts[name] for name in compiled))
        prepare([{**best, **dict(zip(compiled, values, strict=True))} for values in changes])
    return search(best, cost, cuts)


def launch_each(
    shape: LaunchShape, block_size: int, device: torch.device, launches: Iterable[Launch]
) -> Iterator[None]:
    """Attend with each launch in all that is measured, one whenever the next is asked for."""
    heads, trial = heads_of(shape), Trial(rule(device, "start"))
    cases = [
        attention_calls(heads, rows, block_size, device, trial)
        for rows in (DECODES if shape.op == DECODE else PREFILLS)
    ]
    for launch in launches:
        trial.chosen[shape.op] = launch
        for call, _ in cases:
            call(0)
        yield


def heads_of(shape: LaunchShape) -> Heads:
    """Return the heads of a shape of attention."""
    stored, _, name = shape.kind.rpartition(" KV in ")
    return Heads.of(shape.sizes, DTYPES[name], cache_dtype(stored or name))


def attention_calls(
    heads: Heads, rows: Rows, block_size: int, device: torch.device, tuning: Tuning
) -> tuple[Callable[[int], None], int]:
    """Return attention with one of several copies of KV, and how many; they exceed the caches."""
    blocks = -(-rows.context // block_size) * rows.count
    width = row_size(heads.cache_dtype, heads.dim)
    arrays = 2 if heads.value_dim is None else 1
    size = arrays * blocks * heads.kv_heads * block_size * width * heads.cache_dtype.itemsize
    copies = copies_beyond_caches(size, device)
    k_cache, v_cache = _caches(heads, copies * blocks, block_size, device)
    tokens = rows.count * rows.queries
    q = torch.randn(
        tokens, heads.kv_heads * heads.group, heads.dim, device=device, dtype=heads.dtype
    )
    batches = list(_batches(rows, copies, blocks, block_size, device))
    attend = partial(
        paged_attention, scale=heads.dim**-0.5, window=None, softcap=None, tuning=tuning,
        value_dim=heads.value_dim,
    )  # fmt: skip

    def call(copy: int) -> None:
        attend(q, None, None, k_cache, v_cache, batches[copy])

    return call, copies


def _caches(
    heads: Heads, blocks: int, block_size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random keys and values, a block at a time the same in all blocks; latents twice."""
    width = row_size(heads.cache_dtype, heads.dim)
    found = []
    for _ in range(2 if heads.value_dim is None else 1):
        one = torch.zeros(1, heads.kv_heads, block_size, width, dtype=heads.cache_dtype)
        offsets = torch.arange(block_size)
        numbers = torch.randn(block_size, heads.kv_heads, heads.dim)
        write_rows(one, torch.zeros_like(offsets), offsets, numbers)
        codes = one.to(device).view(torch.uint8) if heads.cache_dtype.itemsize == 1 else one
        every = codes.to(device).expand(blocks, *codes.shape[1:]).contiguous()
        found.append(every.view(heads.cache_dtype))
    return found[0], found[-1]


def _batches(
    rows: Rows, copies: int, blocks: int, block_size: int, device: torch.device
) -> Iterator[AttentionMetadata]:
    """Yield a batch for each copy; each reads its own blocks in random order."""
    for copy in range(copies):
        order = copy * blocks + torch.randperm(blocks, device=device)
        yield AttentionMetadata(
            block_tables=order.int().view(rows.count, -1),
            query_start=torch.arange(rows.count + 1, device=device, dtype=torch.int32)
            * rows.queries,
            seq_lens=torch.full((rows.count,), rows.context, device=device, dtype=torch.int32),
            slot_mapping=torch.zeros(rows.count * rows.queries, device=device, dtype=torch.int64),
            block_size=block_size,
            max_query_len=1 if rows.queries == 1 else None,
        )
