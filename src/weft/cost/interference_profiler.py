"""Measures steps in halves at several limits of decode attention, and fits what they slow down.

Beside ``overlap_profiler``, which measures sub-batches that overlap with attention on the host.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import ProfileError
from weft.core.plan import StepPlan, SubBatch
from weft.cost.fit import Fitted, agreement
from weft.cost.interference import Interference, Speeds, side_by_side
from weft.cost.model import step_time
from weft.cost.options import ProfileOptions
from weft.cost.steps import Run, Stage, Step, StepRoom, StepRow, work_of
from weft.cost.work import Work

WARM = 3  # repetitions that do not count
LEAST_STEPS = 4  # to fit to
TRIED = np.linspace(0.1, 1.0, 19)  # of each speed; then finer ones about the best
FINER = np.linspace(-0.06, 0.06, 13)
TIE = 1e-6  # of an error
LIVES = 0.05  # of a step, which arithmetic and reads each take at least to be measured


@dataclass(frozen=True)
class HalvedStep:
    """The rows of both halves, and how many are in the first."""

    rows: Step
    cut: int

    @property
    def works(self) -> list[Work]:
        return [work_of(self.rows[: self.cut]), work_of(self.rows[self.cut :])]


@dataclass(frozen=True)
class HalvedPoint:
    """A step in halves: what it computes, its median seconds, and those of the whole beside it."""

    works: list[Work]
    halves_s: float
    whole_s: float

    def paced_s(self, fitted: Fitted) -> float:
        """The seconds in terms of predictions for the whole, so that their error does not count."""
        whole = step_time(fitted, [self.works[0].joined(self.works[1])])
        return self.halves_s * whole / self.whole_s


def halved_steps(room: StepRoom, fitted: Fitted) -> list[HalvedStep]:
    """Prompts beside decodes, and decodes beside decodes, in which either part may be the longer.

    Raises:
        ProfileError: there are too few of them.
    """
    made: list[HalvedStep] = []
    most = min(room.rows, room.tokens // 2)
    contexts = sorted({room.longest // 4, room.longest // 2, room.longest - 1})
    for share, context, chunk in product((1, 2, 4), contexts, (4, 1)):
        decodes = (StepRow(context, 1),) * max(1, most // share - 1)
        tokens = min(room.longest, (room.tokens - len(decodes)) // chunk)
        if tokens > 1:
            made.append(HalvedStep((StepRow(0, tokens), *decodes), 1))
        made.append(HalvedStep((*decodes, *decodes)[:most], min(most, 2 * len(decodes)) // 2))
    held = [step for step in dict.fromkeys(made) if room.holds(step.rows) and step.cut]
    found = [step for step in held if _has_both(fitted, step)]
    if len(found) < LEAST_STEPS:
        raise ProfileError(
            "Halves of steps were not measured: with these settings steps have too little "
            "arithmetic or too little attention; raise max_num_seqs, max_num_batched_tokens or "
            "kv_memory."
        )
    return found


def _has_both(fitted: Fitted, step: HalvedStep) -> bool:
    terms = fitted.terms(work_of(step.rows))
    least = LIVES * terms.total
    return terms.linear + terms.prefill_attention > least and terms.decode_attention > least


class HalvesStage(Stage):
    """Repeats steps whole and in halves by turns."""

    def measure_both(self, step: HalvedStep, repeats: int) -> HalvedPoint:
        """The medians of both, after some that do not count."""
        self.seat(step.rows)
        plans = [self._by_turns(step) for _ in range(WARM + repeats)]
        times = self._run([plan for pair in plans for plan in pair])[2 * WARM :]
        whole, halves = statistics.median(times[::2]), statistics.median(times[1::2])
        return HalvedPoint(step.works, halves, whole)

    def _by_turns(self, step: HalvedStep) -> tuple[StepPlan, StepPlan]:
        whole, halved = self.plan(step.rows), self.plan(step.rows)
        (batch,) = halved.batches
        batches = tuple(
            SubBatch(batch.rows[part], batch.starts[part], batch.counts[part], batch.samples[part])
            for part in (slice(step.cut), slice(step.cut, None))
        )
        return whole, replace(halved, batches=batches)


def profile_interference(
    run: Run,
    room: StepRoom,
    fitted: Fitted,
    limit: Callable[[int], None],
    limits: Seq[int],
    options: ProfileOptions,
) -> tuple[Interference, dict[str, Any]]:
    """Measure an engine whose blocks are filled.

    Args:
        limit: has halves attend with so many programs at the most; 0 for any number.
        limits: those to measure.

    Returns:
        The speeds at each limit, and a report: for each limit its accuracy on steps that are not
        fitted to, and every point.

    Raises:
        ProfileError: steps have too little of either, or one took no time.
    """
    steps = halved_steps(room, fitted)
    stage = HalvesStage(run, room)
    found, reports = list[Speeds](), list[dict[str, Any]]()
    from tqdm import tqdm

    with tqdm(
        total=len(limits) * len(steps), desc="halves", unit="step", disable=not sys.stderr.isatty()
    ) as bar:
        for programs in limits:
            limit(programs)
            points = []
            for step in steps:
                points.append(stage.measure_both(step, max(2, options.repeats // 2)))
                bar.update()
            found.append(fit_speeds(fitted, programs, points))
            reports.append(_report(fitted, found[-1], points))
    stage.close()
    interference = Interference(tuple(found))
    return interference, {
        "chosen": interference.chosen.programs,
        "gain": interference.chosen.gain,
        "limits": reports,
    }


def fit_speeds(fitted: Fitted, programs: int, points: Seq[HalvedPoint]) -> Speeds:
    """The speeds with which predictions fit best: least absolute errors, relative to the steps.

    Of all on a grid, then of finer ones about the best; what halves take beyond their parts is the
    median of what is left. Of speeds that no step tells apart the larger ones.

    Raises:
        ProfileError: there are no points, or one took no time.
    """
    if not points or min(min(point.halves_s, point.whole_s) for point in points) <= 0:
        raise ProfileError("halves cannot be fitted to no steps, or to one that took no time")
    parts = _PointTable.of(fitted, points)
    best = parts.best(TRIED, TRIED, TRIED)
    best = parts.best(*(np.clip(value + FINER, 0.02, 1.0) for value in best))
    dense, attention, alone = (round(float(share), 4) for share in best)
    second_s = float(np.median(parts.left(np.array([best]))))
    gains = [point.whole_s / point.halves_s for point in points]
    saved = statistics.mean(1 - 1 / max(1.0, gain) for gain in gains)
    return Speeds(programs, dense, attention, alone, second_s, max(gains), saved)


@dataclass(frozen=True)
class _PointTable:
    """Of P points: seconds of arithmetic and of reads [2, P] side by side, the others, and all."""

    compute: NDArray[np.float64]
    memory: NDArray[np.float64]
    outside: NDArray[np.float64]
    taken: NDArray[np.float64]

    @classmethod
    def of(cls, fitted: Fitted, points: Seq[HalvedPoint]) -> _PointTable:
        rows = []
        for point in points:
            a, b = (fitted.terms(work) for work in point.works)
            outside = fitted.terms(point.works[0].joined(point.works[1])).outside
            arithmetic = a.linear + b.prefill_attention, b.linear + a.prefill_attention
            reads = b.decode_attention, a.decode_attention
            rows.append((*arithmetic, *reads, outside, point.paced_s(fitted)))
        table = np.array(rows).T
        return cls(np.maximum(table[:2], 0), np.maximum(table[2:4], 0), table[4], table[5])

    def left(self, speeds: NDArray[np.float64]) -> NDArray[np.float64]:
        """Seconds [K, P] that the parts do not take, at dense, attention and alone [K, 3]."""
        dense, attention, alone = (column[:, None, None] for column in speeds.T)
        layers = side_by_side(self.compute, self.memory, dense, attention, alone)
        layers = np.where(self.memory > 0, layers, self.compute)  # [K, 2, P]
        left: NDArray[np.float64] = self.taken - self.outside - layers.sum(1)
        return left

    def best(self, *tried: NDArray[np.float64]) -> NDArray[np.float64]:
        """Those of the tried speeds whose mean error, relative to the steps, is least."""
        speeds = np.stack(np.meshgrid(*tried, indexing="ij"), -1).reshape(-1, 3)  # [K, 3]
        left = self.left(speeds)
        errors = (np.abs(left - np.median(left, 1, keepdims=True)) / self.taken).mean(1)
        found: NDArray[np.float64] = speeds[np.argmin(errors - TIE * speeds.sum(1))]
        return found


def _report(fitted: Fitted, speeds: Speeds, points: Seq[HalvedPoint]) -> dict[str, Any]:
    """Of a limit: speeds of all points, and how those of every other one predict the rest."""
    half = fit_speeds(fitted, speeds.programs, points[::2])
    pairs = [(half.halves_s(fitted, p.works), p.paced_s(fitted)) for p in points[1::2]]
    return {
        **speeds._asdict(),
        "held_out": agreement(pairs)._asdict(),
        "points": [
            {
                "tokens": [work.tokens for work in point.works],
                "decodes": [work.decodes for work in point.works],
                "decode_context": [work.decode_context for work in point.works],
                "halves_s": point.halves_s,
                "whole_s": point.whole_s,
                "predicted": speeds.halves_s(fitted, point.works),
            }
            for point in points
        ],
    }
