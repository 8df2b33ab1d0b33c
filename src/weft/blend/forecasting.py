"""Orders that start no more than the KV memory will hold, by lengths that they learn meanwhile."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from weft.blend.density import Ints
from weft.blend.forecast import Forecast
from weft.blend.jobs import Jobs, Room
from weft.blend.lengths import LengthCurves, LengthTable, Running, Snapshot, as_bounds
from weft.blend.tree import PrefixTree, build_tree
from weft.core.errors import ParameterError

FIRST_LOOK = 32  # steps or, divided by 4, ends, after which lengths are looked at anew
MARGIN = 1.0  # of the spread of all together, which is the root of the sum of squares
LOOK_AGAIN = 1.25  # times as many steps


class KnowsLengths(Protocol):
    """What ``work`` finds."""

    @property
    def curves(self) -> LengthCurves: ...


Plan = TypeVar("Plan", bound=KnowsLengths)


class ForecastOrder(ABC, Generic[Plan]):
    """Hands out leaves of a prefix tree while the forecast has room for them.

    What it knows of lengths is looked at now and then: `due`, then `work` for any thread, then
    `use` of what that returns. ``next`` does all three, unless it is ``deferred``.

    Attributes:
        deferred: somebody else sees to that.
        forecast: of the KV memory; its capacity may be changed.
    """

    deferred = False

    def __init__(self, jobs: Jobs, room: Room, table: LengthTable, scope: bytes = b"") -> None:
        self.tree: PrefixTree = build_tree(jobs.prompts, room.block_size)
        count, leaves = len(jobs.prompts), self.tree.leaves
        self._room, self._table = room, table
        self._numbers = leaves.tolist()
        self._leaf = np.empty(count, np.int64)
        self._leaf[leaves] = np.arange(count)
        self._nodes = table.places(jobs.prompts, scope)[leaves]
        self._longest = as_bounds(jobs.longest, count)[leaves]
        self._choices: Ints = np.asarray(jobs.choices or [1] * count, np.int64)[leaves]
        self.forecast = Forecast(self.tree, room.kv_tokens, room.block_size, self._choices)
        self._waiting = np.ones(count, bool)  # leaves that were not handed out
        self._waiting[self._leaf[list(jobs.done)]] = False
        self._left = count - len(jobs.done)
        self._ends = 0
        self._look_at = (FIRST_LOOK, FIRST_LOOK // 4)  # steps, and ends
        self._curves: LengthCurves | None = None
        self._queued: set[int] = set()  # leaves that the engine has, but does not compute yet
        self._spread: dict[int, float] = {}  # of what runs, what is reserved beyond the expected
        table.watch(self)

    # -- the order ----------------------------------------------------------------------------

    @property
    def remaining(self) -> int:
        return self._left

    def next(self) -> int | None:
        if not self._left or len(self.forecast) >= self._room.requests:
            return None
        if not self.deferred and self.due():
            self.use(self.work()())
        self._adapt()
        self.forecast.margin = MARGIN * math.sqrt(sum(n * n for n in self._spread.values()))
        leaf = self._pick()
        if leaf is None:
            return None
        self._waiting[leaf] = False
        self._left -= 1
        return int(self._numbers[leaf])

    def started(self, number: int, computing: bool = False) -> None:
        leaf = int(self._leaf[number])
        if leaf in self.forecast:
            self.forecast.restart(leaf)
            if computing:
                self._queued.discard(leaf)
            else:
                self._queued.add(leaf)

    def progress(self, number: int, output: int) -> None:
        leaf = int(self._leaf[number])
        if leaf in self.forecast:
            self.forecast.timed = True
            self.forecast.tick(leaf, output)

    def ended(self, number: int, output: int | None) -> None:
        leaf, forecast = int(self._leaf[number]), self.forecast
        if leaf not in forecast:
            raise ParameterError(f"Request {number} does not run.", param="number")
        node, bound = int(self._nodes[leaf]), int(self._longest[leaf])
        if output is None:
            output = max(0, int(self._ages([leaf])[0]))
            self._table.censor(node, output, bound)
        else:
            forecast.tick(leaf, output)
            self._table.add(node, output, bound)
        forecast.release(leaf)
        self._spread.pop(leaf, None)
        self._queued.discard(leaf)
        self._ends += 1
        self._on_end(leaf, output)

    def close(self) -> None:
        """Nothing of it runs any more, and nothing will: it holds no memory."""
        for leaf in self.forecast.live():
            self.ended(self._numbers[leaf], None)
        self._table.unwatch(self)

    def running(self) -> Running:
        """What runs, for the table of lengths."""
        live = self.forecast.live()
        return Running(self._nodes[live], self._ages(live), self._longest[live])

    def _ages(self, live: list[int]) -> Ints:
        ages = [0 if leaf in self._queued else self.forecast.age(leaf) for leaf in live]
        return np.asarray(ages, np.int64)

    @abstractmethod
    def _pick(self) -> int | None:
        """The leaf to start now, admitted to the forecast."""

    def _on_end(self, leaf: int, output: int) -> None:
        """A leaf has ended."""

    # -- what is known of lengths -------------------------------------------------------------

    def due(self) -> bool:
        """Whether it is time to look at lengths again."""
        steps, ends = self._look_at
        return self._curves is None or self.forecast.now >= steps or self._ends >= ends

    def work(self) -> Callable[[], Plan]:
        """Take note of what is known now; returns the work, which may be done on any thread."""
        now = max(FIRST_LOOK, self.forecast.now)
        few = max(FIRST_LOOK // 4, len(self._numbers) // 50)
        self._look_at = math.ceil(LOOK_AGAIN * now), self._ends + few
        return self._work(self._table.snapshot())

    @abstractmethod
    def _work(self, known: Snapshot) -> Callable[[], Plan]: ...

    def use(self, plan: Plan) -> None:
        """Go on with what ``work`` has found."""
        self._curves = plan.curves
        live = self.forecast.live()
        for leaf, expected in self._expected(live):
            self.forecast.extend(leaf, expected)
        if live:
            ages, longest = self._ages(live), self._longest[live]
            reserved = self._curves.quantile(self._nodes[live], ages, longest)
            for leaf, most in zip(live, reserved.tolist(), strict=True):
                self._spread[leaf] = max(0.0, most - self.forecast.expected(leaf))
        self._use(plan)

    @abstractmethod
    def _use(self, plan: Plan) -> None: ...

    def _expected(self, live: list[int]) -> list[tuple[int, int]]:
        """Leaves that run, and the output that each will have; more than it has."""
        if not live or self._curves is None:
            return []
        nodes, ages, bounds = self._nodes[live], self._ages(live), self._longest[live]
        expected = np.ceil(self._curves.expected(nodes, ages, bounds)).astype(np.int64)
        return list(zip(live, np.maximum(expected, ages + 1).tolist(), strict=True))

    def _adapt(self) -> None:
        """Expect more of requests that should have ended."""
        for leaf, expected in self._expected(self.forecast.overdue()):
            longer = max(expected, self.forecast.expected(leaf) + 1)
            self.forecast.extend(leaf, longer)
            self._on_longer(leaf, longer)

    def _on_longer(self, leaf: int, output: int) -> None:
        """A leaf that runs is expected to become longer."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """What lengths leaves have.

    Attributes:
        expected, reserved: (n,) output tokens of each leaf that has not started.
    """

    curves: LengthCurves
    expected: Ints
    reserved: Ints


class DepthFirstOrder(ForecastOrder[Lengths]):
    """Prompts that begin alike one after the other, which shares most.

    The next one starts if the memory has room for it even if it is longer than most.
    """

    def __init__(self, jobs: Jobs, room: Room, table: LengthTable, scope: bytes = b"") -> None:
        super().__init__(jobs, room, table, scope)
        order = self._leaf[self.tree.depth_first()]
        self._learn_from_before(jobs, order)
        self._order = order[self._waiting[order]].tolist()
        self._at = 0
        self.use(self._work(table.snapshot(running=False))())

    def _learn_from_before(self, jobs: Jobs, order: Ints) -> None:
        """Learn of what an earlier run has done, in the same order.

        Of what was open when it was cut short only the short ones are done. The others started
        before some that are done, so they had got as many tokens at least. If there are more of
        them than can have been open, the order was another one.
        """
        outputs = np.zeros(len(order), np.int64)
        outputs[self._leaf[list(jobs.done)]] = list(jobs.done.values())
        mine = outputs[order]
        later = np.maximum.accumulate(mine[::-1])[::-1]
        was_same = int((self._waiting[order] & (later > 0)).sum()) <= self._room.requests
        for leaf, output, least in zip(order.tolist(), mine.tolist(), later.tolist(), strict=True):
            node, bound = int(self._nodes[leaf]), int(self._longest[leaf])
            if output:
                self._table.add(node, output, bound)
            elif least and was_same and self._waiting[leaf]:
                self._table.censor(node, min(least, bound - 1), bound)

    def _pick(self) -> int | None:
        leaf: int = self._order[self._at]
        assert self._lengths is not None
        fits = self.forecast.fits(leaf, int(self._lengths.reserved[leaf]))
        if not fits and (len(self.forecast) or not self.forecast.alone):
            return None
        self._at += 1
        expected, reserved = self._lengths.expected[leaf], self._lengths.reserved[leaf]
        self.forecast.admit(leaf, int(expected))
        self._spread[leaf] = float(reserved - expected)
        return leaf

    def _work(self, known: Snapshot) -> Callable[[], Lengths]:
        def work() -> Lengths:
            curves = LengthCurves(known)
            expected = np.ceil(curves.expected(self._nodes, 0, self._longest)).astype(np.int64)
            reserved = curves.quantile(self._nodes, 0, self._longest).astype(np.int64)
            return Lengths(curves, expected, np.maximum(expected, reserved))

        return work

    def _use(self, plan: Lengths) -> None:
        self._lengths = plan
