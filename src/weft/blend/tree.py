"""The prefix tree of all prompts, as arrays over the prompts in lexicographic order.

A subtree is a range of that order, so every sum over a subtree is a difference of running sums, and
hundreds of thousands of prompts need no object each (BlendServe section 5.1 and appendix A.2).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from weft.blend.density import Ints
from weft.core.errors import ParameterError

TOKEN_BYTES = 4  # a token as a big-endian number, so that bytes sort as tokens do


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Leaves are prompts; node 0 is the root, and a parent's number is below its children's.

    Attributes:
        leaves: (n,) prompt numbers in lexicographic order; the arrays below are in this order.
        lengths: (n,) prompt tokens.
        shared: (n,) tokens shared with the leaf before, in whole blocks; 0 for the first.
        leaf_parent: (n,) the deepest node above each leaf.
        parent: (nodes,) -1 for the root.
        depth: (nodes,) tokens from the root to the end of the node's segment.
        first, last: (nodes,) the node's range of leaves, ``last`` excluded.
    """

    leaves: Ints
    lengths: Ints
    shared: Ints
    leaf_parent: Ints
    parent: Ints
    depth: Ints
    first: Ints
    last: Ints

    @property
    def sharing(self) -> float:
        """Share of all prompt tokens that need not be computed in the best order."""
        return float(self.shared.sum() / self.lengths.sum())

    def depth_first(self) -> Ints:
        """Prompt numbers in depth-first order, siblings in the order in which they came.

        The order that shares most (BlendServe section 3.3; SGLang).
        """
        first_came = np.minimum.reduceat(
            np.append(self.leaves, len(self.leaves)), np.stack([self.first, self.last], 1).ravel()
        )[::2]
        return self.leaves[np.argsort(self.positions(first_came, self.leaves))]

    def positions(
        self,
        node_key: Seq[float] | Ints,
        leaf_key: Seq[float] | Ints,
        leaf_parent: Ints | None = None,
    ) -> Ints:
        """(n,) position of each leaf once all siblings are in rising order of their keys.

        Args:
            leaf_parent: where leaves hang that do not hang where they were; -1 takes one out, and
                its position is -1.
        """
        hangs = self.leaf_parent if leaf_parent is None else leaf_parent
        return arrange(self, np.asarray(node_key), np.asarray(leaf_key), hangs)[0]


def arrange(tree: PrefixTree, node_key: Ints, leaf_key: Ints, hangs: Ints) -> tuple[Ints, Ints]:
    """Sort the children of every node by rising key, then by first leaf.

    Returns:
        (n,) position of each leaf, -1 for those taken out, and (m,) tokens that the leaf at each of
        the m positions shares with the one before.
    """
    present = np.flatnonzero(hangs >= 0)
    count = _counts(tree, hangs)
    inner = np.flatnonzero(count > 0)
    inner = inner[inner > 0]
    parents = np.concatenate([tree.parent[inner], hangs[present]])
    keys = np.concatenate([node_key[inner], leaf_key[present]])
    ties = np.concatenate([tree.first[inner], present])
    sizes = np.concatenate([count[inner], np.ones(len(present), np.int64)])

    order = np.lexsort((ties, keys, parents))
    before = np.cumsum(sizes[order]) - sizes[order]
    sorted_parents = parents[order]
    opens = np.ones(len(order), bool)  # the first child of its parent
    opens[1:] = sorted_parents[1:] != sorted_parents[:-1]
    group = np.flatnonzero(opens)
    before -= np.repeat(before[group], np.diff(np.append(group, len(order))))
    offset = np.empty(len(order), np.int64)
    offset[order] = before

    start = [0] * len(tree.parent)
    for node, above, within in zip(
        inner.tolist(), tree.parent[inner].tolist(), offset[: len(inner)].tolist(), strict=True
    ):
        start[node] = start[above] + within
    starts = np.asarray(start, np.int64)[parents] + offset
    position = np.full(len(hangs), -1, np.int64)
    position[present] = starts[len(inner) :]
    shared = np.zeros(len(present), np.int64)
    later = offset > 0
    shared[starts[later]] = tree.depth[parents[later]]
    return position, shared


def _counts(tree: PrefixTree, hangs: Ints) -> Ints:
    """(nodes,) leaves under each node, when leaves hang where ``hangs`` says."""
    at_home = np.append(0, np.cumsum(hangs == tree.leaf_parent))
    count = at_home[tree.last] - at_home[tree.first]
    count[0] = int((hangs >= 0).sum())
    return np.asarray(count)


def build_tree(prompts: Seq[Seq[int]], block_size: int = 16) -> PrefixTree:
    """Put prompts into a prefix tree.

    Args:
        prompts: token ids (or any numbers below 2**32, such as bytes), at least one each; numpy
            arrays are taken without a copy per token.
        block_size: prefixes are shared in multiples of so many tokens, as the engine's KV cache
            shares them, and never a whole prompt, since the last token must be computed.

    Raises:
        ParameterError: a prompt is empty or holds something that is no token id.
    """
    keys = [_key(prompt, number) for number, prompt in enumerate(prompts)]
    if not keys:
        raise ParameterError("There are no prompts to order.", param="prompts")
    leaves = sorted(range(len(keys)), key=keys.__getitem__)
    width = block_size * TOKEN_BYTES
    shared = [0] * len(leaves)
    last = keys[leaves[0]]
    for position in range(1, len(leaves)):
        key = keys[leaves[position]]
        if key[:width] == last[:width]:
            shared[position] = _common_blocks(last, key, width) * block_size
        last = key
    lengths = np.fromiter((len(keys[leaf]) // TOKEN_BYTES for leaf in leaves), np.int64, len(keys))
    return _from_shared(np.asarray(leaves, np.int64), lengths, shared)


def _key(prompt: Seq[int], number: int) -> bytes:
    try:
        tokens = np.asarray(prompt)
        whole = tokens.ndim == 1 and len(tokens) > 0 and tokens.dtype.kind in "iu"
        if whole and tokens.min() >= 0 and tokens.max() < 2**32:
            return tokens.astype(">u4").tobytes()
    except (TypeError, ValueError, OverflowError):
        pass
    what = "has no tokens" if len(prompt) == 0 else "holds something that is no token id"
    raise ParameterError(f"Prompt {number} {what}.", param="prompts")


def _common_blocks(a: bytes, b: bytes, width: int) -> int:
    """Whole blocks that two prompts share, short of the last token of either."""
    low, high = 0, (min(len(a), len(b)) - TOKEN_BYTES) // width
    while low < high:
        middle = (low + high + 1) // 2
        start, end = low * width, middle * width
        if a[start:end] == b[start:end]:
            low = middle
        else:
            high = middle - 1
    return low


def _from_shared(leaves: Ints, lengths: Ints, shared: list[int]) -> PrefixTree:
    """Make the nodes: maximal ranges of leaves in which neighbours share at least ``depth``."""
    count = len(shared)
    first, depth, last = [0], [0], [count]
    parent = [-1]
    open_nodes = [0]
    leaf_parent = [0] * count
    for position in range(1, count + 1):
        share = shared[position] if position < count else 0
        before = position - 1
        # The leaf before hangs under the deeper of the nodes to its left and right.
        top = open_nodes[-1]
        if share > depth[top]:
            first.append(before)
            depth.append(share)
            last.append(-1)
            parent.append(top)
            open_nodes.append(len(depth) - 1)
            leaf_parent[before] = len(depth) - 1
            continue
        leaf_parent[before] = top
        while share < depth[open_nodes[-1]]:
            closed = open_nodes.pop()
            last[closed] = position
            above = open_nodes[-1]
            if share > depth[above]:  # a node that only shows now that a shallower one follows
                first.append(first[closed])
                depth.append(share)
                last.append(-1)
                parent.append(above)
                parent[closed] = len(depth) - 1
                open_nodes.append(len(depth) - 1)
    return _renumbered(leaves, lengths, np.asarray(shared), leaf_parent, parent, depth, first, last)


def _renumbered(
    leaves: Ints,
    lengths: Ints,
    shared: Ints,
    leaf_parent: list[int],
    parent: list[int],
    depth: list[int],
    first: list[int],
    last: list[int],
) -> PrefixTree:
    """Number the nodes so that parents come before their children."""
    order = np.lexsort((depth, first))
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order))
    above = np.asarray(parent)[order]
    above[1:] = number[above[1:]]
    return PrefixTree(
        leaves,
        lengths,
        np.asarray(shared, np.int64),
        number[np.asarray(leaf_parent)],
        above.astype(np.int64),
        np.asarray(depth, np.int64)[order],
        np.asarray(first, np.int64)[order],
        np.asarray(last, np.int64)[order],
    )
