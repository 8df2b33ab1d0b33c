"""Sizes that steps are padded to, and the layout of the one buffer that is uploaded for each.

The buffer is int32 words. What sampling reads lies before a fixed place, what the forward pass
reads from there on, the block tables last. Between them stand the hashes of both layouts:

    ... [samples of S][lanes][hashes][tokens of T and rows of R][block tables, as many as there are]
        |                            pivot                                                         |
        +--------------------------------------- one upload ---------------------------------------+

So a captured forward pass depends on T alone and captured sampling on S alone, as each finds its
numbers at places that never change. What lanes are told has one size and is there where steps may
carry piggybacked rows.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from weft.kernels.sampling import SETTINGS

if TYPE_CHECKING:
    from torch import Tensor

VERSION = 5  # of what the sections mean
HASH_WORDS = 4  # before the pivot, two int64: of the forward layout, of the sample layout or 0
_WORD = 4
_ALIGNMENT = 4  # words: kernels are compiled once more for addresses that 16 does not divide

# As many as rvLLM captures (section 3), spread over four times as many tokens: decode steps lose
# little to padding, and chunks of prompts beside them replay a graph too.
SIZES = (1, 2, 4, *range(8, 129, 8), *range(144, 257, 16), *range(288, 513, 32))
# Of steps with prompts, which are captured, too: launched one by one, the kernels of a layer take
# longer than a GPU needs for fewer tokens. Padding costs an eighth at most.
PROMPT_SIZES = (*range(576, 1025, 64), *range(1152, 2049, 128))
FIRST_SIZES, SECOND_SIZES = 12, 3  # of overlapped sub-batches
STRIDE = 64  # beyond the largest size, so that few shapes meet the kernels
AHEAD = 4  # leased steps ordered before the oldest is collected, so the host may be late by as many
# Between the captured sizes of halves: as BlendServe's batches grow (appendix A.2). Smaller halves
# would read weights twice for less arithmetic than that takes.
HALF_STRIDE = 128


def padded_size(count: int, sizes: Seq[int] = SIZES) -> int:
    """Return the size that ``count`` tokens or samples are padded to.

    Args:
        sizes: ascending; larger counts are padded to a multiple of ``STRIDE``.
    """
    index = bisect_left(sizes, count)
    return sizes[index] if index < len(sizes) else -(-count // STRIDE) * STRIDE


def buffers_for(depth: int) -> int:
    """Buffers of the host for steps of which ``depth`` wait while another is packed.

    With none in flight two, as a step may be two sub-batches.
    """
    return max(2, depth + 1)


def sizes_for(rows: int, tokens: int = 0) -> tuple[int, ...]:
    """Return the sizes for steps of so many rows and tokens at the most, ascending.

    Decode steps of all rows are captured, and steps with prompts up to the last of
    ``PROMPT_SIZES``.

    Args:
        tokens: 0: no larger steps with prompts are captured than decode steps.
    """
    decodes = range(SIZES[-1] + STRIDE, padded_size(rows) + 1, STRIDE)
    most = min(padded_size(tokens), PROMPT_SIZES[-1])
    prompts = [size for size in PROMPT_SIZES if size < most]
    if most > SIZES[-1]:
        prompts.append(most)
    return tuple(sorted({*SIZES, *decodes, *prompts}))


def captured_sizes(most: int, sizes: Seq[int] = SIZES) -> tuple[int, ...]:
    """Return the sizes that steps of up to ``most`` tokens need, ascending."""
    return tuple(size for size in sizes if size <= padded_size(most, sizes))


@dataclass(frozen=True)
class PairSizes:
    """The sizes of overlapped sub-batches that are captured, ascending; 0 for no second one.

    Each pair is captured, so there are few.
    """

    first: tuple[int, ...]
    second: tuple[int, ...]

    @classmethod
    def halves(cls, sizes: Seq[int]) -> PairSizes:
        """Return every pair of these sizes of the halves of a step; none for no sizes."""
        return cls(tuple(sizes), tuple(sizes))

    @classmethod
    def up_to(cls, most: int, sizes: Seq[int] = SIZES) -> PairSizes:
        """Return those for sub-batches of up to ``most`` tokens: some of the captured sizes."""
        found = captured_sizes(most, sizes)
        return cls(_some(found, FIRST_SIZES), (0, *_some(found, SECOND_SIZES)))

    def padded(self, counts: Seq[int]) -> tuple[int, int] | None:
        """Return the pair that sub-batches of so many tokens are padded to, if there is one."""
        first, second = (*counts, 0)[:2]
        if not self.first or first > self.first[-1] or second > self.second[-1]:
            return None
        return (
            self.first[bisect_left(self.first, first)],
            self.second[bisect_left(self.second, second)],
        )


def _some(sizes: Seq[int], count: int) -> tuple[int, ...]:
    """Return so many of the sizes at most, the largest one among them."""
    return tuple(sizes[::-1][:: -(-len(sizes) // count)][::-1])


def half_sizes(sizes: Seq[int], stride: int = HALF_STRIDE) -> tuple[int, ...]:
    """Return those of the captured sizes that halves of a step are padded to."""
    return tuple(size for size in sizes if size % stride == 0)


def larger_sizes(most: int, captured: int) -> tuple[int, ...]:
    """Return ``most`` and its halves that are larger than the largest captured size, descending."""
    sizes = []
    while most > captured:
        sizes.append(most)
        most = most // 2 // STRIDE * STRIDE
    return tuple(sizes)


class Section(NamedTuple):
    """A tensor within a layout; ``offset`` counts words from the start of the layout."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def words(self) -> int:
        return prod(self.shape) * np.dtype(self.dtype).itemsize // _WORD


@dataclass(frozen=True)
class Layout:
    """The frozen sections of steps of one size.

    Attributes:
        size: tokens T, or samples S.
        words: a multiple of 4, so that what follows is aligned to 16 bytes, too.
    """

    size: int
    sections: tuple[Section, ...]
    words: int

    @cached_property
    def hash(self) -> int:
        """A number that is uploaded with the numbers of a step and comes back with its results.

        So the host can tell whether what was replayed found the numbers at the places it reads.
        """
        said = f"{VERSION} {self.sections} {self.words}".encode()
        return int.from_bytes(hashlib.sha256(said).digest()[:8], "little", signed=True)

    def views(self, buffer: Tensor, at: int) -> dict[str, Tensor]:
        """Return the sections by name, as views of ``buffer`` [words] int32 from word ``at`` on."""
        import torch

        return {
            section.name: buffer[at + section.offset : at + section.offset + section.words]
            .view(getattr(torch, section.dtype))
            .view(section.shape)
            for section in self.sections
        }


@lru_cache(maxsize=512)
def forward_layout(tokens: int, rows: int, groups: int, states: bool = False) -> Layout:
    """Return what the forward pass over T tokens of R rows reads, but for the block tables.

    ids: [T], a token or, for the token in flight of row r, -1 - r; positions: [T]; slot_mapping:
    [G, T or more], -1 for padding; query_start: [R + 1]; seq_lens: [R], 0 for padding; table_start:
    [G, R or more]: so many that each group's are aligned.

    Of a model with recurrent layers also the slots of their states: reads and writes: [R], as
    ``kernels.delta.StateBatch`` has them; marks: [T], -1 for none.
    """
    recurrent: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    if states:
        recurrent = (
            ("reads", "int32", (rows,)),
            ("writes", "int32", (rows,)),
            ("marks", "int32", (tokens,)),
        )
    return _layout(
        tokens,
        ("ids", "int64", (tokens,)),
        ("positions", "int64", (tokens,)),
        ("slot_mapping", "int64", (groups, _aligned(tokens, 2))),
        ("query_start", "int32", (rows + 1,)),
        ("seq_lens", "int32", (rows,)),
        ("table_start", "int32", (groups, _aligned(rows))),
        *recurrent,
    )


@dataclass(frozen=True)
class LaneSizes:
    """Steps that carry piggybacked rows: layers L, lanes K of a step, executor rows R."""

    layers: int
    lanes: int
    rows: int


@lru_cache(maxsize=512)
def lane_layout(sizes: LaneSizes) -> Layout:
    """Return what the lanes of a step are told.

    serial: [1], the number of the step; limits: [L] results that each layer may take; stays:
    [R + 1], 0 for rows whose token is dropped, else 1. Of the rows whose token begins in this step,
    one a lane: begun: [K] the row, R for none; ids and positions: [K] its latest token; seed,
    counter, settings and changes as in ``sample_layout``, for the token that comes of it.
    """
    lanes = sizes.lanes
    return _layout(
        lanes,
        ("serial", "int64", (1,)),
        ("limits", "int32", (sizes.layers,)),
        ("stays", "int64", (sizes.rows + 1,)),
        ("begun", "int64", (lanes,)),
        ("ids", "int64", (lanes,)),
        ("positions", "int64", (lanes,)),
        ("seed", "int64", (lanes,)),
        ("counter", "int64", (lanes,)),
        ("settings", "float64", (lanes, len(SETTINGS))),
        ("changes", "int32", (lanes,)),
    )


@lru_cache(maxsize=512)
def overlapped_layout(tokens: tuple[int, ...], rows: int, groups: int) -> Layout:
    """Return what the forward pass over overlapped sub-batches reads, but for the block tables.

    serial: [1], the number of the step; ids and positions: [N] of all sub-batches, as in
    ``forward_layout``; hosted: [N], the executor row of tokens that the host attends for, else R.
    Of sub-batch i, whose other tokens come first: slot_mapping, query_start, seq_lens and
    table_start, as in ``forward_layout``, under a name that ends with i.

    Args:
        tokens: of each sub-batch.
        rows: executor rows R.
    """
    count = sum(tokens)
    wanted: list[tuple[str, str, tuple[int, ...]]] = [
        ("serial", "int64", (1,)),
        ("ids", "int64", (count,)),
        ("positions", "int64", (count,)),
        ("hosted", "int64", (count,)),
    ]
    for number, size in enumerate(tokens):
        most = min(size, rows)
        wanted += [
            (f"slot_mapping{number}", "int64", (groups, _aligned(size, 2))),
            (f"query_start{number}", "int32", (most + 1,)),
            (f"seq_lens{number}", "int32", (most,)),
            (f"table_start{number}", "int32", (groups, _aligned(most))),
        ]
    return _layout(count, *wanted)


@lru_cache(maxsize=512)
def sample_layout(samples: int) -> Layout:
    """Return what sampling of S tokens reads.

    at: [S], the index within T; row: [S] executor rows; seed and counter: [S], of the random
    numbers; settings: [S, len(SETTINGS)], see ``kernels.sampling``; changes and guesses:
    [S], see ``kernels.sampling``.
    """
    return _layout(
        samples,
        ("at", "int64", (samples,)),
        ("row", "int64", (samples,)),
        ("seed", "int64", (samples,)),
        ("counter", "int64", (samples,)),
        ("settings", "float64", (samples, len(SETTINGS))),
        ("changes", "int32", (samples,)),
        ("guesses", "int32", (samples,)),
    )


def _layout(size: int, *wanted: tuple[str, str, tuple[int, ...]]) -> Layout:
    """Lay sections out one behind the other, each aligned to 16 bytes."""
    sections: list[Section] = []
    words = 0
    for name, dtype, shape in wanted:
        sections.append(Section(name, dtype, shape, words))
        words += _aligned(sections[-1].words)
    return Layout(size, tuple(sections), words)


def _aligned(count: int, numbers: int = _ALIGNMENT) -> int:
    """The least multiple of so many numbers, which are 16 bytes, that is not below ``count``."""
    return -(-count // numbers) * numbers


@dataclass(frozen=True)
class Buffer:
    """How large the buffer is, and where its parts begin.

    Attributes:
        pivot: the word where the hashes end and the tokens begin.
        words: of all, the largest step with the largest block tables.
        lanes: what lanes are told; None where steps have none.
    """

    pivot: int
    words: int
    lanes: Layout | None = None

    @classmethod
    def for_steps(
        cls,
        tokens: int,
        rows: int,
        blocks: Seq[int],
        lanes: LaneSizes | None = None,
        *,
        overlaps: bool = False,
        states: bool = False,
    ) -> Buffer:
        """Return the buffer of steps of up to ``tokens`` tokens, and as many samples.

        Args:
            blocks: entries of a row's block table, for each group.
            lanes: None where steps carry no piggybacked rows.
            overlaps: whether steps may be overlapped sub-batches.
            states: whether the model has recurrent layers.
        """
        told = None if lanes is None else lane_layout(lanes)
        pivot = sample_layout(tokens).words + HASH_WORDS + (0 if told is None else told.words)
        forward = forward_layout(tokens, min(rows, tokens), len(blocks), states).words
        if overlaps:
            forward = max(forward, overlapped_layout((tokens, tokens), rows, len(blocks)).words)
        return cls(pivot, pivot + forward + rows * sum(blocks), told)

    @property
    def lanes_at(self) -> int:
        """The word where samples end, and what lanes are told begins."""
        told = 0 if self.lanes is None else self.lanes.words
        return self.pivot - HASH_WORDS - told

    def forward_hash(self, layout: Layout, carries: bool) -> int:
        """The hash that stands for the forward pass of a step, with lanes or without."""
        if not carries or self.lanes is None:
            return layout.hash
        return layout.hash ^ self.lanes.hash

    def hashes(self, buffer: Tensor) -> Tensor:
        """Return the hashes [2] int64 in ``buffer`` [words] int32."""
        import torch

        return buffer[self.pivot - HASH_WORDS : self.pivot].view(torch.int64)
