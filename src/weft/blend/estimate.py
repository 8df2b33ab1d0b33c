"""Output lengths before they are known: a small sample runs first, the rest follow relatives."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from weft.blend.density import Bools, Floats, Ints
from weft.blend.tree import PrefixTree

SAMPLED = 0.01  # share of the requests that run first (BlendServe section 5.4)
FEWEST = 16  # requests of a small set that run first: one of 100 would say nothing of the others


def choose_samples(count: int, share: float = SAMPLED, seed: int = 0) -> Ints:
    """Numbers of the prompts to run first, in rising order: a random share of them."""
    wanted = min(count, max(FEWEST, round(count * share)))
    chosen = np.random.default_rng(seed).choice(count, wanted, replace=False)
    return np.sort(chosen).astype(np.int64)


def estimate_outputs(
    tree: PrefixTree, known: Mapping[int, float], longest: Ints | None = None
) -> Floats:
    """(n,) expected output tokens of each leaf of the tree, in its order.

    A known leaf has its own; another one the average over the smallest subtree around it in which
    any is known, so a subtree without samples has the average of its siblings (BlendServe section
    5.1). With nothing known at all, an output is as long as the average prompt.

    Args:
        known: output tokens by prompt number.
        longest: (n,) bound of each leaf's output, its ``max_tokens``.
    """
    has, at = _by_leaf(tree, known)
    inside, total = _over(tree, has), _over(tree, at)
    mean = np.where(inside > 0, total / np.maximum(inside, 1), -1.0).tolist()
    if mean[0] < 0:
        mean[0] = float(tree.lengths.mean())
    for node, above in enumerate(tree.parent.tolist()):
        if mean[node] < 0:
            mean[node] = mean[above]
    found = np.where(has > 0, at, np.asarray(mean)[tree.leaf_parent])
    if longest is not None:
        found = np.where(has > 0, found, np.minimum(found, longest))
    return np.maximum(found, 1.0)


def mostly_known(
    tree: PrefixTree, known: Mapping[int, float], running: Mapping[int, float]
) -> Bools:
    """(n,) for which leaves at least half of the samples that their estimate rests on have ended.

    Args:
        known, running: samples that have ended and that have not, by prompt number.
    """
    ended = _over(tree, _by_leaf(tree, known)[0])
    every = ended + _over(tree, _by_leaf(tree, running)[0])
    good = (every == 0) | (2 * ended >= every)
    told = good.tolist()
    for node, (sampled, above) in enumerate(
        zip((every > 0).tolist(), tree.parent.tolist(), strict=True)
    ):
        if not sampled and above >= 0:
            told[node] = told[above]
    return np.asarray(told, bool)[tree.leaf_parent]


def _by_leaf(tree: PrefixTree, values: Mapping[int, float]) -> tuple[Floats, Floats]:
    """(n,) 1 for each leaf that has a value, and the values, 0 elsewhere."""
    has, at = np.zeros(len(tree.leaves)), np.zeros(len(tree.leaves))
    numbers = np.fromiter(values.keys(), np.int64, len(values))
    has[numbers] = 1
    at[numbers] = np.fromiter(values.values(), np.float64, len(values))
    return has[tree.leaves], at[tree.leaves]


def _over(tree: PrefixTree, values: Floats) -> Floats:
    """(nodes,) sums over the leaves of each subtree."""
    sums = np.append(0.0, np.cumsum(values))
    return np.asarray(sums[tree.last] - sums[tree.first])
