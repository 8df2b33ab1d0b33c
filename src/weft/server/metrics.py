"""Prometheus metrics, with the names that dashboards of LLM servers use.

The hot path adds to plain numbers; ``metric_families`` makes families of them at each scrape.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq

from weft.core.errors import WeftError
from weft.core.types import DEFAULT_CLASSES, ServiceClass
from weft.server.attainment import Attainment
from weft.server.counts import Board, Counts, Use
from weft.server.probe import EngineProbe

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

NO_TARGETS = ServiceClass("", 0)


class Metrics(Counts):
    """Counts of one request plane, and their page for Prometheus, with those of all others."""

    def __init__(
        self,
        model: str,
        probe: EngineProbe,
        prefixes: Seq[str] = ("weft",),
        classes: Seq[ServiceClass] = DEFAULT_CLASSES,
    ) -> None:
        super().__init__()
        self.model = model
        self.classes = {row.name: (place, row) for place, row in enumerate(classes)}
        self.probe = probe
        self.prefixes = tuple(prefixes)
        self._board: Board | None = None
        self.attainment = Attainment()
        self._touched: set[str] = set()  # names in the usage

    def share(self, board: Board) -> None:
        """Continue a predecessor's counts, and share them with the other planes from now on."""
        self._board = board
        self.add(board.read_own(), gauges=False)

    def follow_targets(self) -> None:
        """Take over the targets that the engine keeps now, which it may have derived meanwhile."""
        for row in self.probe.classes():
            if row.name in self.classes:
                self.classes[row.name] = self.classes[row.name][0], row

    def show(self) -> None:
        """Let the others see these counts; called twice a second, at rest less often."""
        self.follow_targets()
        if self._board is not None:
            self._board.write(self)
        if self.attainment.due:
            self.attainment.sample(self.total().observed())

    def total(self) -> Counts:
        """The sum over all request planes; the others are as they have last shown themselves."""
        total = Counts()
        for counts in (self.dump(), *(self._board.read_others() if self._board else ())):
            total.add(counts)
        return total

    def place_of(self, service_class: str) -> str:
        """The place of a class in the table, in words; that of the first for an unknown one."""
        return str(self.classes.get(service_class, (0, NO_TARGETS))[0])

    def use(self, key: str, service_class: str, more: Use) -> None:
        """Count what a key has used of a class."""
        name = f"{self.place_of(service_class)} {key}"
        self.add_use(name, more)
        self._touched.add(name)

    def uses(self) -> dict[tuple[str, str], Use]:
        """What keys have used at this request plane, by key and class."""
        return self.by_name(self.usage)

    def fresh_uses(self) -> dict[tuple[str, str], Use]:
        """Of the same, what has changed since the last call."""
        touched, self._touched = self._touched, set()
        return self.by_name({name: self.usage[name] for name in sorted(touched)})

    def by_name(self, usage: Mapping[str, Use]) -> dict[tuple[str, str], Use]:
        names = list(self.classes)
        parted = ((name.split(" ", 1), use) for name, use in usage.items())
        return {(key, names[int(place)]): use for (place, key), use in parted}

    def render(self, *, by_key: bool = True) -> bytes:
        """The page for Prometheus.

        Args:
            by_key: with what each key has used.
        """
        from weft.server.metric_families import render  # no start waits for it

        return render([self], by_key=by_key)

    @contextlib.contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Count a typed error that ends the block as a request that was never begun."""
        try:
            yield
        except WeftError as error:
            self.rejected[error.code] += 1
            raise

    def judge(self, service_class: str, ttft_s: float, tpot_s: float) -> None:
        """Count which targets of its class a sequence has kept; seconds are infinite if it failed.

        Args:
            tpot_s: mean time of each token after the first; 0 where there is but one.
        """
        place, row = self.classes.get(service_class, (0, NO_TARGETS))
        judged = [
            (name, took <= target)
            for name, took, target in (("ttft", ttft_s, row.ttft_s), ("tpot", tpot_s, row.tpot_s))
            if target is not None
        ]
        if judged:
            judged.append(("all", all(kept for _, kept in judged)))
        for name, kept in judged:
            self.targets[target_key(place, name, kept)] += 1


def target_key(place: int, target: str, kept: bool) -> str:
    """The key of ``Counts.targets`` for sequences that kept, or missed, a target of a class."""
    return f"{place} {target} {'kept' if kept else 'missed'}"
