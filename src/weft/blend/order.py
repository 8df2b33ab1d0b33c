"""The public interface of the package: selects the prompt to submit next."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from weft.blend.density import Rates
from weft.blend.dual_scan import LEFT, RIGHT, DualScan, Live
from weft.blend.estimate import (
    NEVER,
    choose_samples,
    estimate_outputs,
    lacking,
    more_samples,
    told,
)
from weft.blend.forecast import Forecast
from weft.blend.sort import sort_tree
from weft.blend.tree import PrefixTree, build_tree
from weft.core.errors import ParameterError

ORDERS = ("blend", "dfs", "fcfs", "random")
FIRST_SORT = 32  # steps after which samples have told something; then after twice as many, ...
HALFWAY = 2  # a request that outlives what is known of it is taken to be half way


@dataclass(frozen=True, slots=True)
class Jobs:
    """Requests to be ordered.

    Attributes:
        prompts: token ids, at least one each.
        longest: bound of each output in tokens (its ``max_tokens``), or None where there is none.
        done: output tokens by number of those that an earlier run finished: they are not handed
            out, but tell about the others.
        choices: outputs that each has beside each other; all lengths are those of one of them.
    """

    prompts: Seq[Seq[int]]
    longest: Seq[int | None] | None = None
    done: Mapping[int, int] = field(default_factory=dict)
    choices: Seq[int] | None = None

    def __post_init__(self) -> None:
        count = len(self.prompts)
        if self.longest is not None and len(self.longest) != count:
            raise ParameterError(
                f"There are {count} prompts, but {len(self.longest)} bounds of outputs.",
                param="longest",
            )
        if self.choices is not None and len(self.choices) != count:
            raise ParameterError(
                f"There are {count} prompts, but {len(self.choices)} numbers of choices.",
                param="choices",
            )
        for number in self.done:
            if not 0 <= number < count:
                raise ParameterError(f"There is no prompt {number}.", param="done")


@dataclass(frozen=True, slots=True)
class Room:
    """The capacity of the engine behind the order.

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

    def started(self, number: int) -> None:
        """The engine has got a request only now: until then its output did not grow.

        May be left out where requests are submitted as soon as they are handed out.
        """

    def progress(self, number: int, output: int) -> None:
        """A running request has so many output tokens: tells how many steps have passed.

        May be left out, and one request that runs, say the oldest, speaks for all. With it requests
        start evenly over time, and those that outgrow their estimate are seen at once.
        """

    def ended(self, number: int, output: int | None) -> None:
        """A request has ended with so many output tokens; None if it
        failed, so that its length is no sample."""


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

    def started(self, number: int) -> None:
        """Nothing depends on it."""

    def progress(self, number: int, output: int) -> None:
        """Nothing depends on it."""

    def ended(self, number: int, output: int | None) -> None:  # noqa: ARG002
        self._running.discard(number)


class BlendOrder:
    """BlendServe's order; see the docstring of the package.

    Samples go first. As they tell more of the lengths, the rest is sorted again: whenever they have
    run twice as long as at the last sort, when they have told enough of a kind that waited for
    that, and when all have ended. A sample that still runs counts
    as being half way, and what is like samples of which hardly any has ended waits, unless there is
    room for it at its longest. Of a kind with few samples some more run, which tell sooner.
    """

    def __init__(self, jobs: Jobs, room: Room, rates: Rates, seed: int = 0) -> None:
        self.tree: PrefixTree = build_tree(jobs.prompts, room.block_size)
        count = len(jobs.prompts)
        self._rates, self._room = rates, room
        self._numbers = self.tree.leaves.tolist()
        self._leaf = [0] * count
        for leaf, number in enumerate(self._numbers):
            self._leaf[number] = leaf
        bounds = jobs.longest or [None] * count
        longest = np.asarray([NEVER if bound is None else bound for bound in bounds], np.int64)
        self._longest = longest[self.tree.leaves]
        choices = np.asarray(jobs.choices or [1] * count, np.int64)
        self._choices = choices[self.tree.leaves]
        self.forecast = Forecast(self.tree, room.kv_tokens, room.block_size, self._choices)
        self._waiting = np.ones(count, bool)  # leaves that were not handed out
        self._waiting[[self._leaf[number] for number in jobs.done]] = False
        self._left = count - len(jobs.done)
        sampled = set(choose_samples(count, seed=seed).tolist())
        # Of what was open when an earlier run was cut short the short ones are done: only a sample
        # that does not depend on that, all of whose requests end, tells about the others.
        self._known: dict[int, float] = {
            number: float(n) for number, n in jobs.done.items() if number in sampled
        }
        self._samples = self._choose(sampled, jobs)
        self._untold = set(self._samples)  # samples that have not ended
        self._lacks: dict[int, int] = {}  # ends of samples until enough is told, by node
        self._more = len(self._samples)  # samples that may be added: as many again
        self._sort_at = FIRST_SORT
        self.scan: DualScan | None = None
        if not self._samples:
            self._sort()

    def _choose(self, chosen: set[int], jobs: Jobs) -> list[int]:
        """Prompt numbers to run first, in an order that shares prefixes, the first one last."""
        order = reversed(self.tree.depth_first().tolist())
        return [number for number in order if number in chosen and number not in jobs.done]

    @property
    def remaining(self) -> int:
        return self._left

    def next(self) -> int | None:
        if not self._left or len(self.forecast) >= self._room.requests:
            return None
        self._adapt()
        leaf = self._next_sample() if self._samples else None
        if leaf is None and (self.scan is not None or not self._samples):
            leaf = self._next_of_rest()
        if leaf is None:
            return None
        self._waiting[leaf] = False
        self._left -= 1
        return int(self._numbers[leaf])

    def _next_sample(self) -> int | None:
        """The next sample, while half of the memory is free, as its length is unknown."""
        if len(self.forecast) and self.forecast.held() > self._room.kv_tokens / 2:
            return None
        leaf = self._leaf[self._samples.pop()]
        self.forecast.admit(leaf, 1)
        if self.scan is not None:
            self.scan.adopt(leaf, self._place(leaf, 1))
        return leaf

    def _next_of_rest(self) -> int | None:
        due = not self._untold or self.forecast.now >= self._sort_at
        if self.scan is None or (due and self._sort_at < NEVER):
            if not due and len(self.forecast):
                return None
            self._sort()
        return self.scan.take() if self.scan is not None else None

    def started(self, number: int) -> None:
        leaf = self._leaf[number]
        if leaf in self.forecast:
            self.forecast.restart(leaf)

    def progress(self, number: int, output: int) -> None:
        leaf = self._leaf[number]
        if leaf in self.forecast:
            self.forecast.timed = True
            self.forecast.tick(leaf, output)

    def ended(self, number: int, output: int | None) -> None:
        leaf = self._leaf[number]
        if leaf not in self.forecast:
            raise ParameterError(f"Request {number} does not run.", param="number")
        if output is None:
            output = max(0, self.forecast.age(leaf))
        else:
            self.forecast.tick(leaf, output)
            if number in self._untold:
                self._known[number] = float(output)
                self._tell(leaf)
        self._untold.discard(number)
        self.forecast.release(leaf)
        if self.scan is not None:
            self.scan.ended(leaf, output)

    def _sort(self) -> None:
        """Order what waits by what is known by now."""
        forecast = self.forecast
        self._sort_at = max(self._sort_at, HALFWAY * forecast.now) if self._untold else NEVER
        started = sorted(self._untold - set(self._samples))
        running = {n: HALFWAY * forecast.age(self._leaf[n]) for n in started}
        self._add_samples(running)
        all_running = {**running, **dict.fromkeys(self._samples, 0)}
        self._lacks = lacking(self.tree, self._known, all_running, self._waiting)
        outputs = estimate_outputs(self.tree, {**self._known, **running}, self._longest)
        unknown = ~told(self.tree, self._known, running)
        bounded = unknown & (self._longest < NEVER)
        outputs[bounded] = self._longest[bounded]  # the only thing that is known of them
        reserves = np.ceil(outputs).astype(np.int64)
        reserves[unknown] = self._longest[unknown]
        present = self._waiting.copy()
        present[[self._leaf[number] for number in self._samples]] = False
        if not present.any():
            self.scan = None  # only samples are left
            return
        choices = self._choices
        order = sort_tree(self.tree, outputs, self._rates, present=present, choices=choices)
        self.scan = DualScan(self.tree, order, outputs, reserves, self._rates, forecast, choices)
        for leaf in forecast.live():
            expected = max(math.ceil(outputs[leaf]), forecast.age(leaf) + 1)
            forecast.extend(leaf, expected)
            self.scan.adopt(leaf, self._place(leaf, expected))

    def _tell(self, leaf: int) -> None:
        """A sample has ended: sort again if a kind around it lacked no more than that."""
        node = int(self.tree.leaf_parent[leaf])
        while node >= 0:
            if node in self._lacks:
                self._lacks[node] -= 1
                if self._lacks[node] == 0:
                    self._sort_at = min(self._sort_at, self.forecast.now)
            node = int(self.tree.parent[node])

    def _add_samples(self, running: Mapping[int, float]) -> None:
        """Add samples to subtrees that have too few."""
        if self._samples:
            return
        leaves = more_samples(self.tree, self._known, running, self._waiting, self._more)
        added = [self._numbers[leaf] for leaf in leaves.tolist()]
        self._more -= len(added)
        self._samples = added[::-1]
        self._untold.update(added)

    def _place(self, leaf: int, output: int) -> Live:
        """A running leaf as the scan counts it."""
        assert self.scan is not None
        length = int(self.tree.lengths[leaf])
        choices = int(self._choices[leaf])
        compute_s = self._rates.compute_s(length, choices * output)
        density = compute_s / (choices * self._rates.memory_s(length, output))
        side = LEFT if density > self.scan.density else RIGHT
        own = length - int(self.tree.depth[self.tree.leaf_parent[leaf]])
        live = Live(side, own, output, choices=choices)
        return live._replace(charged=live.work)

    def _adapt(self) -> None:
        """Expect more of requests that should have ended."""
        forecast = self.forecast
        for leaf in forecast.overdue():
            expected = forecast.expected(leaf)
            longer = min(HALFWAY * forecast.age(leaf), int(self._longest[leaf]))
            longer = max(expected + 1, longer)
            forecast.extend(leaf, longer)
            if self.scan is not None:
                self.scan.outgrown(leaf, longer)
