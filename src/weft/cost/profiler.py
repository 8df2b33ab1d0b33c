"""Measures steps through an executor, fits costs to them, and reports the prediction error."""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from weft.core.errors import ConfigError
from weft.cost.curves import divide
from weft.cost.fit import Accuracy, Fitted, Point, ProfileKey, accuracy, agreement, fit
from weft.cost.options import ProfileOptions
from weft.cost.steps import Run, Stage, Step, StepRoom, StepRow, mixed, structured, work_of

PASSES = 5
LOOKS = 5  # repetitions that say where the dense curve bends
SMALL = (1, 2, 4, 8, 16)
LEAST_CONTEXT, LEAST_TOKENS = 64, 32  # of a sequence, and of a step
KV_SHARE = 0.25  # of what all rows could hold; beyond that, reading KV only goes on
GOAL = Accuracy(0.94, 0.91)


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step, a list for each time that it was visited."""

    step: Step
    visits: tuple[list[float], ...]

    def point(self, visits: slice = slice(None)) -> Point:
        """The median over some of the visits."""
        times = [seconds for part in self.visits[visits] for seconds in part]
        return Point(work_of(self.step), statistics.median(times))


def profile(
    run: Run, room: StepRoom, key: ProfileKey, layers: int, options: ProfileOptions
) -> tuple[Fitted, dict[str, Any]]:
    """Measure and fit.

    First the dense curve is looked at with whole prompts, to find its knots. Then all steps, those
    to fit to and those held out, are measured in ``PASSES`` passes, each in another order, so that
    a slow phase of the machine does not fall on a few of them. Held-out steps are measured twice
    as often: how the median of the later half agrees with that of the earlier half is what the
    machine itself repeats.

    Returns:
        The fit, and a report: its accuracy on the held-out steps, the machine's repeatability, and
        every point.

    Raises:
        ProfileError: too few steps to fit to.
        ConfigError: the engine has no room for them.
    """
    if room.longest < LEAST_CONTEXT or room.tokens < LEAST_TOKENS or room.rows < 2:
        raise ConfigError(
            f"a profile needs {LEAST_CONTEXT} tokens in a sequence, {LEAST_TOKENS} in a step, and "
            "two rows"
        )
    room = room.share(KV_SHARE)
    stage = Stage(run, room)
    stage.fill()
    from tqdm import tqdm  # engines that measure themselves show no bar

    bar = tqdm(desc="dense curve", unit="step", disable=not sys.stderr.isatty())

    def look(tokens: int) -> float:
        bar.update()
        return statistics.median(stage.measure(prompt_step(room, tokens), LOOKS))

    last = min(room.tokens, room.kv_tokens, room.rows * room.longest)
    knots = sorted(
        {*divide(look, 1, last, max(16, last // 32)), *(small for small in SMALL if small < last)}
    )
    bar.close()
    fitted_to = [prompt_step(room, tokens) for tokens in knots]
    fitted_to += structured(room) + mixed(room, options.steps, options.seed)
    held_out = mixed(room, options.steps // 2, options.seed + 1)
    times = _measure(stage, [*fitted_to, *held_out], len(fitted_to), options)
    stage.close()
    fitted = fit(key, layers, [one.point() for one in times[: len(fitted_to)]], knots)
    return fitted, _report(fitted, times[: len(fitted_to)], times[len(fitted_to) :], options)


def prompt_step(room: StepRoom, tokens: int) -> Step:
    """Whole prompts of so many tokens in all, without logits; one if the context allows."""
    full, rest = divmod(tokens, room.longest)
    return (StepRow(0, room.longest, False),) * full + ((StepRow(0, rest, False),) if rest else ())


def _measure(
    stage: Stage, steps: Seq[Step], fitted: int, options: ProfileOptions
) -> list[StepTimes]:
    """Measure all steps in passes; those after ``fitted`` twice in each."""
    parts: list[list[list[float]]] = [[] for _ in steps]
    share = -(-options.repeats // PASSES)
    from tqdm import tqdm

    with tqdm(
        total=PASSES * (2 * len(steps) - fitted),
        desc="steps",
        unit="step",
        disable=not sys.stderr.isatty(),
    ) as bar:
        for number in range(PASSES):
            order = [*range(len(steps)), *range(fitted, len(steps))]
            random.Random(f"pass {options.seed} {number}").shuffle(order)
            for index in order:
                parts[index].append(stage.measure(steps[index], share))
                bar.update()
    return [StepTimes(step, tuple(part)) for step, part in zip(steps, parts, strict=True)]


def _report(
    fitted: Fitted, fitted_to: Seq[StepTimes], held_out: Seq[StepTimes], options: ProfileOptions
) -> dict[str, Any]:
    points = [one.point() for one in held_out]
    first, second = slice(PASSES), slice(PASSES, None)
    again = agreement((one.point(second).seconds, one.point(first).seconds) for one in held_out)
    return {
        "repeats": options.repeats,
        "fitted_steps": len(fitted_to),
        "knots": len(fitted.dense.tokens),
        "held_out": accuracy(fitted, points)._asdict(),
        "fitted": accuracy(fitted, [one.point() for one in fitted_to])._asdict(),
        "repeatability": again._asdict(),
        "points": [_shown(fitted, one, "fitted") for one in fitted_to]
        + [_shown(fitted, one, "held out") for one in held_out],
    }


def _shown(fitted: Fitted, one: StepTimes, use: str) -> dict[str, Any]:
    """A point for the file: what it computed, measured and predicted."""
    work, seconds = one.point()
    return {
        "use": use,
        "tokens": work.tokens,
        "sampled": work.sampled,
        "prefills": work.prefills,
        "prefill_area": work.prefill_area,
        "decodes": work.decodes,
        "decode_context": work.decode_context,
        "seconds": seconds,
        "predicted": fitted.terms(work).total,
    }
