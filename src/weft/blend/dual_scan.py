"""Scans the sorted leaves from both ends at once, so that every batch is blended.

Each side gets the part of the KV memory with which the density of what runs is that of all that
remains (BlendServe section 5.3). It is derived again whenever a side comes to its next node, and
the sides adapt to what really happens: what ends is replaced at once, and a request that outgrows
its estimate counts with the memory-heavy side from then on (section 5.4).

Where the steps are heard of, a side starts its requests evenly over time, as fast as its memory
serves them: all at once they would also end at once, and half of the memory would be empty on
average until their lengths have spread them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from weft.blend.density import Bools, Floats, Ints, Rates
from weft.blend.forecast import Forecast
from weft.blend.sort import LeafOrder
from weft.blend.tree import PrefixTree

NODES_A_MEMORY = 16  # merged nodes whose requests fill the memory once
BURST = 1 / 4  # of the requests that a side's memory holds, those that may start at once
LEFT, RIGHT = 0, 1


class Node(NamedTuple):
    """Neighbouring leaves merged into one, which changes neither order nor sharing (A.2).

    Attributes:
        density: of the leaves together.
        reads: tokens read for each token held; above 1 where prefixes are shared.
    """

    density: float
    reads: float


def shares(left: Node, right: Node, density: float, capacity: float) -> tuple[float, float]:
    """KV tokens for each side so that what runs has this density (BlendServe section 5.3).

    ``M_L + M_R = M`` and ``M_L rho_L + M_R rho_R = M rho``, so ``M_L = M (rho - rho_R) / (rho_L -
    rho_R)``, clamped. The paper counts each token held as read once a step; a shared one is read
    for every request that shares it, so the second equation has the reads here: ``M_L a_L (rho_L -
    rho) = M_R a_R (rho - rho_R)``.
    """
    if left.density == right.density:
        return capacity / 2, capacity / 2
    surplus = max(0.0, left.reads * (left.density - density))
    deficit = max(0.0, right.reads * (density - right.density))
    if surplus + deficit == 0:
        return capacity / 2, capacity / 2
    part = deficit / (surplus + deficit) * capacity
    return part, capacity - part


class Live(NamedTuple):
    """A request that runs: its side, prompt tokens of its own, and expected output of a choice.

    Attributes:
        charged: token-steps that its side paid for it.
        choices: outputs that it has beside each other.
    """

    side: int
    own: float
    output: float
    charged: float = 0.0
    choices: int = 1

    @property
    def holds(self) -> float:
        """Tokens that it holds on average while it runs."""
        return self.own + self.choices * self.output / 2

    @property
    def work(self) -> float:
        """Tokens held times steps."""
        return self.holds * self.output


class DualScan:
    """Hands out the leaves of an order from both ends.

    Args:
        outputs: (n,) expected output tokens of each leaf of the tree.
        reserves: (n,) output tokens that must fit when it starts; more, where nothing is known.
        forecast: what is live; leaves that this scan did not hand out may be, too.
        choices: (n,) outputs that each leaf has beside each other; 1 by default.
        waiting: (n,) whoever hands leaves out clears them here; those that were handed out
            otherwise are passed over. None if there are no such.
    """

    def __init__(
        self,
        tree: PrefixTree,
        order: LeafOrder,
        outputs: Floats,
        reserves: Ints,
        rates: Rates,
        forecast: Forecast,
        choices: Ints | None = None,
        waiting: Bools | None = None,
    ) -> None:
        self._forecast = forecast
        self._waiting = waiting
        positions = order.positions
        lengths, output = tree.lengths[positions].astype(float), outputs[positions]
        self._leaves = positions.tolist()
        self._reserves = reserves[positions].tolist()
        own = lengths - order.shared
        several = np.ones(len(own), np.int64) if choices is None else choices[positions]
        holds = own + several * output / 2
        self._own, self._output = own.tolist(), output.tolist()
        self._choices = several.tolist()
        compute = rates.compute_s(lengths, several * output) - order.shared * rates.token_s
        self._compute = _running(compute)
        self._memory = _running(several * rates.memory_s(lengths, output))
        self._steps = _running(holds * output)
        self._read_s = rates.read_s
        self.density = self._compute[-1] / self._memory[-1]
        self._node_of, self._bounds = _merge(holds, forecast.capacity / NODES_A_MEMORY)
        self._next = [0, len(positions)]  # left: the next leaf; right: the end of the rest
        self._at = (-1, -1)
        self.share = (0.0, 0.0)
        self.used = [0.0, 0.0]
        self._counts = [0, 0]
        self._credit = [0.0, 0.0]  # token-steps that each side's memory has to give
        self._earned_at = forecast.now
        self._live: dict[int, Live] = {}

    def __len__(self) -> int:
        return self._next[RIGHT] - self._next[LEFT]

    def adopt(self, leaf: int, live: Live) -> None:
        """Count a leaf that runs."""
        self._live[leaf] = live
        self._count(live.side, live.holds, 1)

    def side(self, leaf: int) -> int:
        """On which side a live leaf counts."""
        return self._live[leaf].side

    def take(self) -> int | None:
        """The next leaf to start, counted as live from now on; None if none fits now.

        If nothing is live, one is handed out whatever it needs: only the engine knows better.
        """
        self._pass_over()
        if not len(self):
            return None
        self._derive()
        self._earn()
        room = [self.share[side] - self.used[side] for side in (LEFT, RIGHT)]
        sides = (LEFT, RIGHT) if room[LEFT] >= room[RIGHT] else (RIGHT, LEFT)
        for side in sides:
            at = self._next[LEFT] if side == LEFT else self._next[RIGHT] - 1
            early = self._forecast.timed and self._credit[side] < 0
            holds = self._own[at] + self._choices[at] * self._output[at] / 2
            if self._counts[side] and (early or holds > room[side]):
                continue
            if self._forecast.fits(self._leaves[at], self._reserves[at]):
                return self._start(side, at)
        if not len(self._forecast) and self._forecast.alone:
            return self._start(
                sides[0], self._next[LEFT] if sides[0] == LEFT else self._next[RIGHT] - 1
            )
        return None

    def ended(self, leaf: int, output: int) -> None:
        """A live leaf has ended; what it left of its memory and time goes to the next one."""
        live = self._live.pop(leaf)
        self._count(live.side, -live.holds, -1)
        spared = live.charged - live._replace(output=output).work
        self._credit[live.side] += max(0.0, spared)

    def outgrown(self, leaf: int, output: int) -> None:
        """A live leaf will have so many output tokens: it belongs to the memory-heavy side."""
        live = self._live[leaf]
        self._count(live.side, -live.holds, -1)
        if live.side == LEFT:
            self._credit[LEFT] += live.charged
            live = live._replace(charged=0.0)
        self.adopt(leaf, live._replace(side=RIGHT, output=output))

    def _pass_over(self) -> None:
        if self._waiting is None:
            return
        while len(self) and not self._waiting[self._leaves[self._next[LEFT]]]:
            self._next[LEFT] += 1
        while len(self) and not self._waiting[self._leaves[self._next[RIGHT] - 1]]:
            self._next[RIGHT] -= 1

    def _earn(self) -> None:
        """Credit each side with the token-steps that its memory offered since the last call."""
        steps = self._forecast.now - self._earned_at
        self._earned_at += steps
        for side, at in ((LEFT, self._next[LEFT]), (RIGHT, self._next[RIGHT] - 1)):
            most = BURST * self._output[at] * self.share[side]
            earned = self._credit[side] + steps * self.share[side]
            self._credit[side] = min(earned, most)

    def _count(self, side: int, holds: float, leaves: int) -> None:
        self._counts[side] += leaves
        self.used[side] = self.used[side] + holds if self._counts[side] else 0.0

    def _start(self, side: int, at: int) -> int:
        leaf: int = self._leaves[at]
        self._next[side] = at + 1 if side == LEFT else at
        self._forecast.admit(leaf, math.ceil(self._output[at]))
        live = Live(side, self._own[at], self._output[at], choices=self._choices[at])
        live = live._replace(charged=live.work)
        self.adopt(leaf, live)
        self._credit[side] -= live.work
        return leaf

    def _derive(self) -> None:
        """Share the memory out again if a side has reached its next node."""
        first, last = self._next
        at = (self._node_of[first], self._node_of[last - 1])
        if at == self._at:
            return
        self._at = at
        left, right = (self._node(*self._bounds[node : node + 2]) for node in at)
        rest = self._node(first, last)
        self.share = shares(left, right, rest.density, self._forecast.capacity)

    def _node(self, first: int, last: int) -> Node:
        """Density and reads of the leaves from ``first`` up to ``last``."""
        compute = self._compute[last] - self._compute[first]
        memory = self._memory[last] - self._memory[first]
        steps = self._steps[last] - self._steps[first]
        return Node(compute / memory, memory / self._read_s / steps)


def _running(values: Floats) -> list[float]:
    """Sums of the first 0, 1, ..., n values."""
    return [0.0, *np.cumsum(values).tolist()]


def _merge(holds: Floats, size: float) -> tuple[list[int], list[int]]:
    """Cut the order into nodes that hold about ``size`` tokens: node of each leaf, and bounds."""
    numbers = (np.cumsum(holds) - holds) // size
    opens = np.append(True, numbers[1:] != numbers[:-1])
    return (np.cumsum(opens) - 1).tolist(), [*np.flatnonzero(opens).tolist(), len(holds)]
