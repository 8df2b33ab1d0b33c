"""Measures step costs in short slices, between which an idle engine may serve requests.

``weft profile`` measures for minutes and looks for the bends of the dense curve. This takes a
minute at most: knots at fixed distances, fewer repetitions, and no step that is much longer than a
step with a single token, so that a request which arrives meanwhile waits for one slice at most.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Generator, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from weft.core.errors import ProfileError
from weft.cost.fit import FEATURES, Fitted, Point, ProfileKey, accuracy, fit
from weft.cost.host_profiler import measure_moves
from weft.cost.host_steps import HostStage
from weft.cost.profiler import KV_SHARE, LEAST_CONTEXT, LEAST_TOKENS, prompt_step
from weft.cost.steps import GroupRoom, Run, Stage, Step, StepRoom, mixed, structured, work_of

SLICE_S = 0.03  # that repetitions of one step take together, if it is not longer itself
LONGEST_STEPS = 2.5  # steps with a single token that a measured step may take, ...
LONGEST_S = 0.06  # ... or so many seconds, if that is more
REPEATS = 8  # of a step in one slice, at the most
PASSES = 5
GROWTH = 1.35  # from one knot of the dense curve to the next
MOST_KV_TOKENS = 16384  # in the blocks that are filled
FILLING = 0.25  # share of the time that filling blocks may take
FITTED_STEPS, HELD_OUT_STEPS = 40, 20
MOVES, MOST_MOVED_TOKENS = 4, 512  # of each size, and of the longest one

Result = tuple[Fitted, dict[str, Any]]


def quick_profile(
    run: Run,
    room: StepRoom,
    key: ProfileKey,
    layers: int,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Generator[None, None, Result]:
    """Measure and fit; yields after each slice, with no row left in the executor.

    The KV blocks from 0 on are written, so nothing may be kept in them when the next slice begins.

    Args:
        seconds: that all slices take together, apart from the first pass over all steps.

    Returns:
        The fit and its report: accuracy on held-out steps, and how long it took.

    Raises:
        ProfileError: too few steps were short enough to fit costs to them.
    """
    if room.longest < LEAST_CONTEXT or room.tokens < LEAST_TOKENS or room.rows < 2:
        raise ProfileError(
            f"a profile needs {LEAST_CONTEXT} tokens in a sequence, {LEAST_TOKENS} in a step, and "
            "two rows"
        )
    measuring = _Measuring(run, _small(room.share(KV_SHARE)), clock)
    knots = yield from measuring.dense_curve()
    measuring.limit_room(replace(measuring.room, tokens=knots[-1]))
    yield from measuring.fill(FILLING * seconds)
    room = measuring.room
    steps = [
        step
        for step in [*structured(room), *mixed(room, FITTED_STEPS, 0)]
        if work_of(step).tokens <= knots[-1]
    ]
    held_out = [
        step for step in mixed(room, HELD_OUT_STEPS, 1) if work_of(step).tokens <= knots[-1]
    ]
    prompts = [prompt_step(room, tokens) for tokens in knots]
    for number in range(PASSES):
        order = [*steps, *held_out, *(prompts if number else ())]
        random.Random(f"pass {number}").shuffle(order)
        for step in order:
            if number and measuring.spent_s > seconds:
                break
            yield from measuring.visit(step)
    points = [measuring.point(step) for step in [*prompts, *steps] if step in measuring.times]
    if len(points) < len(knots) + len(FEATURES):
        raise ProfileError(
            f"only {len(points)} steps were short enough to be measured while serving; measure "
            "with 'weft profile'"
        )
    fitted = fit(key, layers, points, knots)
    kept = [measuring.point(step) for step in held_out if step in measuring.times]
    return fitted, {
        "by": "the engine, while idle",
        "seconds": round(measuring.spent_s, 1),
        "fitted_steps": len(points),
        "knots": len(knots),
        "fitted": accuracy(fitted, points)._asdict(),
        "held_out": accuracy(fitted, kept)._asdict() if kept else None,
    }


def quick_host_profile(run: Run, room: StepRoom, fitted: Fitted) -> Generator[None, None, Fitted]:
    """Measure the moves of the host tier for costs that lack them; yields as ``quick_profile``.

    Returns:
        The costs with those of the host tier.

    Raises:
        ConfigError: one of the tiers is too small.
    """
    host = room.host
    assert host is not None, "there is a host tier"
    room = _small(room.share(KV_SHARE))
    stage = HostStage(run, room)
    costs, _ = yield from measure_moves(stage, room, MOVES, MOST_MOVED_TOKENS)
    return replace(fitted, hosts={**fitted.hosts, host.name: costs})


def _small(room: StepRoom) -> StepRoom:
    """The same with few blocks, which are soon filled; sequences are as long as these allow."""
    blocks = max(1, MOST_KV_TOKENS // room.block_size)
    groups = tuple(GroupRoom(min(count, blocks), window) for count, window in room.groups)
    return _fitting(replace(room, groups=groups))


def _fitting(room: StepRoom) -> StepRoom:
    return replace(room, longest=min(room.longest, room.kv_tokens))


class _Measuring:
    """Times of steps as they come in.

    Attributes:
        times: seconds of each repetition, by step.
        spent_s: in all slices together.
    """

    def __init__(self, run: Run, room: StepRoom, clock: Callable[[], float]) -> None:
        self.room = room
        self.times: dict[Step, list[float]] = {}
        self.spent_s = 0.0
        self._run = run
        self._clock = clock
        self._stage = Stage(run, room)
        self._longest_s = LONGEST_S
        self._too_long: set[Step] = set()

    def point(self, step: Step) -> Point:
        """A step with the median of its times."""
        return Point(work_of(step), statistics.median(self.times[step]))

    def limit_room(self, room: StepRoom) -> None:
        """Measure within a smaller room from now on."""
        self.room = room
        self._stage = Stage(self._run, room)

    def dense_curve(self) -> Generator[None, None, list[int]]:
        """Measure whole prompts, the next one longer by ``GROWTH``; return their tokens."""
        last = min(self.room.tokens, self.room.kv_tokens, self.room.rows * self.room.longest)
        knots: list[int] = []
        for tokens in _sizes(last):
            step = prompt_step(self.room, tokens)
            yield from self.visit(step)
            knots.append(tokens)
            taken = statistics.median(self.times[step])
            if tokens == 1:
                self._longest_s = max(LONGEST_S, LONGEST_STEPS * taken)
            if taken > self._longest_s and len(knots) > 1:
                break
        return knots

    def fill(self, seconds: float) -> Iterator[None]:
        """Compute tokens into blocks for so long; the room shrinks to those that were filled."""
        until = self.spent_s + seconds
        filling = self._stage.filling()
        while True:
            begin = self._clock()
            filled = next(filling, None)
            self._stage.close()
            self.spent_s += self._clock() - begin
            yield
            if filled is None:
                return
            if self.spent_s > until:
                groups = tuple(
                    GroupRoom(min(count, max(filled, 1)), window)
                    for count, window in self.room.groups
                )
                self.limit_room(_fitting(replace(self.room, groups=groups)))
                return

    def visit(self, step: Step) -> Iterator[None]:
        """Measure a step as often as fits into a slice, unless it was found to be too long."""
        if step in self._too_long:
            return
        begin = self._clock()
        taken = self._stage.repeat(step, SLICE_S, REPEATS)
        self._stage.close()
        self.times.setdefault(step, []).extend(taken)
        if min(taken) > self._longest_s:
            self._too_long.add(step)
        self.spent_s += self._clock() - begin
        yield


def _sizes(last: int) -> Seq[int]:
    """1, 2, 3, ... in steps that grow by ``GROWTH``, up to ``last``."""
    sizes: list[int] = []
    size = 1.0
    while size < last:
        if not sizes or int(size) > sizes[-1]:
            sizes.append(int(size))
        size = max(size + 1, size * GROWTH)
    return [*sizes, last]
