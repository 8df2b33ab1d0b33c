"""Hand-made step plans for measuring, over KV blocks that are filled once."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple, TypeAlias

from weft.core.plan import RowAdd, StateRow, StepPlan, SubBatch
from weft.core.types import NEUTRAL, SamplingParams
from weft.cost.work import Work

WARM_S = 5e-3  # weights and KV of short steps are in caches then, as while serving
MOST_WARM = 8
LONG_S = 0.1  # of a step
SHORT = 64  # tokens of the prompts that fill the KV blocks

Run: TypeAlias = Callable[[Seq[StepPlan]], list[float]]
"""Computes plans one after the other, as an engine does; gives the seconds that each took."""


class StepRow(NamedTuple):
    """One row of a step: ``tokens`` after ``start``, with or without logits."""

    start: int
    tokens: int
    sampled: bool = True


Step: TypeAlias = tuple[StepRow, ...]


class GroupRoom(NamedTuple):
    """A KV group: its blocks, and its window (None for all tokens)."""

    num_blocks: int
    window: int | None


@dataclass(frozen=True, slots=True)
class HostRoom:
    """The host tier of an engine.

    Attributes:
        name: who attends there, by which its costs are kept.
        attends: whether anybody does.
        token_bytes: of the KV of a token, in all layers.
        carries: whether steps of the device carry rows of the host.
        overlaps: whether steps have sub-batches that overlap with its attention.
        slots: of recurrent state, which moves take along; 0 where rows have none.
    """

    name: str
    groups: tuple[GroupRoom, ...]
    attends: bool
    token_bytes: int
    carries: bool = True
    overlaps: bool = False
    slots: int = 0


@dataclass(frozen=True, slots=True)
class StepRoom:
    """The limits of steps for an engine as built.

    Attributes:
        rows: sequences at once.
        longest: tokens of a sequence.
        tokens: tokens of a step.
        host: where KV can move; None where it cannot.
        states: whether rows have recurrent states, for each of which there are two slots.
    """

    rows: int
    longest: int
    tokens: int
    block_size: int
    vocab_size: int
    groups: tuple[GroupRoom, ...]
    host: HostRoom | None = None
    states: bool = False

    @property
    def kv_tokens(self) -> int:
        """Tokens that fit into the smallest group without a window."""
        return _tokens_of(self.groups, self.block_size)

    @property
    def host_tokens(self) -> int:
        """The same of the host; 0 without one."""
        return 0 if self.host is None else _tokens_of(self.host.groups, self.block_size)

    def holds(self, step: Step) -> bool:
        """Whether the step's rows, tokens and contexts fit."""
        blocks = sum(-(-(row.start + row.tokens) // self.block_size) for row in step)
        return (
            0 < len(step) <= self.rows
            and sum(row.tokens for row in step) <= self.tokens
            and all(row.start + row.tokens <= self.longest for row in step)
            and blocks * self.block_size <= self.kv_tokens
            and all(self._windows_fit(step, group) for group in self.groups)
        )

    def share(self, part: float) -> StepRoom:
        """The same with KV for a part of what all rows can grow to, and for one such row at least.

        Every block is filled before anything is measured, and large caches are mostly more of the
        same.
        """
        most = -(-int(max(part * self.rows, 1) * self.longest) // self.block_size)
        groups = tuple(GroupRoom(min(blocks, most), window) for blocks, window in self.groups)
        return replace(self, groups=groups)

    def _windows_fit(self, step: Step, group: GroupRoom) -> bool:
        return sum(len(_held(row, group, self.block_size)) for row in step) <= group.num_blocks


def _tokens_of(groups: Seq[GroupRoom], block_size: int) -> int:
    full = [group.num_blocks for group in groups if group.window is None]
    return min(full or [group.num_blocks for group in groups]) * block_size


def work_of(step: Step) -> Work:
    """The tally of a step."""
    work = Work()
    for row in step:
        work.add(*row)
    return work


class Stage:
    """Brings rows into an executor and repeats steps on them.

    The same step may be computed again and again: it writes the same KV to the same places. What
    KV holds does not change what attention costs, so blocks are filled once and then belong to
    whichever row is measured.
    """

    def __init__(self, run: Run, room: StepRoom) -> None:
        self._run = run
        self._room = room
        self._draw = random.Random(0)
        self._ids = count(1)
        self._rows: tuple[int, ...] = ()
        self._added: dict[Step, tuple[RowAdd, ...]] = {}
        self._text = tuple(self._draw.choices(range(room.vocab_size), k=8 * room.longest))
        self._sampling = SamplingParams(temperature=0, seed=0).with_defaults(NEUTRAL)

    def fill(self) -> None:
        """Compute tokens into every block, so that no page is untouched and no number wild."""
        for _ in self.filling():
            pass

    def filling(self) -> Iterator[int]:
        """Do what ``fill`` does, a step at a time; yield how many blocks of a group are filled."""
        room = self._room
        blocks = -(-min(SHORT, room.longest) // room.block_size)
        row = StepRow(0, min(blocks * room.block_size, room.longest), False)
        step = (row,) * min(room.rows, max(1, room.tokens // row.tokens))
        for first in range(0, max(group.num_blocks for group in room.groups), blocks * len(step)):
            tables = [
                tuple(
                    tuple((first + index * blocks + i) % group.num_blocks for i in range(blocks))
                    for group in room.groups
                )
                for index in range(len(step))
            ]
            self._seat(self._adds(step, tables))
            self._run([self.plan(step)])
            yield first + blocks * len(step)

    def repeat(self, step: Step, seconds: float, most: int) -> list[float]:
        """Seconds of a few repetitions after one that does not count: as many as take so long.

        At least one, at most ``most``.
        """
        self._seat(self._adds(step, self._tables(step)))
        (first,) = self._run([self.plan(step)])
        times = max(1, min(most, int(seconds / first)))
        return self._run([self.plan(step) for _ in range(times)])

    def measure(self, step: Step, repeats: int) -> list[float]:
        """Seconds of each repetition, after some that do not count, until caches are warm.

        Of a long step, which hardly feels what the machine does for a moment, those of one.
        """
        self.seat(step)
        (first,) = self._run([self.plan(step)])
        if first > LONG_S:
            return self._run([self.plan(step)])
        warm = 1 + min(MOST_WARM, int(WARM_S / first))
        return self._run([self.plan(step) for _ in range(warm + repeats)])[warm:]

    def seat(self, step: Step) -> None:
        """Bring the rows of a step in, the first ones of the executor."""
        if step not in self._added:
            self._added[step] = self._adds(step, self._tables(step))
        self._seat(self._added[step])

    def close(self) -> None:
        """Leave no row behind."""
        self._seat(())

    def _seat(self, added: tuple[RowAdd, ...]) -> None:
        """Replace all rows."""
        self._run([StepPlan(next(self._ids), (), drop=self._rows, add=added)])
        self._rows = tuple(add.row for add in added)

    def _adds(self, step: Step, tables: Seq[tuple[tuple[int, ...], ...]]) -> tuple[RowAdd, ...]:
        """The rows of a step, each with another part of one random text."""
        most = len(self._text) - self._room.longest
        begins = [self._draw.randrange(most) for _ in step]
        return tuple(
            RowAdd(
                index,
                next(self._ids),
                self._text[begin : begin + row.start + row.tokens],
                row.start + row.tokens,
                self._sampling,
                frozenset(),
                table,
            )
            for index, (row, table, begin) in enumerate(zip(step, tables, begins, strict=True))
        )

    def plan(self, step: Step) -> StepPlan:
        """The plan of a step whose rows are seated; without rows it computes nothing."""
        if not step:
            return StepPlan(next(self._ids), ())
        starts, counts, samples = zip(*step, strict=True)
        rows = tuple(range(len(step)))
        states = tuple(StateRow(2 * row, 2 * row + 1) for row in rows) if self._room.states else ()
        batch = SubBatch(rows, starts, counts, samples, states=states)
        return StepPlan(next(self._ids), (batch,))

    def _tables(self, step: Step) -> list[tuple[tuple[int, ...], ...]]:
        """Blocks for each row and group, scattered as in a cache that has served for a while."""
        return scattered(step, self._room.groups, self._room.block_size, self._draw)


def scattered(
    step: Step, groups: Seq[GroupRoom], block_size: int, draw: random.Random
) -> list[tuple[tuple[int, ...], ...]]:
    """Tables for each row and group, of blocks in random order."""
    held = [sum(len(_held(row, group, block_size)) for row in step) for group in groups]
    free = [
        iter(draw.sample(range(group.num_blocks), count))
        for group, count in zip(groups, held, strict=True)
    ]
    return [
        tuple(
            tuple(_table(row, group, block_size, blocks))
            for group, blocks in zip(groups, free, strict=True)
        )
        for row in step
    ]


def _held(row: StepRow, group: GroupRoom, block_size: int) -> range:
    """The places of a row's table that hold a block: all, or those that a window still sees."""
    first = 0 if group.window is None else max(0, row.start + 1 - group.window) // block_size
    return range(first, -(-(row.start + row.tokens) // block_size))


def _table(row: StepRow, group: GroupRoom, block_size: int, free: Iterator[int]) -> Iterator[int]:
    held = _held(row, group, block_size)
    yield from (-1 for _ in range(held.start))
    yield from (next(free) for _ in held)


def structured(room: StepRoom) -> list[Step]:
    """Steps in which one thing varies at a time: decodes by number and context, chunks by size and
    start, short prompts by number, each with and without logits."""
    some = [n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256) if n <= room.rows]
    contexts = sorted({16, room.longest // 16, room.longest // 4, room.longest - 1})
    steps: list[Step] = [(StepRow(context, 1),) * number for number in some for context in contexts]
    chunks = [c for c in (16, 64, 256, 1024) if c < room.longest]
    for chunk in chunks:
        starts = {0, room.longest // 4, room.longest - chunk}
        steps += [(StepRow(start, chunk, bool(start % 2)),) for start in sorted(starts)]
        steps += [
            (StepRow(0, chunk, True),),
            (StepRow(0, chunk), *(StepRow(64, 1),) * min(8, room.rows - 1)),
        ]
    for number in some:
        steps += [(StepRow(0, 16, True),) * number, (StepRow(0, 16, False),) * number]
    return [step for step in dict.fromkeys(steps) if room.holds(step)]


def mixed(room: StepRoom, number: int, seed: int) -> list[Step]:
    """Steps as schedulers make them: decodes of random contexts, and in half of the steps chunks of
    one to three prompts."""
    draw = random.Random(f"steps {seed}")
    made: list[Step] = []
    while len(made) < number:
        rows: list[StepRow] = []
        for _ in range(draw.choice((0, 0, 0, 1, 1, 2, 3))):
            start = draw.choice((0, draw.randrange(room.longest // 2)))
            size = int(2 * (room.tokens / 2) ** draw.random())
            rows.append(StepRow(start, size, draw.random() < 0.5))
        most = draw.choice((0, 4, 16, room.rows))
        for _ in range(draw.randint(0, most)):
            rows.append(StepRow(int(room.longest ** draw.uniform(0.2, 1)) - 1, 1))
        if room.holds(tuple(rows)):
            made.append(tuple(rows))
    return made
