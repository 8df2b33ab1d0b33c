"""Hand-made steps of one or two sub-batches with decodes of the host (NEO section 3.1)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TypeAlias

from weft.core.errors import ProfileError
from weft.core.plan import StepPlan, SubBatch, Tier
from weft.cost.fit import Fitted
from weft.cost.host_steps import ALONE, HostRun, HostStage
from weft.cost.steps import MOST_WARM, WARM_S, Step, StepRoom, StepRow, mixed, work_of
from weft.cost.work import Work

DRAWS = 20  # random steps for each that is wanted, as not all have room for rows of the host
IDLE = 0.15  # share of random steps with nothing for the device but these rows

Splits: TypeAlias = Callable[[Fitted, Work, Seq[int], int], Seq[tuple[Seq[int], Seq[int]]]]
"""The comparison of a scheduler: by costs with a host tier, the device's own work, the context of
each decode of the host, and the most of them, it says which go into which of two sub-batches.
"""


@dataclass(frozen=True)
class Overlapping:
    """Rows of the device, and the contexts of decodes of the host in each sub-batch."""

    own: Step
    first: tuple[int, ...]
    second: tuple[int, ...]

    @property
    def works(self) -> list[Work]:
        """The tally of each sub-batch."""
        first, second = work_of(self.own), Work()
        for work, contexts in ((first, self.first), (second, self.second)):
            for context in contexts:
                work.add(context - 1, 1, tier=Tier.HOST)
        return [first, second] if self.second else [first]


@dataclass(frozen=True)
class OverlapVisit:
    """Repetitions of a step.

    Attributes:
        alone: seconds of its rows of the device without those of the host, just before.
        seconds: of each repetition.
        attend_s: seconds that the host attended in each.
    """

    alone: list[float]
    seconds: list[float]
    attend_s: float


class OverlapStage(HostStage):
    """Runs steps in an executor that overlaps sub-batches with attention on the host."""

    def __init__(self, run: HostRun, room: StepRoom) -> None:
        super().__init__(run.run, room)
        self._host_run = run

    def overlap(self, step: Overlapping, repeats: int) -> OverlapVisit:
        """Repeat a step, after some repetitions that do not count.

        Raises:
            ProfileError: the host fails.
        """
        own, contexts = step.own, (*step.first, *step.second)
        put = self._put(own, [StepRow(context - 1, 1) for context in contexts])
        moves = tuple(row.move(Tier.HOST) for row in put)
        self._run([replace(self._stage.plan(()), moves=moves)])
        alone = self._run([self._stage.plan(own) for _ in range(1 + ALONE)])[1:] if own else []
        batches = _batches(step, [row.row for row in put])
        (first,), _ = self._timed(batches, 1)
        warm = 1 + min(MOST_WARM, int(WARM_S / first))
        seconds, attend_s = self._timed(batches, warm + repeats)
        self._leave()
        return OverlapVisit(alone, seconds[warm:], attend_s)

    def _timed(self, batches: tuple[SubBatch, ...], times: int) -> tuple[list[float], float]:
        """Seconds of each repetition, and how long the host attended on average."""
        before, seconds = self._host_run.counted().busy_s, list[float]()
        plans: Iterator[StepPlan] = (
            replace(self._stage.plan(()), batches=batches) for _ in range(times)
        )
        for took_s, result in self._host_run.follow(plans):
            if result.faults:
                raise ProfileError(f"the host failed: {next(iter(result.faults.values()))}")
            seconds.append(took_s)
        return seconds, (self._host_run.counted().busy_s - before) / times


def _batches(step: Overlapping, host: Seq[int]) -> tuple[SubBatch, ...]:
    """The sub-batches of a step whose rows of the host are these, in order."""
    starts, counts, samples = zip(*step.own, strict=True) if step.own else ((), (), ())
    cut = len(step.first)
    first = SubBatch(
        (*range(len(step.own)), *host[:cut]),
        (*starts, *(context - 1 for context in step.first)),
        (*counts, *(1 for _ in step.first)),
        (*samples, *(True for _ in step.first)),
        (Tier.DEVICE,) * len(step.own) + (Tier.HOST,) * cut,
    )
    if not step.second:
        return (first,)
    more = len(step.second)
    second = SubBatch(
        tuple(host[cut:]),
        tuple(context - 1 for context in step.second),
        (1,) * more,
        (True,) * more,
        (Tier.HOST,) * more,
    )
    return first, second


def at_random(
    stage: HostStage, room: StepRoom, limits: tuple[int, int], number: int, seed: int
) -> list[Overlapping]:
    """Steps with any decodes of the host, in one sub-batch and in two by turns.

    Args:
        limits: the most decodes, and the longest context.
    """
    draw = random.Random(f"overlapped {seed}")
    made: list[Overlapping] = []
    for own, contexts in _drawn(room, limits, DRAWS * number, draw, IDLE):
        two = len(made) % 2 == 1
        if len(made) == number or len(contexts) < 2 * two:
            continue
        cut = draw.randrange(bool(not own), len(contexts)) if two else len(contexts)
        if stage.holds_each(own, contexts):
            made.append(Overlapping(own, contexts[:cut], contexts[cut:]))
    return made


def as_planned(
    stage: HostStage,
    room: StepRoom,
    limits: tuple[int, int],
    number: int,
    seed: int,
    splits: Callable[[Work, Seq[int], int], Seq[tuple[Seq[int], Seq[int]]]],
) -> list[Overlapping]:
    """Steps with the decodes of the host that a scheduler would choose from several waiting ones.

    Of what it compares those of one and of two sub-batches are taken by turns. Where it would
    choose too few, the others are as ``at_random`` makes them.
    """
    draw = random.Random(f"planned {seed}")
    made: list[Overlapping] = []
    for own, contexts in _drawn(room, limits, DRAWS * number, draw, 0.0):
        if len(made) == number:
            break
        work = work_of(own)
        found = [
            (first, second)
            for first, second in splits(work, contexts, room.tokens - work.tokens)
            if bool(second) == (len(made) % 2 == 1) and (first or second)
        ]
        if not found:
            continue
        parts = (tuple(contexts[i] for i in part) for part in draw.choice(found))
        step = Overlapping(own, *parts)
        if stage.holds_each(own, (*step.first, *step.second)):
            made.append(step)
    return made + at_random(stage, room, limits, number - len(made), seed)


def _drawn(
    room: StepRoom, limits: tuple[int, int], number: int, draw: random.Random, idle: float
) -> Iterator[tuple[Step, tuple[int, ...]]]:
    """Rows of the device, and contexts of decodes that wait on the host."""
    decodes, longest = limits
    for own in mixed(room, number, draw.randrange(2**32)):
        rows = () if draw.random() < idle else own
        most = min(decodes, room.rows - len(rows), room.tokens - work_of(rows).tokens)
        if most < 1:
            continue
        mean = 2 * (longest / 2) ** draw.random()
        yield (
            rows,
            tuple(
                max(2, min(longest, int(mean * draw.uniform(0.5, 1.5))))
                for _ in range(int((most + 1) ** draw.random()))
            ),
        )
