"""Many batches at once: which of them the next line comes from.

Tokens are shared out fairly among keys, and a key's share goes to the batch that is due first. Each
key has a counter of the tokens that its lines have cost, and the lowest one is served next; one
that comes back starts at the lowest of those that are there, so that nobody saves up ("Fairness in
Serving Large Language Models", OSDI 2024, section 4). Lines that run count as what lines have cost
so far on average.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from weft.batch.demand import Demand
from weft.batch.ports import LineOrder, Result

ONE_LINE = Demand(1)  # of which nothing else is known


class LineRoom(Protocol):
    """Says whether whoever answers has room for another line."""

    def free(self) -> bool:
        """Whether a line may go now."""

    def take(self) -> None:
        """One goes."""


class Share:
    """The order of one batch's lines: its own, whenever it is its turn.

    Attributes:
        wake: called when it may be its turn.
        open: lines that run.
        mean: what one of its lines asks for on average.
    """

    wake: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self, pool: Pool, owner: bytes, due: float, order: LineOrder, mean: Demand
    ) -> None:
        self.owner = owner
        self.due = due
        self.mean = mean
        self.open = 0
        self._pool = pool
        self._order = order

    @property
    def remaining(self) -> int:
        return self._order.remaining

    @property
    def ready(self) -> bool:
        return self._order.ready

    def next(self) -> int | None:
        if not self._pool.has_turn(self):
            return None
        index = self._order.next()
        if index is not None:
            self.open += 1
            self._pool.took()
        return index

    def ended(self, index: int, output: int | None) -> None:
        self._order.ended(index, output)
        self.open -= 1
        self._pool.num_open -= 1
        self._pool.done += self.mean
        self._pool.wake_next()

    def watch(self, result: Result) -> None:
        """Count what a line of this batch has cost."""
        usage = result.usage
        self._pool.charge(self.owner, usage.input_tokens + usage.output_tokens)


class Pool:
    """Hands out turns to batches.

    Args:
        at_once: lines that are open together.
        room: decides, too; `wake_next` has to be called when it may have changed.

    Attributes:
        num_open: lines that are open now.
        done: what all lines together asked for that have ended.
    """

    def __init__(self, at_once: int, room: LineRoom | None = None) -> None:
        self.num_open = 0
        self.done = Demand()
        self._room = room
        self._at_once = at_once
        self._paused = False
        self._shares: dict[Share, None] = {}  # a set that keeps the order
        self._tokens: dict[bytes, int] = {}  # that lines have cost, by key
        self._charged = self._ended = 0
        self._served: set[bytes] = set()  # keys that had lines open, or ready, at the last look

    @property
    def waiting(self) -> bool:
        """Whether there are lines that could be open if there were room."""
        return not self._paused and any(share.remaining for share in self._shares)

    def join(self, owner: bytes, due: float, order: LineOrder, mean: Demand = ONE_LINE) -> Share:
        """Let a batch take part."""
        share = Share(self, owner, due, order, mean)
        self._shares[share] = None
        return share

    def leave(self, share: Share) -> None:
        """A batch has ended, whatever of it was still open. May be called twice."""
        if share in self._shares:
            del self._shares[share]
            self.num_open -= share.open
            self.wake_next()

    def took(self) -> None:
        """A line goes."""
        self.num_open += 1
        if self._room is not None:
            self._room.take()

    def pause(self, paused: bool) -> None:
        """Hand out no turns for a while, or again."""
        if paused != self._paused:
            self._paused = paused
            self.wake_next()

    def charge(self, owner: bytes, tokens: int) -> None:
        """Count tokens of a line that has ended."""
        self._tokens[owner] = self._tokens.get(owner, 0) + tokens
        self._charged += tokens
        self._ended += 1

    def has_turn(self, share: Share) -> bool:
        """Whether a batch may take a line; if it is another's turn, that one is woken."""
        chosen = self._chosen()
        if chosen is not None and chosen is not share:
            chosen.wake()
        return chosen is share

    def wake_next(self) -> None:
        """Let the batch whose turn it is look for a line."""
        chosen = self._chosen()
        if chosen is not None:
            chosen.wake()

    def _chosen(self) -> Share | None:
        if self._paused or self.num_open >= self._at_once:
            return None
        if self._room is not None and not self._room.free():
            return None
        waiting = [share for share in self._shares if share.remaining and share.ready]
        if not waiting:
            return None
        lines: dict[bytes, int] = {}
        for share in self._shares:
            lines[share.owner] = lines.get(share.owner, 0) + share.open
        self._bring_up({share.owner for share in waiting} | {key for key, n in lines.items() if n})
        mean = max(1.0, self._charged / self._ended if self._ended else 1.0)
        return min(
            waiting,
            key=lambda share: (
                self._tokens.get(share.owner, 0) + mean * lines[share.owner],
                share.due,
            ),
        )

    def _bring_up(self, keys: set[bytes]) -> None:
        """Of these keys, which take part now, let those that did not start at the lowest of others.

        Prompts that are still being put in order give a key no turns to catch up with.
        """
        stayed = self._served & keys
        least = min((self._tokens.get(key, 0) for key in stayed), default=0)
        for key in keys - stayed:
            self._tokens[key] = max(self._tokens.get(key, 0), least)
        self._served = keys
