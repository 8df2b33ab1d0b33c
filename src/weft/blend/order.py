"""The front of the package: which of the prompts that remain should be submitted next."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from weft.blend.density import Rates
from weft.blend.dual_scan import LEFT, RIGHT, DualScan
from weft.blend.estimate import choose_samples, estimate_outputs
from weft.blend.forecast import Forecast
from weft.blend.sort import sort_tree
from weft.blend.tree import PrefixTree, build_tree
from weft.core.errors import ParameterError

ORDERS = ("blend", "dfs", "fcfs", "random")
TOLD = 0.9  # share of the samples that must have ended before the rest is ordered
OUTGROWN = 2  # a request that outlives its estimate is taken to be half way at each age


@dataclass(frozen=True, slots=True)
class Jobs:
    """Requests to be ordered.

    Attributes:
        prompts: token ids, at least one each.
        longest: bound of each output in tokens (its ``max_tokens``), or None where there is none.
        done: output tokens by number of those that an earlier run finished: they are not handed
            out, but tell about the others.
    """

    prompts: Seq[Seq[int]]
    longest: Seq[int | None] | None = None
    done: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = len(self.prompts)
        if self.longest is not None and len(self.longest) != count:
            raise ParameterError(
                f"There are {count} prompts, but {len(self.longest)} bounds of outputs.",
                param="longest",
            )
        for number in self.done:
            if not 0 <= number < count:
                raise ParameterError(f"There is no prompt {number}.", param="done")


@dataclass(frozen=True, slots=True)
class Room:
    """What the engine behind has place for.

    Attributes:
        kv_tokens: tokens that its KV memory holds.
        requests: requests that may be submitted and not ended.
        block_size: tokens of a KV block; prefixes are shared in whole ones.
    """

    kv_tokens: int
    requests: int
    block_size: int = 16

    def __post_init__(self) -> None:
        for name in ("kv_tokens", "requests", "block_size"):
            if getattr(self, name) < 1:
                raise ParameterError(f"{name} must be at least 1.", param=name)


class Order(Protocol):
    """Hands out every request exactly once. Deterministic for equal calls."""

    @property
    def remaining(self) -> int:
        """Requests that were not handed out yet."""

    def next(self) -> int | None:
        """The number of the prompt to submit now; None while it is better to wait for an end.

        While nothing runs and something remains, it is never None.
        """

    def progress(self, number: int, output: int) -> None:
        """A running request has so many output tokens. May be left out; it makes ends known
        earlier."""

    def ended(self, number: int, output: int | None) -> None:
        """A request has ended with so many output tokens; None if its length tells nothing, since
        it failed."""


def make_order(kind: str, jobs: Jobs, room: Room, rates: Rates, seed: int = 0) -> Order:
    """An order of the requests that are not done.

    Args:
        kind: ``blend``; ``dfs``, which shares most; ``fcfs``, as they came; ``random``. The last
            three leave the room for KV to the engine.
        seed: of the sample of ``blend`` and of ``random``.

    Raises:
        ParameterError: an unknown kind, no prompts, or a prompt without tokens.
    """
    if kind not in ORDERS:
        raise ParameterError(f"Unknown order '{kind}'; known: {', '.join(ORDERS)}.", param="order")
    if kind == "blend":
        return BlendOrder(jobs, room, rates, seed)
    if kind == "dfs":
        numbers = build_tree(jobs.prompts, room.block_size).depth_first().tolist()
    else:
        numbers = list(range(len(jobs.prompts)))
    if kind == "random":
        numbers = np.random.default_rng(seed).permutation(len(numbers)).tolist()
    return ListedOrder([number for number in numbers if number not in jobs.done], room)


class ListedOrder:
    """Requests in a given order, as many at once as may be submitted."""

    def __init__(self, numbers: Seq[int], room: Room) -> None:
        self._numbers = list(numbers)
        self._handed = 0
        self._running: set[int] = set()
        self._most = room.requests

    @property
    def remaining(self) -> int:
        return len(self._numbers) - self._handed

    def next(self) -> int | None:
        if not self.remaining or len(self._running) >= self._most:
            return None
        number = self._numbers[self._handed]
        self._handed += 1
        self._running.add(number)
        return number

    def progress(self, number: int, output: int) -> None:
        """Nothing depends on it."""

    def ended(self, number: int, output: int | None) -> None:  # noqa: ARG002
        self._running.discard(number)


class BlendOrder:
    """BlendServe's order: see the package's docstring.

    Samples go first; while they run, half of the memory is filled depth first, since nothing is
    known of lengths. When nearly all samples have ended the rest is sorted, and once more when all
    have; a sample that still runs counts as being half way.
    """

    def __init__(self, jobs: Jobs, room: Room, rates: Rates, seed: int = 0) -> None:
        self.tree: PrefixTree = build_tree(jobs.prompts, room.block_size)
        count = len(jobs.prompts)
        self._rates, self._room = rates, room
        self._numbers = self.tree.leaves.tolist()
        self._leaf = [0] * count
        for leaf, number in enumerate(self._numbers):
            self._leaf[number] = leaf
        self._longest = None
        if jobs.longest is not None:
            bounds = [2**62 if bound is None else bound for bound in jobs.longest]
            self._longest = np.asarray(bounds, np.int64)[self.tree.leaves]
        self.forecast = Forecast(self.tree, room.kv_tokens, room.block_size)
        self._known: dict[int, float] = {number: float(n) for number, n in jobs.done.items()}
        self._waiting = np.ones(count, bool)  # leaves that were not handed out
        self._waiting[[self._leaf[number] for number in jobs.done]] = False
        self._left = count - len(jobs.done)
        self._told = 0
        self._depth_first = self.tree.depth_first()
        self._filled = 0  # leaves of the depth-first order that need no look any more
        self._samples = self._choose(jobs, seed)
        self._sampled = set(self._samples)
        self._outputs = estimate_outputs(self.tree, self._known, self._longest)
        self.scan: DualScan | None = None
        if not self._samples:
            self._sort()

    def _choose(self, jobs: Jobs, seed: int) -> list[int]:
        """Prompt numbers to run first, in an order that shares prefixes, the first one last."""
        chosen = set(choose_samples(len(jobs.prompts), seed=seed).tolist())
        if len(jobs.done) >= len(chosen):
            return []
        order = reversed(self._depth_first.tolist())
        return [number for number in order if number in chosen and number not in jobs.done]

    @property
    def remaining(self) -> int:
        return self._left

    def next(self) -> int | None:
        if not self._left or len(self.forecast) >= self._room.requests:
            return None
        self._adapt()
        if self._samples:
            leaf = self._take_listed(self._leaf[self._samples[-1]])
            if leaf is not None:
                self._samples.pop()
        elif self.scan is not None:
            leaf = self.scan.take()
        else:
            leaf = self._fill()
        if leaf is None:
            return None
        self._waiting[leaf] = False
        self._left -= 1
        return int(self._numbers[leaf])

    def progress(self, number: int, output: int) -> None:
        leaf = self._leaf[number]
        if leaf in self.forecast:
            self.forecast.tick(leaf, output)

    def ended(self, number: int, output: int | None) -> None:
        leaf = self._leaf[number]
        if leaf not in self.forecast:
            raise ParameterError(f"Request {number} does not run.", param="number")
        if output is not None:
            self.forecast.tick(leaf, output)
            self._known[number] = float(output)
        self.forecast.release(leaf)
        if self.scan is not None:
            self.scan.ended(leaf)
        if number in self._sampled:
            self._sampled.discard(number)
            self._told += 1
            if not self._samples:
                self._learn()

    def _learn(self) -> None:
        """Order the rest when the samples tell enough of it."""
        everyone = self._told + len(self._sampled)
        enough = self._told >= TOLD * everyone
        if (enough and self.scan is None) or not self._sampled:
            self._sort()

    def _sort(self) -> None:
        if not self._left:
            return
        known = dict(self._known)
        for number in self._sampled:
            known[number] = float(max(1, OUTGROWN * self.forecast.age(self._leaf[number])))
        self._outputs = estimate_outputs(self.tree, known, self._longest)
        order = sort_tree(self.tree, self._outputs, self._rates, present=self._waiting)
        before = {} if self.scan is None else self.scan.live()
        self.scan = DualScan(self.tree, order, self._outputs, self._rates, self.forecast)
        middle = self.scan.density
        for leaf in self.forecast.live():
            if leaf in before:
                self.scan.adopt(leaf, *before[leaf])
                continue
            length, output = int(self.tree.lengths[leaf]), float(self._outputs[leaf])
            own = self._rates.compute_s(length, output) / self._rates.memory_s(length, output)
            self.scan.adopt(leaf, LEFT if own > middle else RIGHT, length + output / 2)

    def _take_listed(self, leaf: int) -> int | None:
        """Start this leaf if it fits or nothing else runs."""
        output = int(self._outputs[leaf])
        if len(self.forecast) and not self.forecast.fits(leaf, output):
            return None
        self.forecast.admit(leaf, output)
        return leaf

    def _fill(self) -> int | None:
        """The next leaf depth first, while half of the memory is free."""
        if len(self.forecast) and self.forecast.held() > self._room.kv_tokens / 2:
            return None
        while not self._waiting[leaf := self._leaf[self._depth_first[self._filled]]]:
            self._filled += 1
        return self._take_listed(leaf)

    def _adapt(self) -> None:
        """Expect more of requests that should have ended."""
        forecast = self.forecast
        for leaf in forecast.overdue():
            expected = forecast.expected(leaf)
            longer = max(expected + 1, OUTGROWN * forecast.age(leaf))
            if self._longest is not None:
                longer = max(expected + 1, min(longer, int(self._longest[leaf])))
            forecast.extend(leaf, longer)
            if self.scan is not None:
                self.scan.outgrown(leaf, (longer - expected) / 2)
