"""Sorts a prefix tree by falling density; moves outlying leaves where that costs little sharing.

Children of every node by falling density keep each prefix together; a leaf that stands where it
does not belong is moved to the root, which costs its shared prefix, as long as nearly all sharing
is kept (BlendServe sections 5.2 and 5.4).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.blend.density import Bools, Floats, Ints, Rates, density
from weft.blend.tree import PrefixTree, arrange

KEEP_SHARING = 0.99  # share of the tokens shared at best that splits must leave (section 5.2)


@dataclass(frozen=True, slots=True)
class LeafOrder:
    """Leaves from the most compute-heavy to the most memory-heavy.

    Attributes:
        positions: (m,) positions of the leaves in the tree's arrays, in this order.
        shared: (m,) tokens that each shares with the one before it.
        split: how many leaves were moved to the root.
        rounds: how often the tree was sorted.
    """

    positions: Ints
    shared: Ints
    split: int
    rounds: int


def sort_tree(
    tree: PrefixTree,
    outputs: Floats,
    rates: Rates,
    *,
    present: Bools | None = None,
    keep: float = KEEP_SHARING,
    choices: Ints | None = None,
) -> LeafOrder:
    """Sort, split and sort again until the leaves fall in density or every split is too dear.

    A split is too dear if it computes more again than it sets right, or more than is left of the
    sharing that may be given up. Each leaf is split at most once, so this ends.

    Args:
        outputs: (n,) expected output tokens of each leaf.
        present: (n,) which leaves are to be ordered; all by default.
        keep: share of the sharing of these leaves that must be left.
        choices: (n,) outputs that each leaf has beside each other; 1 by default.
    """
    state = _Sorting(tree, outputs, rates, present, keep, 1 if choices is None else choices)
    rounds = 1
    while state.split():
        rounds += 1
    position, shared = state.arranged
    order = np.empty(len(shared), np.int64)
    here = np.flatnonzero(position >= 0)
    order[position[here]] = here
    return LeafOrder(order, shared, state.moved, rounds)


class _Sorting:
    """The parent of each leaf, and the sharing that may still be given up."""

    def __init__(
        self,
        tree: PrefixTree,
        outputs: Floats,
        rates: Rates,
        present: Bools | None,
        keep: float,
        choices: Ints | int = 1,
    ) -> None:
        self.tree = tree
        self.rates = rates
        self.compute = rates.compute_s(tree.lengths, choices * outputs)
        self.memory = choices * rates.memory_s(tree.lengths, outputs)
        self.density = density(self.compute, self.memory)
        self.hangs = tree.leaf_parent.copy()
        if present is not None:
            self.hangs[~present] = -1
        self.moved = 0
        self.least = keep * int(self._shared_at_home()[1].sum())
        self.arranged = self._arrange()

    def _at_home(self) -> Ints:
        """Positions of the leaves that were neither moved nor left out."""
        return np.flatnonzero(self.hangs == self.tree.leaf_parent)

    def _shared_at_home(self) -> tuple[Ints, Ints]:
        """The leaves at home, and the tokens each shares with the one before it."""
        home = self._at_home()
        if not len(home):
            return home, home
        starts = np.append(0, home[:-1] + 1)
        shared = np.minimum.reduceat(self.tree.shared[: home[-1] + 1], starts)
        shared[0] = 0
        return home, shared

    def _arrange(self) -> tuple[Ints, Ints]:
        """Sort by falling density of subtrees (section 5.2)."""
        tree = self.tree
        home, shared = self._shared_at_home()
        mine = np.zeros(len(self.hangs))
        mine[home] = 1

        def over(values: Floats) -> Floats:
            sums = np.append(0.0, np.cumsum(values * mine))
            return np.asarray(sums[tree.last] - sums[tree.first])

        saved = np.zeros(len(mine))
        saved[home] = shared
        total_saved = over(saved)
        if len(home):  # the first leaf of a subtree computes the path to it
            opening = np.minimum(np.searchsorted(home, tree.first), len(home) - 1)
            total_saved -= shared[opening]
        memory = over(self.memory)
        empty = memory <= 0
        rho = density(
            over(self.compute), np.where(empty, 1.0, memory), total_saved * self.rates.token_s
        )
        return arrange(tree, np.where(empty, 0.0, -rho), -self.density, self.hangs)

    def split(self) -> bool:
        """Move outlying leaves to the root and sort again; False if none was moved."""
        home, shared = self._shared_at_home()
        spare = int(shared.sum()) - self.least
        cost = np.zeros(len(self.hangs))
        cost[home] = np.maximum(shared, np.append(shared[1:], 0))
        worth = self._mismatch()
        out = self._out_of_order()
        out = out[(self.hangs[out] > 0) & (self.tree.leaf_parent[out] == self.hangs[out])]
        out = out[(cost[out] <= spare) & (worth[out] > cost[out] * self.rates.token_s)]
        if not len(out):
            return False
        gain = worth[out] / np.maximum(cost[out] * self.rates.token_s, 1e-30)
        out = out[np.lexsort((out, -gain))]
        chosen = out[np.cumsum(cost[out]) <= spare]
        self.hangs[chosen] = 0
        self.moved += len(chosen)
        self.arranged = self._arrange()
        return True

    def _out_of_order(self) -> Ints:
        """Leaves with a lower density before them, or a higher one after them."""
        position = self.arranged[0]
        here = np.flatnonzero(position >= 0)
        order = here[np.argsort(position[here])]
        own = self.density[order]
        lowest_before = np.minimum.accumulate(own)
        highest_after = np.maximum.accumulate(own[::-1])[::-1]
        return np.asarray(order[(lowest_before < own) | (highest_after > own)])

    def _mismatch(self) -> Floats:
        """Seconds of each leaf that its neighbours cannot overlap, at its present place.

        The neighbours have the density that the leaves at this place have when all are sorted.
        """
        position = self.arranged[0]
        here = np.flatnonzero(position >= 0)
        order = here[np.argsort(position[here])]
        ideal = here[np.argsort(-self.density[here], kind="stable")]
        load = self.compute + self.memory
        there = np.searchsorted(np.cumsum(load[ideal]), np.cumsum(load[order]) - load[order] / 2)
        rho = self.density[ideal][np.minimum(there, len(ideal) - 1)]
        found = np.zeros(len(self.hangs))
        found[order] = np.abs(self.compute[order] - rho * self.memory[order]) / (1 + rho)
        return found
