"""Learns output lengths while requests run: a Kaplan-Meier curve for each beginning of prompts.

A request that runs is as long as its output at least, so it counts as censored at its age; without
that the short ones, which end first, would speak for all. Where an output is bounded, the curve is
over the share of its bound. A node with few ends takes after the node above it.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from hashlib import blake2b
from threading import Lock
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from weft.blend.density import Bools, Floats, Ints
from weft.blend.prefixes import LEVELS, Hashes, prefix_hashes

NEVER = 2**40  # a bound that is none, and more than any memory has room for
TOLD = 0.1  # share of what started at a node that must have ended before it tells of the others
MOST_NODES = 4096
SHARED = 8  # prompts that begin alike are a node
HALVE_AT = 20_000  # ends of a node: from there on old ones count half
AS_PARENT = 1.0  # requests with the lengths of the node above, that each node is taken to have had
FIRST_GUESS = 256.0  # tokens, of an output of which nothing is known
FADING = 0.8  # of what was seen in a bin, by the next one, when hazards are assumed
RESERVED = 0.8  # of all requests are not longer than what is reserved for one


def _edges(first: int, growth: float, last: float) -> list[float]:
    """1, 2, ..., first, and from there on by a factor."""
    found = [float(n) for n in range(first + 1)]
    while found[-1] < last:
        found.append(min(last, float(round(found[-1] * growth))))
    return found


TOKENS = np.asarray(_edges(32, 1.08, 2**20))  # edges of bins of lengths, (a, b]
SHARES = np.append([0.0], np.append(2.0 ** np.arange(-12, 0, 1 / 8), [0.95, 0.999, 1.0]))
_NUM_TOKENS, _NUM_SHARES = len(TOKENS) - 1, len(SHARES) - 1
COLUMNS = _NUM_TOKENS + _NUM_SHARES  # of a row: bins of tokens, then of shares

Row = NDArray[np.float32]


class Running(NamedTuple):
    """Requests that run: nodes, output tokens so far, and bounds."""

    nodes: Ints
    ages: Ints
    bounds: Ints


class RunsSomething(Protocol):
    """An order whose requests may be running."""

    def running(self) -> Running:
        """Those that do."""


class LengthTable:
    """Ends by node of the tree of prompts' beginnings; node 0 is above all others.

    May be used by several threads; but what runs is only looked at by the thread of its orders.

    Attributes:
        touched: numbers of nodes that have changed since somebody cleared it.
    """

    def __init__(self) -> None:
        self._ids: dict[int, int] = {}
        self.parents = [-1]
        self.hashes = [0]
        self.touched: set[int] = set()
        self._ended = np.zeros((16, COLUMNS), np.float32)
        self._censored = np.zeros((16, COLUMNS), np.float32)
        self._watched: WeakSet[RunsSomething] = WeakSet()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self.parents)

    def watch(self, order: RunsSomething) -> None:
        """What this order runs counts as censored, as long as the order exists."""
        with self._lock:
            self._watched.add(order)

    def unwatch(self, order: RunsSomething) -> None:
        """This order runs nothing any more."""
        with self._lock:
            self._watched.discard(order)

    def places(self, prompts: Seq[Any], scope: bytes = b"") -> Ints:
        """(n,) the node of each prompt: of its longest beginning that enough of them share.

        A call makes nodes for a quarter of the room that is left: short, common beginnings first.

        Args:
            prompts: token ids.
            scope: prompts of other scopes, such as another endpoint's, have nodes of their own.
        """
        rows = np.zeros((len(prompts), len(LEVELS)), np.uint64)
        for row, prompt in zip(rows, prompts, strict=True):
            found = prefix_hashes(prompt, scope)
            row[: len(found)] = found
        nodes = np.full(len(prompts), self._node(scope_hash(scope), 0) if scope else 0, np.int64)
        levels = [_Level.of(column) for column in rows.T]
        room = (MOST_NODES - len(self)) // 4  # others come, too
        for level, below in zip(levels, [*levels[1:], None], strict=True):
            wanted = level.counts >= SHARED
            if below is not None:  # of equal sets of prompts the longest beginning is the node
                above = level.inverse[below.firsts]
                wanted[above[(below.values > 0) & (below.counts == level.counts[above])]] = False
            found_at = np.full(len(level.values), -1, np.int64)
            parents, values = nodes[level.firsts].tolist(), level.values.tolist()
            for place in np.argsort(-level.counts, kind="stable").tolist():
                new = values[place] not in self._ids
                if values[place] and (not new or (wanted[place] and room > 0)):
                    found_at[place] = self._node(values[place], parents[place])
                    room -= new
            mine = found_at[level.inverse]
            nodes = np.where(mine >= 0, mine, nodes)
        return nodes

    def _node(self, value: int, parent: int) -> int:
        """The node of a hash, made under ``parent`` if need be, and if there is room for it."""
        with self._lock:
            if value not in self._ids:
                if len(self) >= MOST_NODES:
                    return parent
                if len(self) == len(self._ended):
                    self._ended, self._censored = (
                        np.concatenate([rows, np.zeros_like(rows)])
                        for rows in (self._ended, self._censored)
                    )
                self._ids[value] = len(self)
                self.parents.append(parent)
                self.hashes.append(value)
            return self._ids[value]

    def add(self, node: int, output: float, bound: int = NEVER) -> None:
        """A request has ended with so many output tokens."""
        with self._lock:
            ended, censored = self._ended[node], self._censored[node]
            if output < bound:
                ended[_bin(TOKENS, output)] += 1
            else:  # who knows how long it would have become
                censored[_bin(TOKENS, bound)] += 1
            if bound < NEVER:
                ended[_NUM_TOKENS + _bin(SHARES, min(1.0, output / bound))] += 1
            if ended.sum() > HALVE_AT:
                ended /= 2
                censored /= 2
            self.touched.add(node)

    def censor(self, node: int, age: float, bound: int = NEVER) -> None:
        """A request has got so many tokens, and will never say how many it would have got."""
        with self._lock:
            _censor(self._censored[node], age, bound)
            self.touched.add(node)

    def restore(self, value: int, parent: int, ended: Row, censored: Row) -> None:
        """Put back a node that was saved; the one with the hash ``parent`` is there, or is 0."""
        node = self._node(value, self._ids.get(parent, 0)) if value else 0
        with self._lock:
            if self.hashes[node] == value:
                self._ended[node], self._censored[node] = ended, censored

    def snapshot(self, running: bool = True) -> Snapshot:
        """What is known now, for use on any thread.

        Args:
            running: with what the orders run.
        """
        with self._lock:
            ended, censored = self._ended[: len(self)].copy(), self._censored[: len(self)].copy()
            parents, watched = list(self.parents), list(self._watched) if running else []
        numbers = np.zeros(len(parents))
        for order in watched:
            nodes, ages, bounds = order.running()
            np.add.at(numbers, nodes, 1)
            for at, age, bound in zip(nodes.tolist(), ages.tolist(), bounds.tolist(), strict=True):
                _censor(censored[at], age, bound)
        return Snapshot(parents, ended, censored, numbers)


def scope_hash(scope: bytes) -> int:
    """The hash of the node of all prompts of a scope."""
    return int.from_bytes(blake2b(scope, digest_size=8).digest(), "little")


class _Level(NamedTuple):
    """The hashes of all prompts' beginnings of one length.

    Attributes:
        values, firsts, counts: each hash once, the first prompt that has it, and how many do.
        inverse: (n,) the place of each prompt's hash in these.
    """

    values: Hashes
    firsts: Ints
    inverse: Ints
    counts: Ints

    @classmethod
    def of(cls, hashes: Hashes) -> _Level:
        return cls(*np.unique(hashes, return_index=True, return_inverse=True, return_counts=True))


def _bin(edges: Floats, length: float) -> int:
    """The bin (a, b] in which a length lies; 0 lies in the first."""
    return max(0, min(int(np.searchsorted(edges, length, side="left")), len(edges) - 1) - 1)


def _censor(row: Row, age: float, bound: int) -> None:
    if age > 0:
        row[_bin(TOKENS, age)] += 1
        if bound < NEVER:
            row[_NUM_TOKENS + _bin(SHARES, min(1.0, age / bound))] += 1


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a table knows at a moment.

    Attributes:
        ended, censored: (nodes, columns) requests at each node itself.
        running: (nodes,) how many run.
    """

    parents: list[int]
    ended: Row
    censored: Row
    running: Floats

    def with_parents(self, values: NDArray[Any]) -> NDArray[Any]:
        """Sums over each node and all below it."""
        sums = np.array(values, float)
        for node in range(len(sums) - 1, 0, -1):
            sums[self.parents[node]] += sums[node]
        return sums

    def told(self) -> tuple[Bools, Ints, Floats, Floats]:
        """Which nodes tell of requests that have not started.

        Returns:
            (nodes,) whether, of those that started at the node, or at the nearest above it where
            any did, one in ten ends before what is known ends; (nodes,) that node; (nodes,) ends,
            and starts.
        """
        ended, censored = self.with_parents(self.ended), self.with_parents(self.censored)
        ends = ended[:, :_NUM_TOKENS].sum(1) + ended[:, -1]  # these are in no bin of tokens
        starts = ends + self.with_parents(self.running)
        kind = np.arange(len(ends))
        for node in range(1, len(ends)):
            if starts[node] == 0:
                kind[node] = kind[self.parents[node]]
        seen = [
            1
            - np.prod(
                1 - ended[:, own] / np.maximum(_at_risk(ended[:, own], censored[:, own]), 1), axis=1
            )
            for own in (slice(_NUM_TOKENS), slice(_NUM_TOKENS, None))
        ]
        good = (starts == 0) | (np.maximum(*seen) >= TOLD - 1e-9)
        return good[kind], kind, ends, starts


class LengthCurves:
    """Survival of outputs by node, made of a snapshot."""

    def __init__(self, known: Snapshot) -> None:
        ended, censored = known.with_parents(known.ended), known.with_parents(known.censored)
        cut = _NUM_TOKENS
        guess = _guess(ended[0, :cut], censored[0, :cut])
        self._tokens = _survival(ended[:, :cut], censored[:, :cut], known.parents, guess)
        bounded = np.append(np.zeros(_NUM_SHARES - 1), 1.0)
        self._shares = _survival(ended[:, cut:], censored[:, cut:], known.parents, bounded)
        self._has_tokens = ended[0, :cut].sum() > 0
        self._has_shares = ended[0, cut:].sum() > 0
        self._token_area = _areas(TOKENS, self._tokens)
        self._share_area = _areas(SHARES, self._shares)

    def expected(self, nodes: Ints, ages: Any = 0, bounds: Ints | None = None) -> Floats:
        """(n,) expected output of requests that have got ``ages`` tokens: ``E[L | L > age]``.

        Args:
            bounds: of their outputs; ``NEVER`` for none.
        """
        ages = np.broadcast_to(np.asarray(ages, float), len(nodes))
        found = ages + 0.5 + _rest(TOKENS, self._tokens, self._token_area, nodes, ages, None)
        if bounds is not None and (bounds < NEVER).any():
            at = np.flatnonzero(bounds < NEVER)
            most, node, age = bounds[at].astype(float), nodes[at], ages[at]
            if self._has_shares:
                used = np.minimum(age / most, 1 - 1e-9)
                rest = most * _rest(SHARES, self._shares, self._share_area, node, used, None)
            elif self._has_tokens:
                rest = _rest(TOKENS, self._tokens, self._token_area, node, age, most)
            else:
                rest = most
            found[at] = np.minimum(age + 0.5 + rest, most)
        return np.asarray(np.maximum(found, 1.0))

    def quantile(self, nodes: Ints, ages: Any = 0, bounds: Ints | None = None) -> Floats:
        """(n,) tokens that ``RESERVED`` of requests of these ages do not exceed, rounded up."""
        ages = np.broadcast_to(np.asarray(ages, float), len(nodes))
        found = _beyond(TOKENS, self._tokens, nodes, ages)
        if bounds is not None and (bounds < NEVER).any():
            at = np.flatnonzero(bounds < NEVER)
            most = bounds[at].astype(float)
            if self._has_shares:
                found[at] = most * _beyond(SHARES, self._shares, nodes[at], ages[at] / most)
            elif not self._has_tokens:
                found[at] = most
            found[at] = np.minimum(found[at], most)
        return np.asarray(np.maximum(np.ceil(found), ages + 1))


def _guess(ended: Floats, censored: Floats) -> Floats:
    """(bins,) hazards that are assumed beyond what has been seen: the rate of the ends before that.

    With none an output that has come so far is expected to become twice as long, and somewhat.
    """
    widths = np.diff(TOKENS)
    at_risk = np.cumsum((ended + censored)[::-1])[::-1]
    found, ends, tokens = [], 0.0, 0.0
    for edge, width, died, risk, out in zip(
        TOKENS[:-1], widths, ended, at_risk, censored, strict=True
    ):
        rate = (ends + 1) / (tokens + (edge + FIRST_GUESS) / 2)
        found.append(1 - np.exp(-rate * width))
        ends = FADING * ends + died
        tokens = FADING * tokens + width * (risk - (died + out) / 2)
    return np.asarray(found)


def _survival(ended: Floats, censored: Floats, parents: Seq[int], prior: Floats) -> Floats:
    """(nodes, bins + 1) share of the requests that get beyond each edge.

    The life-table form of Kaplan and Meier: what is censored in a bin is at risk in half of it. The
    requests that each node is taken to have had end as its own do, or long ones of the node above
    would be expected of every node.
    """
    at_risk = _at_risk(ended, censored)
    after = np.cumprod(1 - ended / np.maximum(at_risk, ended + 1e-9), axis=1)
    before = np.concatenate([np.ones((len(after), 1)), after[:, :-1]], axis=1)
    weight = AS_PARENT * (after + (before - after) / (1 + at_risk[:, :1])) + 1e-6
    hazards = np.empty_like(at_risk)
    hazards[0] = (ended[0] + weight[0] * prior) / (at_risk[0] + weight[0])
    for node in range(1, len(hazards)):
        above = hazards[parents[node]]
        hazards[node] = (ended[node] + weight[node] * above) / (at_risk[node] + weight[node])
    hazards[:, -1] = 1.0
    alive = np.cumprod(1 - np.clip(hazards, 0, 1), axis=1)
    return np.concatenate([np.ones((len(hazards), 1)), alive], axis=1)


def _at_risk(ended: Floats, censored: Floats) -> Floats:
    """(nodes, bins) requests that come to each bin; of those censored there half."""
    return np.asarray(np.cumsum((ended + censored)[:, ::-1], axis=1)[:, ::-1] - censored / 2)


def _areas(edges: Floats, alive: Floats) -> Floats:
    """(nodes, bins + 1) area under each curve from each edge to the end."""
    areas = np.diff(edges) * (alive[:, 1:] + alive[:, :-1]) / 2
    sums = np.cumsum(areas[:, ::-1], axis=1)[:, ::-1]
    return np.concatenate([sums, np.zeros((len(alive), 1))], axis=1)


def _at(edges: Floats, alive: Floats, nodes: Ints, x: Floats) -> tuple[Ints, Floats]:
    """The bin of each x, and the share alive there."""
    place = np.clip(np.searchsorted(edges, x, side="right") - 1, 0, len(edges) - 2)
    part = (x - edges[place]) / (edges[place + 1] - edges[place])
    here = alive[nodes, place]
    return place, here + np.clip(part, 0, 1) * (alive[nodes, place + 1] - here)


def _rest(
    edges: Floats, alive: Floats, areas: Floats, nodes: Ints, ages: Floats, most: Floats | None
) -> Floats:
    """(n,) what is still to come at each age, on average; up to ``most`` if that is given."""

    def area(x: Floats) -> tuple[Floats, Floats]:
        place, height = _at(edges, alive, nodes, x)
        after = alive[nodes, place + 1]
        within = np.maximum(edges[place + 1] - x, 0) * (height + after) / 2
        return areas[nodes, place + 1] + within, height

    whole, height = area(ages)
    if most is not None:
        whole = whole - area(np.maximum(most, ages))[0]
    return np.asarray(np.where(height > 1e-12, whole / np.maximum(height, 1e-12), 0.0))


def _beyond(edges: Floats, alive: Floats, nodes: Ints, ages: Floats) -> Floats:
    """(n,) the edge beyond which few enough of those that reach each age get."""
    found = np.empty(len(nodes))
    same: dict[tuple[int, float], float] = {}
    heights = _at(edges, alive, nodes, ages)[1]
    for place, key in enumerate(zip(nodes.tolist(), ages.tolist(), strict=True)):
        if key not in same:
            few = alive[key[0]] <= (1 - RESERVED) * heights[place] + 1e-12
            same[key] = float(edges[int(np.argmax(few))])
        found[place] = same[key]
    return found


def estimate_outputs(
    prompts: Seq[Any], known: Mapping[int, float], longest: Seq[int | None] | None = None
) -> Floats:
    """(n,) expected output tokens of requests, of which some have ended; theirs are known.

    Args:
        known: output tokens by number of the prompt.
        longest: bound of each output; None for none.
    """
    table = LengthTable()
    nodes = table.places(prompts)
    bounds = as_bounds(longest, len(prompts))
    for number, output in known.items():
        table.add(int(nodes[number]), output, int(bounds[number]))
    found = LengthCurves(table.snapshot()).expected(nodes, 0, bounds)
    found[list(known)] = np.maximum(list(known.values()), 1.0)
    return found


def as_bounds(longest: Seq[int | None] | None, count: int) -> Ints:
    """(n,) bounds of outputs; ``NEVER`` for none."""
    if longest is None:
        return np.full(count, NEVER, np.int64)
    return np.asarray([NEVER if bound is None else bound for bound in longest], np.int64)
