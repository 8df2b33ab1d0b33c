"""Measures steps of overlapped sub-batches, fits costs to them, and says how well they predict."""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from weft.cost.curves import Grid
from weft.cost.fit import Fitted, agreement
from weft.cost.host_costs import HostCosts, OverlapCost
from weft.cost.model import step_time
from weft.cost.options import ProfileOptions
from weft.cost.overlap_fit import OverlapPoint, fit_overlap, predicted_s
from weft.cost.overlap_steps import (
    Overlapping,
    OverlapStage,
    OverlapVisit,
    Splits,
    as_planned,
    at_random,
)
from weft.cost.profiler import PASSES
from weft.cost.steps import Step, StepRoom, work_of


@dataclass(frozen=True)
class _VisitedStep:
    """A step, with its visits."""

    what: Overlapping
    visits: list[OverlapVisit]

    def seconds(self, part: slice = slice(None)) -> float:
        """The median over some of the visits."""
        return statistics.median(s for visit in self.visits[part] for s in visit.seconds)

    def paced(self, fitted: Fitted) -> OverlapPoint:
        """What the step took in terms of predictions for its rows of the device alone.

        So neither the error of those nor a slow phase of the machine is taken for the cost of
        overlapping.
        """
        works = self.what.works
        if not self.what.own:
            return OverlapPoint(works, self.seconds())
        alone_s = step_time(fitted, [work_of(self.what.own)])
        ratios = [s * alone_s / statistics.median(v.alone) for v in self.visits for s in v.seconds]
        return OverlapPoint(works, statistics.median(ratios))


def attention_grid(
    stage: OverlapStage, own: Step, decodes: Seq[int], contexts: Seq[int], repeats: int
) -> Grid:
    """What the host attends for, by decodes and context, beside these rows of the device.

    Raises:
        ProfileError: the host fails.
    """
    steps = [Overlapping(own, (context,) * n, ()) for n in decodes for context in contexts]
    return Grid.of({(len(s.first), s.first[0]): stage.overlap(s, repeats).attend_s for s in steps})


def profile_overlap(
    stage: OverlapStage,
    room: StepRoom,
    fitted: Fitted,
    costs: HostCosts,
    limits: tuple[int, int],
    splits: Splits,
    options: ProfileOptions,
) -> tuple[OverlapCost, dict[str, Any]]:
    """Measure steps with decodes of the host, fit to some of them, and predict the others.

    Args:
        costs: of the host tier without overlap.
        limits: the most decodes of the host, and the longest context.
        splits: what the scheduler compares that is to be served with; held-out steps are of it.

    Returns:
        The costs, and a report: the accuracy on held-out steps of one and of two sub-batches, as
        fitted and as the parts alone predict them, beside what the machine repeats.

    Raises:
        ProfileError: the host fails.
    """
    known = fitted.planned_with(replace(costs, overlap=OverlapCost()))
    fits, held = max(12, options.steps // 3), max(8, options.steps // 5)
    planned = partial(as_planned, stage, room, limits, splits=partial(splits, known))
    steps = at_random(stage, room, limits, fits - fits // 2, options.seed)
    steps += planned(fits // 2, options.seed)
    used = len(steps)
    measured = _measure(stage, [*steps, *planned(held, options.seed + 1)], used, options)
    found = fit_overlap(known, [one.paced(known) for one in measured[:used]])
    return found, _report(known, found, measured, used)


def _measure(
    stage: OverlapStage, steps: Seq[Overlapping], fitted: int, options: ProfileOptions
) -> list[_VisitedStep]:
    """Visit all in passes, each in another order; those after ``fitted`` twice in each."""
    found = [_VisitedStep(step, []) for step in steps]
    share = -(-options.repeats // PASSES)
    from tqdm import tqdm

    with tqdm(
        total=PASSES * (2 * len(steps) - fitted), desc="overlap", unit="step",
        disable=not sys.stderr.isatty(),
    ) as bar:  # fmt: skip
        for number in range(PASSES):
            order = [*range(len(steps)), *range(fitted, len(steps))]
            random.Random(f"overlap {options.seed} {number}").shuffle(order)
            for index in order:
                found[index].visits.append(stage.overlap(steps[index], share))
                bar.update()
    return found


def _report(
    known: Fitted, cost: OverlapCost, measured: Seq[_VisitedStep], used: int
) -> dict[str, Any]:
    held = measured[used:]

    def accuracy(of: Seq[_VisitedStep], by: OverlapCost = cost) -> dict[str, float]:
        pairs = ((predicted_s(known, by, one.what.works), one.seconds()) for one in of)
        return agreement(pairs)._asdict()

    def again(of: Seq[_VisitedStep]) -> dict[str, float]:
        first, second = slice(PASSES), slice(PASSES, None)
        return agreement((one.seconds(second), one.seconds(first)) for one in of)._asdict()

    report: dict[str, Any] = {"cost": cost._asdict(), "steps": used}
    for name, two in (("one", False), ("two", True)):
        if some := [one for one in held if bool(one.what.second) == two]:
            report[name] = {
                "held_out": accuracy(some),
                "parts": accuracy(some, OverlapCost()),
                "repeatability": again(some),
            }
    shown = [
        _shown(known, cost, one, "fitted" if index < used else "held out")
        for index, one in enumerate(measured)
    ]
    return report | {
        "held_out": accuracy(held),
        "fitted": accuracy(measured[:used]),
        "repeatability": again(held),
        "points": shown,
    }


def _shown(known: Fitted, cost: OverlapCost, one: _VisitedStep, use: str) -> dict[str, Any]:
    """A step for the file."""
    return {
        "use": use,
        "own": [list(row) for row in one.what.own],
        "first": list(one.what.first),
        "second": list(one.what.second),
        "seconds": one.seconds(),
        "paced": one.paced(known).seconds,
        "attend_s": statistics.median(visit.attend_s for visit in one.visits),
        "parts": predicted_s(known, OverlapCost(), one.what.works),
        "predicted": predicted_s(known, cost, one.what.works),
    }
