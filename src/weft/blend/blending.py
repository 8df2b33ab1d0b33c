"""BlendServe's order; see the docstring of the package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from weft.blend.density import Bools, Floats, Ints, Rates
from weft.blend.dual_scan import LEFT, RIGHT, DualScan, Live
from weft.blend.forecasting import ForecastOrder
from weft.blend.jobs import Jobs, Room
from weft.blend.lengths import NEVER, TOLD, LengthCurves, LengthTable, Snapshot
from weft.blend.sort import sort_tree

SAMPLED = 0.01  # share of the requests that run first (BlendServe section 5.4)
FEWEST = 16  # requests of a small set that run first: one of 100 would say nothing of the others
ENOUGH = round(1 / TOLD)  # ends of a node, or starts, of which one will tell soon
KV_ERROR = 0.05  # of the output that is expected, from which on the rest is sorted again


def choose_samples(count: int, share: float = SAMPLED, seed: int = 0) -> Ints:
    """Numbers of the prompts to run first, in rising order: a random share of them."""
    wanted = min(count, max(FEWEST, round(count * share)))
    chosen = np.random.default_rng(seed).choice(count, wanted, replace=False)
    return np.sort(chosen).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Blending:
    """What waits, put in order by what is known of lengths.

    Attributes:
        outputs: (n,) expected output of each leaf.
        unknown: (n,) leaves of whose kind too little is known to start them.
        scan: None if the order before it still holds, or nothing but samples is left.
        same: the order before it still holds.
        samples: leaves to run as further samples.
        lacks: ends until enough is known, by node.
    """

    curves: LengthCurves
    outputs: Floats
    unknown: Bools
    scan: DualScan | None = None
    same: bool = False
    samples: list[int] = field(default_factory=list)
    lacks: dict[int, int] = field(default_factory=dict)


class BlendOrder(ForecastOrder[Blending]):
    """Compute-heavy and memory-heavy requests side by side, prefixes kept together.

    Samples go first, unless the table knows their kind. As lengths become known, what waits is
    sorted again: when enough is known of a kind that waited for that, and when the expected output
    has changed by more than ``KV_ERROR``. What is like requests of which hardly any has ended
    waits, unless there is room for it at its longest. Of a kind with few samples some more run,
    which tell sooner.
    """

    def __init__(
        self,
        jobs: Jobs,
        room: Room,
        rates: Rates,
        table: LengthTable,
        seed: int = 0,
        scope: bytes = b"",
    ) -> None:
        super().__init__(jobs, room, table, scope)
        self._rates = rates
        sampled = set(choose_samples(len(jobs.prompts), seed=seed).tolist())
        # Of what was open when an earlier run was cut short the short ones are done: only a sample
        # that does not depend on that, all of whose requests end, tells about the others.
        for number in sorted(sampled.intersection(jobs.done)):
            leaf = self._leaf[number]
            self._table.add(int(self._nodes[leaf]), jobs.done[number], int(self._longest[leaf]))
        known = table.snapshot(running=False)
        self._curves = LengthCurves(known)
        ends = known.told()[2]
        order = reversed(self._leaf[self.tree.depth_first()].tolist())  # taken from its end
        self._samples: list[int] = [
            leaf
            for leaf in order
            if self._numbers[leaf] in sampled
            and self._waiting[leaf]
            and ends[self._nodes[leaf]] < ENOUGH
        ]
        self._more = len(self._samples)  # samples that may be added: as many again
        self._lacks: dict[int, int] = {}
        self._plan: Blending | None = None
        self.scan: DualScan | None = None

    def due(self) -> bool:
        nothing_else = self.scan is None and not self._samples
        return super().due() or (nothing_else and not len(self.forecast))

    def _pick(self) -> int | None:
        leaf = self._next_sample()
        if leaf is None and self.scan is not None:
            leaf = self.scan.take()
        return leaf

    def _next_sample(self) -> int | None:
        """The next sample, while half of the memory is free, as its length is unknown."""
        while self._samples and not self._waiting[self._samples[-1]]:
            self._samples.pop()
        full = self.forecast.held() > self.forecast.capacity / 2
        if not self._samples or (full and len(self.forecast)):
            return None
        assert self._curves is not None
        leaf = self._samples.pop()
        at = [leaf]
        expected = int(self._curves.expected(self._nodes[at], 0, self._longest[at])[0])
        self.forecast.admit(leaf, expected)
        if self.scan is not None:
            self.scan.adopt(leaf, self._place(leaf, expected))
        return leaf

    def _on_end(self, leaf: int, output: int) -> None:
        if self.scan is not None:
            self.scan.ended(leaf, output)
        node = int(self._nodes[leaf])
        while node >= 0:
            if node in self._lacks:
                self._lacks[node] -= 1
                if self._lacks[node] == 0:
                    self._look_at = 0, 0
            node = self._table.parents[node]

    def _on_longer(self, leaf: int, output: int) -> None:
        if self.scan is not None:
            self.scan.outgrown(leaf, output)

    # -- sorting ------------------------------------------------------------------------------

    def _work(self, known: Snapshot) -> Callable[[], Blending]:
        waiting, before = self._waiting.copy(), self._plan
        waiting[self._samples] = False
        more = 0 if self._samples else self._more

        def work() -> Blending:
            found = self._estimate(known, waiting, more)
            if before is not None and _same(before, found, waiting):
                return Blending(found.curves, before.outputs, before.unknown, same=True)
            waiting[found.samples] = False
            scan = self._sorted(found, waiting) if waiting.any() else None
            return Blending(
                found.curves, found.outputs, found.unknown, scan, False, found.samples, found.lacks
            )

        return work

    def _estimate(self, known: Snapshot, waiting: Bools, more: int) -> Blending:
        """Lengths of what waits, and which samples are still needed."""
        curves = LengthCurves(known)
        told, kind, ends, starts = known.told()
        unknown = ~told[self._nodes]
        outputs = curves.expected(self._nodes, 0, self._longest)
        bounded = unknown & (self._longest < NEVER)
        outputs[bounded] = self._longest[bounded]  # the only thing that is known of them
        kinds = kind[self._nodes]
        lack, samples = np.flatnonzero(waiting & unknown), list[int]()
        nodes, counts = np.unique(kinds[lack], return_counts=True)
        for node in nodes[np.argsort(-counts, kind="stable")].tolist():
            mine = lack[kinds[lack] == node]
            count = min(len(mine), ENOUGH - int(starts[node]), more - len(samples))
            if count > 0:
                samples += mine[np.linspace(0, len(mine) - 1, count).astype(np.int64)].tolist()
        needed = np.ceil(TOLD * np.maximum(starts[nodes], ENOUGH)) - ends[nodes]
        lacks = dict(zip(nodes.tolist(), np.maximum(needed, 1).astype(int).tolist(), strict=True))
        return Blending(curves, outputs, unknown, samples=samples[::-1], lacks=lacks)

    def _sorted(self, found: Blending, present: Bools) -> DualScan:
        outputs, choices = found.outputs, self._choices
        reserves = found.curves.quantile(self._nodes, 0, self._longest).astype(np.int64)
        reserves[found.unknown] = self._longest[found.unknown]
        reserves = np.maximum(reserves, np.ceil(outputs).astype(np.int64))
        order = sort_tree(self.tree, outputs, self._rates, present=present, choices=choices)
        return DualScan(
            self.tree,
            order,
            outputs,
            reserves,
            self._rates,
            self.forecast,
            choices,
            waiting=self._waiting,
        )

    def _use(self, plan: Blending) -> None:
        if plan.same:
            return
        self._plan, self.scan, self._lacks = plan, plan.scan, dict(plan.lacks)
        self._more -= len(plan.samples)
        self._samples = plan.samples + self._samples
        if self.scan is not None:
            for leaf in self.forecast.live():
                self.scan.adopt(leaf, self._place(leaf, self.forecast.expected(leaf)))

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


def _same(before: Blending, found: Blending, waiting: Bools) -> bool:
    """Whether an order made before is as good as one made now."""
    if (before.unknown != found.unknown)[waiting].any():
        return False
    used, now = before.outputs[waiting].sum(), found.outputs[waiting].sum()
    return bool(abs(now - used) <= KV_ERROR * used)
