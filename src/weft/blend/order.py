"""The public interface of the package: selects the prompt to submit next."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np

from weft.blend.blending import BlendOrder
from weft.blend.density import Rates
from weft.blend.forecasting import DepthFirstOrder
from weft.blend.jobs import Jobs as Jobs
from weft.blend.jobs import Room as Room
from weft.blend.lengths import LengthTable
from weft.blend.tree import build_tree
from weft.core.errors import ParameterError

ORDERS = ("blend", "dfs", "fcfs", "random")


class Order(Protocol):
    """Hands out every request exactly once. Deterministic for equal calls."""

    @property
    def remaining(self) -> int:
        """Requests that were not handed out yet."""

    def next(self) -> int | None:
        """The number of the prompt to submit now; None while it is better to wait for an end.

        While nothing runs and something remains, it is never None.
        """

    def started(self, number: int, computing: bool = False) -> None:
        """The engine has got a request, or ``computing`` it, only now: its output begins to grow.

        May be left out where requests are computed as soon as they are handed out.
        """

    def progress(self, number: int, output: int) -> None:
        """A running request has so many output tokens: tells how many steps have passed.

        May be left out, and one request that runs, say the oldest, speaks for all. With it requests
        start evenly over time, and those that outgrow their estimate are seen at once.
        """

    def ended(self, number: int, output: int | None) -> None:
        """A request has ended with so many output tokens; None if it
        failed, so that its length is no sample."""


def make_order(
    kind: str,
    jobs: Jobs,
    room: Room,
    rates: Rates,
    seed: int = 0,
    lengths: LengthTable | None = None,
    scope: bytes = b"",
) -> Order:
    """An order of the requests that are not done.

    Args:
        kind: ``blend``; ``dfs``, which shares most; ``fcfs``, as they came; ``random``. The last
            two leave the room for KV to the engine, and so does ``dfs`` without ``lengths``.
        seed: of the sample of ``blend`` and of ``random``.
        lengths: what is known of output lengths, which several orders may share; ``blend`` begins
            with nothing if there is none.
        scope: of these prompts among those of the table.

    Raises:
        ParameterError: an unknown kind, no prompts, or a prompt without tokens.
    """
    if kind not in ORDERS:
        raise ParameterError(f"Unknown order '{kind}'; known: {', '.join(ORDERS)}.", param="order")
    if kind == "blend":
        return BlendOrder(
            jobs, room, rates, LengthTable() if lengths is None else lengths, seed, scope
        )
    if kind == "dfs" and lengths is not None:
        return DepthFirstOrder(jobs, room, lengths, scope)
    if kind == "dfs":
        numbers = build_tree(jobs.prompts, room.block_size).depth_first().tolist()
    else:
        numbers = list(range(len(jobs.prompts)))
    if kind == "random":
        numbers = np.random.default_rng(seed).permutation(len(numbers)).tolist()
    return ListedOrder([number for number in numbers if number not in jobs.done], room)


class ListedOrder:
    """Requests in a given order, as many at once as may be submitted."""

    def __init__(self, numbers: Seq[int], room: Room) -> None:
        self._numbers = list(numbers)
        self._handed = 0
        self._running: set[int] = set()
        self._most = room.requests

    @property
    def remaining(self) -> int:
        return len(self._numbers) - self._handed

    def next(self) -> int | None:
        if not self.remaining or len(self._running) >= self._most:
            return None
        number = self._numbers[self._handed]
        self._handed += 1
        self._running.add(number)
        return number

    def started(self, number: int, computing: bool = False) -> None:
        """Nothing depends on it."""

    def progress(self, number: int, output: int) -> None:
        """Nothing depends on it."""

    def ended(self, number: int, output: int | None) -> None:  # noqa: ARG002
        self._running.discard(number)
