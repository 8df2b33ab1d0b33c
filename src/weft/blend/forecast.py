"""Forecasts the KV memory that submitted requests will hold, step by step, until they end.

The peak of what they will hold decides whether another one fits: requests that started at different
times do not need their longest at once, so far more run than if each had its whole length set aside
(Gong et al. 2025, "Past-Future Scheduler"; NanoFlow predicts its peak likewise). Nothing but
completions is needed: every running request gains one token a step, so an end says how late it is.
"""

from __future__ import annotations

import numpy as np

from weft.blend.density import Ints
from weft.blend.tree import PrefixTree
from weft.core.errors import InvariantError


class Forecast:
    """Live requests against a capacity.

    Args:
        tree: the prompts; what live leaves share is held once.
        capacity: tokens that the KV memory holds.
        block_size: tokens are held in blocks; on average half of one stays empty.
        choices: (n,) outputs of each leaf that run beside each other; 1 by default.
    """

    def __init__(
        self, tree: PrefixTree, capacity: int, block_size: int = 1, choices: Ints | None = None
    ) -> None:
        self.capacity = capacity
        self.now = 0
        self.timed = False  # whether steps are heard of, not only ends
        self.alone = True  # whether nothing runs beside what is live here
        self.margin = 0.0  # tokens that are to stay free, since lengths are expectations
        self._slack = block_size // 2
        self._depth = tree.depth.tolist()
        self._parent = tree.parent.tolist()
        self._above = tree.leaf_parent.tolist()
        self._lengths = tree.lengths.tolist()
        self._choices = [1] * len(self._lengths) if choices is None else choices.tolist()
        self._references = [0] * len(self._depth)
        self._prefixes = 0  # tokens of shared segments in use
        self._start: dict[int, int] = {}
        self._end: dict[int, int] = {}
        # Live leaves by end: (end, own tokens - choices * start, choices, leaf).
        self._ends = np.zeros(64, np.int64)
        self._base = np.zeros(64, np.int64)
        self._grow = np.zeros(64, np.int64)
        self._leaf = np.zeros(64, np.int64)
        self._usage: tuple[Ints, Ints, Ints] | None = None

    def __len__(self) -> int:
        return len(self._start)

    def __contains__(self, leaf: int) -> bool:
        return leaf in self._start

    def live(self) -> list[int]:
        """Leaves that run, in the order in which they started."""
        return list(self._start)

    def held(self) -> int:
        """Tokens that are held about now."""
        live = len(self)
        grow = int(self._grow[:live].sum())
        return int(self._base[:live].sum()) + grow * self.now + self._prefixes

    def peak(self) -> int:
        """Most tokens that what is live will hold at one time."""
        ends, later, _ = self._future()
        return (int(later.max()) if len(ends) else 0) + self._prefixes

    def expected(self, leaf: int) -> int:
        """Output tokens that each choice of a live leaf is taken to reach."""
        return self._end[leaf] - self._start[leaf]

    def age(self, leaf: int) -> int:
        """Output tokens that each choice of a live leaf has about now."""
        return self.now - self._start[leaf]

    def fits(self, leaf: int, output: int) -> bool:
        """Whether the memory never overflows if this leaf starts now."""
        ends, later, grow = self._future()
        choices = self._choices[leaf]
        own = self._own(leaf) + choices * self._slack
        end = self.now + output
        cut = int(np.searchsorted(ends, end, side="right"))
        peak = own + choices * output
        if cut < len(ends):
            # Those that outlive the leaf, when it ends: later[cut] is what they hold at ends[cut].
            peak += int(later[cut]) - int(grow[cut]) * int(ends[cut] - end)
        if cut:
            at_ends = int((later[:cut] + choices * ends[:cut]).max())
            peak = max(peak, at_ends + own - choices * self.now)
        needed = peak + self._prefixes + self._new_prefix(leaf)
        return needed + self.margin <= self.capacity

    def admit(self, leaf: int, output: int) -> None:
        """Count a leaf that starts now."""
        if leaf in self._start:
            raise InvariantError(f"leaf {leaf} is live already")
        self._prefixes += self._new_prefix(leaf)
        node = self._above[leaf]
        while node >= 0:
            self._references[node] += 1
            if self._references[node] > 1:
                break
            node = self._parent[node]
        self._start[leaf] = self.now
        self._insert(leaf, self.now + output)

    def restart(self, leaf: int) -> None:
        """A live leaf begins only now: it was counted, but the engine had not got it."""
        expected = self.expected(leaf)
        self._take_out(leaf)
        self._start[leaf] = self.now
        self._insert(leaf, self.now + expected)

    def tick(self, leaf: int, output: int) -> None:
        """A live leaf has so many output tokens: it is at least so late."""
        self.now = max(self.now, self._start[leaf] + output)

    def extend(self, leaf: int, output: int) -> None:
        """A live leaf will have so many output tokens after all."""
        self._take_out(leaf)
        self._insert(leaf, self._start[leaf] + output)

    def overdue(self) -> list[int]:
        """Live leaves that should have ended by now."""
        count = int(np.searchsorted(self._ends[: len(self)], self.now, side="right"))
        return [int(leaf) for leaf in self._leaf[:count]]

    def release(self, leaf: int) -> None:
        """A live leaf has ended."""
        self._take_out(leaf)
        del self._start[leaf]
        node = self._above[leaf]
        while node >= 0:
            self._references[node] -= 1
            if self._references[node] > 0:
                break
            above = self._parent[node]
            self._prefixes -= self._depth[node] - (self._depth[above] if above >= 0 else 0)
            node = above

    def _own(self, leaf: int) -> int:
        """Prompt tokens that no other leaf can share."""
        return int(self._lengths[leaf] - self._depth[self._above[leaf]])

    def _new_prefix(self, leaf: int) -> int:
        """Tokens of shared segments that no live leaf uses yet."""
        node = self._above[leaf]
        deepest = self._depth[node]
        while node >= 0 and not self._references[node]:
            node = self._parent[node]
        return int(deepest - (self._depth[node] if node >= 0 else 0))

    def _future(self) -> tuple[Ints, Ints, Ints]:
        """Ends in rising order, what is held (without prefixes) just before each, and its growth
        in a step."""
        if self._usage is None:
            live = len(self)
            ends = self._ends[:live]
            base = self._base[:live][::-1].cumsum()[::-1]
            grow = self._grow[:live][::-1].cumsum()[::-1]
            self._usage = ends, base + grow * ends, grow
        return self._usage

    def _insert(self, leaf: int, end: int) -> None:
        live = len(self._end)
        if live == len(self._ends):
            self._ends, self._base, self._grow, self._leaf = (
                np.append(array, np.zeros(live, np.int64))
                for array in (self._ends, self._base, self._grow, self._leaf)
            )
        at = int(np.searchsorted(self._ends[:live], end, side="right"))
        grow = self._choices[leaf]
        base = self._own(leaf) + grow * (self._slack - self._start[leaf])
        rows = (self._ends, end), (self._base, base), (self._grow, grow), (self._leaf, leaf)
        for array, value in rows:
            array[at + 1 : live + 1] = array[at:live]
            array[at] = value
        self._end[leaf] = end
        self._usage = None

    def _take_out(self, leaf: int) -> None:
        live, end = len(self._end), self._end[leaf]
        low = int(np.searchsorted(self._ends[:live], end, side="left"))
        high = int(np.searchsorted(self._ends[:live], end, side="right"))
        at = low + int(np.flatnonzero(self._leaf[low:high] == leaf)[0])
        for array in (self._ends, self._base, self._grow, self._leaf):
            array[at : live - 1] = array[at + 1 : live]
        del self._end[leaf]
        self._usage = None

    def check(self) -> None:
        """Raise InvariantError if what is counted is not what the live leaves hold."""
        live = set(self._start)
        if live != set(self._end) or live != set(self._leaf[: len(live)].tolist()):
            raise InvariantError("live leaves differ between the lists")
        nodes = set()
        for leaf in live:
            node = self._above[leaf]
            while node >= 0:
                nodes.add(node)
                node = self._parent[node]
        held = sum(
            self._depth[node] - self._depth[max(self._parent[node], 0)] for node in sorted(nodes)
        )
        if held != self._prefixes:
            raise InvariantError(f"{self._prefixes} prefix tokens are counted, {held} are held")
