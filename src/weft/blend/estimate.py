"""Output lengths before they are known: a small sample runs first, the rest follows its relatives."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from weft.blend.density import Floats, Ints
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
    number = len(tree.leaves)
    at = np.full(number, np.nan)
    if known:
        by_prompt = np.full(number, np.nan)
        by_prompt[np.fromiter(known.keys(), np.int64, len(known))] = list(known.values())
        at = by_prompt[tree.leaves]
    has = ~np.isnan(at)
    counts = np.append(0, np.cumsum(has))
    sums = np.append(0.0, np.cumsum(np.where(has, at, 0.0)))
    inside = counts[tree.last] - counts[tree.first]
    total = sums[tree.last] - sums[tree.first]
    mean = np.where(inside > 0, total / np.maximum(inside, 1), -1.0).tolist()
    if mean[0] < 0:
        mean[0] = float(tree.lengths.mean())
    for node, above in enumerate(tree.parent.tolist()):
        if mean[node] < 0:
            mean[node] = mean[above]
    found = np.where(has, at, np.asarray(mean)[tree.leaf_parent])
    if longest is not None:
        found = np.where(has, found, np.minimum(found, longest))
    return np.maximum(found, 1.0)
