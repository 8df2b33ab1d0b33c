"""Measures a host tier while the device computes: moves of KV, attention, and piggybacked rows.

Four things are measured. Moves of several sizes in both directions, with a step and without one.
Attention and its round trip over a grid of (decodes, context), as rows of the host go through the
layers of steps of the device. What such steps take longer, of which some are held out. And steps of
overlapped sub-batches (``overlap_profiler``).
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Generator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from weft.core.errors import ConfigError
from weft.cost.curves import Grid
from weft.cost.fit import Fitted, agreement
from weft.cost.host_costs import CarryCost, HostCosts, MoveCost
from weft.cost.host_fit import (
    CarryPoint,
    MovePoint,
    TripPoint,
    carry_points,
    fit_carry,
    fit_move,
    fit_wake,
    took,
)
from weft.cost.host_steps import CarryStage, HostRun, HostStage, MoveTimes, Visit
from weft.cost.options import ProfileOptions
from weft.cost.overlap_profiler import attention_grid, profile_overlap
from weft.cost.overlap_steps import OverlapStage, Splits
from weft.cost.profiler import KV_SHARE, PASSES
from weft.cost.steps import Step, StepRoom, StepRow, mixed, work_of

TOKENS = 2  # of each row of the host in one visit
SPARE_TOKENS = TOKENS + 1  # that its context may grow by
LONG_ENOUGH = 256  # tokens of the longest context of the grid, for which it may have fewer decodes
MOST_DECODES = 256
BESIDE = 8  # rows of the device that decode meanwhile
BOTH_WAYS = 0.75  # of the sum of two moves, below which they go on at the same time

Moves = tuple[HostCosts, dict[str, Any]]


@dataclass(frozen=True)
class Carrying:
    """Steps of the device with these rows, which carry ``rows`` of the host."""

    own: Step
    rows: int
    context: int
    spread: bool


class _Sized(NamedTuple):
    """The times of moves of one size, and what each direction takes."""

    tokens: int
    times: MoveTimes

    def point(self, *, out: bool, part: slice = slice(None)) -> MovePoint:
        taken = (self.times.out if out else self.times.back)[part]
        step_s = statistics.median(taken)
        return MovePoint(self.tokens, step_s - statistics.median(self.times.without[part]), step_s)


def measure_moves(
    stage: HostStage, room: StepRoom, repeats: int, most_tokens: int | None = None
) -> Generator[None, None, Moves]:
    """Measure moves of KV; yields after each size, with no row left in the executor.

    Args:
        repeats: of each move.
        most_tokens: of the longest one; None for those of a sequence.

    Returns:
        costs without attention, and the report: the accuracy for sizes that were held out, and how
        far moves repeat themselves.
    """
    longest = min(most_tokens or room.longest, room.longest, room.kv_tokens, room.host_tokens // 2)
    longest -= longest % room.block_size
    if longest < 4 * room.block_size:
        raise ConfigError(f"moves of KV are measured with {4 * room.block_size} tokens or more")
    sizes = sorted({room.block_size, longest // 8, longest // 2, longest} - {0, 1})
    measured: dict[int, _Sized] = {}
    for tokens in (*sizes, *(held := (longest // 4, 3 * longest // 4))):
        measured[tokens] = _Sized(tokens, stage.shuttle((), tokens, repeats))
        stage.close()
        yield
    beside = _Sized(longest, stage.shuttle(beside_step(room), longest, repeats))
    stage.close()
    yield
    both = _Sized(longest, stage.shuttle((), longest, repeats, both=True))
    stage.close()
    yield
    out, back = (
        fit_move([measured[tokens].point(out=out) for tokens in sizes]) for out in (True, False)
    )
    alone_s = out.seconds(longest) + back.seconds(longest)
    costs = HostCosts(
        None, out, back, stall=_share(_both_ways(beside), alone_s),
        duplex=_both_ways(both) / 2 < BOTH_WAYS * alone_s,
    )  # fmt: skip
    return costs, _moves_report(costs, [measured[tokens] for tokens in held], repeats)


def _both_ways(sized: _Sized) -> float:
    return sized.point(out=True).seconds + sized.point(out=False).seconds


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 1.0


def _moves_report(costs: HostCosts, held: Seq[_Sized], repeats: int) -> dict[str, Any]:
    """Steps that move KV and do nothing else, as predicted and as repeated."""
    pairs, again = [], []
    first, second = slice(repeats // 2), slice(repeats // 2, None)
    for sized in held:
        for out, cost in ((True, costs.out), (False, costs.back)):
            point = sized.point(out=out)
            without_s = point.step_s - point.seconds
            pairs.append((cost.seconds(point.tokens) + without_s, point.step_s))
            again.append(
                (sized.point(out=out, part=second).step_s, sized.point(out=out, part=first).step_s)
            )
    return {
        "held_out": agreement(pairs)._asdict(),
        "repeatability": agreement(again)._asdict(),
    }


def beside_step(room: StepRoom) -> Step:
    """Decodes of the device, as a step has them beside what is measured of the host."""
    rows = max(1, min(BESIDE, room.rows // 2))
    while rows > 1 and not room.holds((StepRow(room.longest // 4, 1),) * rows):
        rows //= 2
    return (StepRow(room.longest // 4, 1),) * rows


def grid_of(stage: HostStage, room: StepRoom, own: Step) -> tuple[list[int], list[int]]:
    """The decodes and contexts of a full grid that the host has room for.

    Raises:
        ConfigError: there is room for less than two by two.
    """
    most = 1
    while most * 2 <= min(MOST_DECODES, room.rows - len(own)):
        most *= 2

    def longest(decodes: int) -> int:
        each = room.host_tokens // decodes // room.block_size * room.block_size
        context = min(each, room.longest, room.kv_tokens) - SPARE_TOKENS
        while context > 1 and not stage.holds(own, decodes, context + SPARE_TOKENS):
            context -= room.block_size
        return context

    wanted = min(LONG_ENOUGH, longest(2))
    while most > 2 and longest(most) < wanted:
        most //= 2
    context = longest(most)
    if most < 2 or context < 2 * room.block_size:
        raise ConfigError(
            f"attention on the host is measured with two rows of {2 * room.block_size} tokens or "
            "more; raise host_kv_memory or max_num_seqs"
        )
    shortest = room.block_size
    contexts = {int(shortest * (context / shortest) ** (part / 3)) for part in range(4)}
    return [1 << bits for bits in range(most.bit_length())], sorted(contexts)


def carryings(stage: HostStage, room: StepRoom, number: int, seed: int) -> list[Carrying]:
    """Steps as schedulers make them, which carry some rows of the host of random contexts."""
    draw = random.Random(f"carried {seed}")
    decodes, contexts = grid_of(stage, room, beside_step(room))
    made: list[Carrying] = []
    for own in mixed(room, 20 * number, seed):
        most = min(decodes[-1], room.rows - len(own))
        if most < 1 or len(made) == number:
            continue
        rows = int(most ** draw.random())
        context = int(contexts[0] * (contexts[-1] / contexts[0]) ** draw.random())
        if stage.holds(own, rows, context + SPARE_TOKENS):
            made.append(Carrying(own, rows, context, draw.random() < 0.5))
    return made


class _Measured(NamedTuple):
    """A step that carries rows, with its visits."""

    what: Carrying
    visits: list[Visit]

    def points(
        self, fitted: Fitted, part: slice = slice(None), *, paced: bool = False
    ) -> list[CarryPoint]:
        """Every step of some of the visits."""
        own = work_of(self.what.own)
        found = [carry_points(fitted, own, visit, paced=paced) for visit in self.visits[part]]
        return [point for points in found for point in points]

    def trip_s(self, part: slice = slice(None)) -> float:
        """The round trip of some of the visits."""
        return statistics.median(visit.round_trip_s for visit in self.visits[part])

    @property
    def round_trip_s(self) -> float:
        return self.trip_s()

    @property
    def attend_s(self) -> float:
        return statistics.median(visit.attend_s for visit in self.visits)


def profile_host(
    run: HostRun,
    room: StepRoom,
    fitted: Fitted,
    options: ProfileOptions,
    splits: Splits | None = None,
) -> tuple[HostCosts, dict[str, Any]]:
    """Measure the host tier of ``room`` after the device, whose blocks are filled, and fit to it.

    Args:
        splits: what a scheduler of overlapped sub-batches compares; None measures no such steps.

    Returns:
        The costs, and a report: accuracy on held-out moves, on steps that carry rows and were held
        out, on their round trips, and on overlapped sub-batches, each beside what the machine
        repeats.

    Raises:
        ProfileError: the host fails.
        ConfigError: it has no room for what is measured.
    """
    assert room.host is not None, "there is a host tier"
    host, room = room.host, room.share(KV_SHARE)
    stage = CarryStage(run, room, fitted.layers)
    costs, moves = _finished(measure_moves(stage, room, options.repeats))
    report = {"name": host.name, "moves": moves, **described(costs, host.token_bytes)}
    if not host.attends:
        return costs, report
    own = beside_step(room)
    decodes, contexts = grid_of(stage, room, own)
    overlapping = OverlapStage(run, room)
    if host.carries:
        costs, carried = _measure_attention(stage, room, fitted, costs, options)
        report |= carried
    else:
        grid = attention_grid(overlapping, own, decodes, contexts, options.repeats)
        costs = replace(costs, attention=grid)
    if splits is not None and host.overlaps:
        limits = decodes[-1], contexts[-1]
        overlap, report["overlapped"] = profile_overlap(
            overlapping, room, fitted, costs, limits, splits, options
        )
        costs = replace(costs, overlap=overlap)
    overlapping.close()
    return costs, report


def _finished(going: Generator[None, None, Moves]) -> Moves:
    while True:
        try:
            next(going)
        except StopIteration as end:
            result: Moves = end.value
            return result


def _measure_attention(
    stage: CarryStage, room: StepRoom, fitted: Fitted, costs: HostCosts, options: ProfileOptions
) -> tuple[HostCosts, dict[str, Any]]:
    """Measure attention over a grid, and steps that carry rows; the costs with it, and the report.

    Steps of the grid are fitted to as well.
    """
    own = beside_step(room)
    decodes, contexts = grid_of(stage, room, own)
    grid = [Carrying(own, n, context, False) for n in decodes for context in contexts]
    fitted_to = [*grid, *carryings(stage, room, max(8, options.steps // 3), options.seed)]
    held_out = carryings(stage, room, max(4, options.steps // 6), options.seed + 1)
    measured = _measure(stage, [*fitted_to, *held_out], len(fitted_to), options)
    stage.close()
    table = {(one.what.rows, one.what.context): one.attend_s for one in measured[: len(grid)]}
    points = [one.points(fitted, paced=True) for one in measured[: len(fitted_to)]]
    trips = [
        TripPoint(one.what.rows, one.round_trip_s - one.attend_s, one.round_trip_s)
        for one in measured[: len(fitted_to)]
        if not one.what.spread
    ]
    carry = fit_carry([point for some in points for point in some])
    costs = replace(costs, attention=Grid.of(table), carry=carry, wake=fit_wake(trips))
    return costs, _attention_report(costs, fitted, measured, len(fitted_to))


def _measure(
    stage: CarryStage, steps: Seq[Carrying], fitted: int, options: ProfileOptions
) -> list[_Measured]:
    """Visit all in passes, each in another order; those after ``fitted`` twice in each."""
    found = [_Measured(step, []) for step in steps]
    from tqdm import tqdm

    with tqdm(
        total=PASSES * (2 * len(steps) - fitted), desc="host", unit="step",
        disable=not sys.stderr.isatty(),
    ) as bar:  # fmt: skip
        for number in range(PASSES):
            order = [*range(len(steps)), *range(fitted, len(steps))]
            random.Random(f"host {options.seed} {number}").shuffle(order)
            for index in order:
                one = steps[index]
                visit = stage.carry(one.own, one.rows, one.context, TOKENS, spread=one.spread)
                found[index].visits.append(visit)
                bar.update()
    return found


def _attention_report(
    costs: HostCosts, fitted: Fitted, measured: Seq[_Measured], used: int
) -> dict[str, Any]:
    carry = costs.carry
    shown = [
        _shown(carry, fitted, one, "fitted" if index < used else "held out")
        for index, one in enumerate(measured)
    ]
    pairs = [(row["predicted"], row["seconds"]) for row in shown]
    held = measured[used:]
    first, second = slice(PASSES), slice(PASSES, None)
    again = [
        (took(carry, one.points(fitted, second)), took(carry, one.points(fitted, first)))
        for one in held
    ]
    together = [one for one in held if not one.what.spread]
    trips = [
        (costs.round_trip_s(one.what.rows, one.what.rows * one.what.context), one.round_trip_s)
        for one in together
    ]
    trips_again = [(one.trip_s(second), one.trip_s(first)) for one in together]
    return {
        "carry": carry._asdict(),
        "carried": {
            "steps": used,
            "held_out": agreement(pairs[used:])._asdict(),
            "fitted": agreement(pairs[:used])._asdict(),
            "repeatability": agreement(again)._asdict(),
        },
        "wake": costs.wake._asdict(),
        "round_trip": {
            "held_out": agreement(trips)._asdict(),
            "repeatability": agreement(trips_again)._asdict(),
        }
        if trips
        else None,
        "points": shown,
    }


def _shown(carry: CarryCost, fitted: Fitted, one: _Measured, use: str) -> dict[str, Any]:
    """Steps for the file: how the median one compares with its prediction, by their mean."""
    points = one.points(fitted)
    row_layers = statistics.mean(point.row_layers for point in points)
    without_s = statistics.mean(point.base_s for point in points)
    predicted_s = without_s + carry.seconds(row_layers)
    return {
        "use": use,
        "tokens": work_of(one.what.own).tokens,
        "rows": one.what.rows,
        "context": one.what.context,
        "spread": one.what.spread,
        "row_layers": row_layers,
        "without_s": without_s,
        "seconds": predicted_s * took(carry, points),
        "predicted": predicted_s,
        "round_trip_s": one.round_trip_s,
        "attend_s": one.attend_s,
    }


def described(costs: HostCosts, token_bytes: int) -> dict[str, Any]:
    """Moves as bytes a second and seconds of each."""

    def words(move: MoveCost) -> dict[str, float | None]:
        rate = token_bytes / move.token_s if move.token_s else None
        return {"bytes_per_s": rate, "move_s": move.step_s}

    return {"out": words(costs.out), "back": words(costs.back), "stall": costs.stall}
