"""Cuts a set of requests into parts of equal load, one for each data-parallel engine."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from weft.blend.density import Bools, Floats, Ints, Rates
from weft.blend.sort import LeafOrder, sort_tree
from weft.blend.tree import PrefixTree
from weft.core.errors import ParameterError


def partition(
    tree: PrefixTree,
    outputs: Floats,
    rates: Rates,
    parts: int,
    *,
    weights: Seq[float] | None = None,
    present: Bools | None = None,
    choices: Ints | None = None,
) -> list[list[int]]:
    """Prompt numbers of each part: the parts have their shares of arithmetic and of reads.

    The sorted leaves are taken from both ends, from the side that brings a part nearer to the
    density of the whole, until it has its share of the load; so each part is two runs of
    neighbours, and few prefixes are computed in more than one part (BlendServe section 5.5).

    Args:
        outputs: (n,) expected output tokens of each leaf.
        parts: at most as many as there are prompts.
        weights: the share of each part in the load, above 0 each, such as the speed of its engine;
            equal by default.
        present: (n,) leaves that are to be divided; all by default.
        choices: (n,) outputs that each leaf has beside each other; 1 by default.

    Raises:
        ParameterError: more parts than prompts, or less than one; a weight that is none.
    """
    shares = np.ones(max(parts, 0)) if weights is None else np.asarray(weights, float)
    if len(shares) != parts or not np.isfinite(shares).all() or (shares <= 0).any():
        raise ParameterError(f"{parts} parts need as many weights above 0.", param="weights")
    count = len(tree.leaves) if present is None else int(present.sum())
    if not 1 <= parts <= count:
        raise ParameterError(f"{count} prompts cannot be cut into {parts} parts.", param="parts")
    order: LeafOrder = sort_tree(tree, outputs, rates, present=present, choices=choices)
    lengths, output = tree.lengths[order.positions], outputs[order.positions]
    several = 1 if choices is None else choices[order.positions]
    compute = (rates.compute_s(lengths, several * output) - rates.token_s * order.shared).tolist()
    memory = (several * rates.memory_s(lengths, output)).tolist()
    whole = sum(compute), sum(memory)
    goals = (shares.cumsum() / shares.sum()).tolist()
    numbers = tree.leaves[order.positions].tolist()
    found: list[list[int]] = []
    left, right, taken = 0, count, [0.0, 0.0]
    for part in range(1, parts + 1):
        goal = [goals[part - 1] * total for total in whole]
        mine: list[int] = []
        while left < right and right - left > parts - part:
            lacks = goal[0] - taken[0], goal[1] - taken[1]
            if part < parts and lacks[0] / whole[0] + lacks[1] / whole[1] <= 0 and mine:
                break
            # The side that keeps what is still lacking at the density of the whole.
            at = left if lacks[0] * whole[1] >= lacks[1] * whole[0] else right - 1
            left, right = (left + 1, right) if at == left else (left, right - 1)
            taken[0] += compute[at]
            taken[1] += memory[at]
            mine.append(numbers[at])
        found.append(mine)
    return found
