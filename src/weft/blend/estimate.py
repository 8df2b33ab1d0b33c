"""Estimates output lengths: a small sample runs first; the others follow their relatives."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from weft.blend.density import Bools, Floats, Ints
from weft.blend.tree import PrefixTree

SAMPLED = 0.01  # share of the requests that run first (BlendServe section 5.4)
TOLD = 0.1  # share of the samples around a leaf that must have ended before it is estimated
NEVER = 2**40  # a bound that is none, and more than any memory has room for
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

    Where outputs are bounded, what counts is the share of their bounds that the known ones used:
    the average itself if all bounds are equal, and exact for outputs whose length is given
    (videos; section 5.4).

    Args:
        known: output tokens by prompt number.
        longest: (n,) bound of each leaf's output, its ``max_tokens``; ``NEVER`` for none.
    """
    has, at = _by_leaf(tree, known)
    mean = _nearest(tree, at, has, float(tree.lengths.mean()))
    found = np.where(has > 0, at, mean)
    if longest is not None:
        bounded = longest < NEVER
        bounds = np.where(bounded, longest, 0).astype(float)
        used = _nearest(tree, at * bounded, has * bounds, -1.0)
        guess = np.where(used >= 0, used * bounds, np.minimum(mean, bounds))
        found = np.where((has == 0) & bounded, guess, found)
    return np.maximum(found, 1.0)


def _nearest(tree: PrefixTree, values: Floats, weights: Floats, nothing: float) -> Floats:
    """(n,) values over weights of the smallest subtree around each leaf that has weights."""
    total, weight = _over(tree, values), _over(tree, weights)
    ratio = (total / np.where(weight > 0, weight, 1.0)).tolist()
    for node, (has, above) in enumerate(
        zip((weight > 0).tolist(), tree.parent.tolist(), strict=True)
    ):
        if not has:
            ratio[node] = ratio[above] if above >= 0 else nothing
    return np.asarray(ratio)[tree.leaf_parent]


def told(tree: PrefixTree, known: Mapping[int, float], running: Mapping[int, float]) -> Bools:
    """(n,) of which leaves enough is known: of the samples around them one in ten has ended.

    The others are then at least as old as the shortest ones, so that twice their age is a fair
    guess; before that it would be a guess from nothing.

    Args:
        known, running: samples that have ended and that have not, by prompt number.
    """
    kind, ended, every = _kinds(tree, known, running)
    good = (every == 0) | ((ended > 0) & (ended >= TOLD * every))
    return np.asarray(good[kind])


def more_samples(
    tree: PrefixTree,
    known: Mapping[int, float],
    running: Mapping[int, float],
    waiting: Bools,
    most: int,
) -> Ints:
    """Leaves to run as further samples, where there are too few for an estimate soon.

    A single sample tells when it has ended, ten when the shortest of them has: in a small set that
    is most of the time of a long request. The kinds of which most leaves wait come first.

    Args:
        known, running: samples that have ended and that have not, by prompt number.
        waiting: (n,) leaves that may be taken.
        most: how many may be taken altogether.
    """
    kind, _, every = _kinds(tree, known, running)
    unknown = np.flatnonzero(waiting & ~told(tree, known, running))
    kinds, counts = np.unique(kind[unknown], return_counts=True)
    found: list[int] = []
    for one in kinds[np.argsort(-counts, kind="stable")]:
        mine = unknown[kind[unknown] == one]
        lacks = min(len(mine), round(1 / TOLD) - int(every[one]), most - len(found))
        if lacks > 0:
            found += mine[np.linspace(0, len(mine) - 1, lacks).astype(np.int64)].tolist()
    return np.asarray(found, np.int64)


def lacking(
    tree: PrefixTree,
    known: Mapping[int, float],
    running: Mapping[int, float],
    waiting: Bools,
) -> dict[int, int]:
    """Number of samples that must still end before estimates suffice, by subtree.

    Args:
        known, running: samples that have ended and that have not, by prompt number.
        waiting: (n,) leaves that wait for an estimate.
    """
    kind, ended, every = _kinds(tree, known, running)
    nodes = np.unique(kind[waiting & ~told(tree, known, running)])
    needed = np.ceil(TOLD * every[nodes]) - ended[nodes]
    return {int(node): int(count) for node, count in zip(nodes, needed, strict=True)}


def _kinds(
    tree: PrefixTree, known: Mapping[int, float], running: Mapping[int, float]
) -> tuple[Ints, Floats, Floats]:
    """(n,) the smallest node around each leaf that has samples, (nodes,) those ended, and all."""
    ended = _over(tree, _by_leaf(tree, known)[0])
    every = ended + _over(tree, _by_leaf(tree, running)[0])
    kind = list(range(len(every)))
    for node, (sampled, above) in enumerate(
        zip((every > 0).tolist(), tree.parent.tolist(), strict=True)
    ):
        if not sampled and above >= 0:
            kind[node] = kind[above]
    return np.asarray(kind, np.int64)[tree.leaf_parent], ended, every


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
