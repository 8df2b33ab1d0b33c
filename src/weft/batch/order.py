"""The order of a batch's lines: as they come, or planned by ``weft.blend`` from their prompts."""

from __future__ import annotations

from weft.batch.ports import Sink


class InOrder:
    """Lines without a result as they come, a given number at once. Needs no memory for them."""

    def __init__(self, lines: int, sink: Sink, at_once: int) -> None:
        self._waiting = (index for index in range(lines) if not sink.done(index))
        self._room = at_once
        self.remaining = sum(not sink.done(index) for index in range(lines))

    def next(self) -> int | None:
        if not self.remaining or not self._room:
            return None
        self._room -= 1
        self.remaining -= 1
        return next(self._waiting)

    def ended(self, index: int, output: int | None) -> None:  # noqa: ARG002
        self._room += 1
