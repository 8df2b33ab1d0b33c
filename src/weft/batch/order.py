"""The order of a batch's lines: as they come, or planned by ``weft.blend`` from their prompts."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from weft.batch.ports import BatchLine, LineSource, Sink
from weft.blend.density import Rates
from weft.blend.order import Jobs, Room, make_order
from weft.blend.order import Order as BlendOrder
from weft.core.errors import WeftError

PAUSE_EVERY = 64  # lines, after which others may do something


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


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of a line as an order sees it.

    Attributes:
        tokens: of the prompt; any numbers will do that are equal where prompts are.
        longest: bound of each output in tokens; None if there is none.
        choices: outputs that the line has beside each other.
    """

    tokens: NDArray[np.uint32]
    longest: int | None
    choices: int = 1

    def each(self, output: int) -> int:
        """Output tokens of one choice, of which all have so many together."""
        return -(-output // self.choices)


class Planned:
    """Lines in an order of ``weft.blend``, after those that it does not order.

    Args:
        order: of the planned lines, by their place in ``planned``.
        planned: indices in rising order.
        others: indices of lines without a prompt, such as wrong ones.
        choices: outputs that each planned line has beside each other; 1 by default.

    Attributes:
        full: whether a line that was handed out has not reached the engine for want of room; no
            other is handed out until it has.
    """

    full: Callable[[], bool] = staticmethod(lambda: False)

    def __init__(
        self,
        order: BlendOrder,
        planned: Seq[int],
        others: Seq[int],
        at_once: int,
        choices: Seq[int] | None = None,
    ) -> None:
        self._order = order
        self._planned = np.asarray(planned, np.int64)
        self._choices = choices
        self._others = deque(others)
        self._room = at_once

    @property
    def remaining(self) -> int:
        return len(self._others) + self._order.remaining

    def next(self) -> int | None:
        if not self._room or self.full():
            return None
        if self._others:
            index: int | None = self._others.popleft()
        else:
            place = self._order.next()
            index = None if place is None else int(self._planned[place])
        self._room -= index is not None
        return index

    def started(self, index: int) -> None:
        """The engine has got a line that was handed out."""
        place = self._place(index)
        if place is not None:
            self._order.started(place)

    def progress(self, index: int, output: int) -> None:
        """A planned line that runs has so many output tokens in each choice."""
        place = self._place(index)
        if place is not None:
            self._order.progress(place, output)

    def ended(self, index: int, output: int | None) -> None:
        self._room += 1
        place = self._place(index)
        if place is None:
            return
        if output is not None and self._choices is not None:
            output = -(-output // self._choices[place])
        self._order.ended(place, output)

    def _place(self, index: int) -> int | None:
        place = int(np.searchsorted(self._planned, index))
        found = place < len(self._planned) and self._planned[place] == index
        return place if found else None


@dataclass(frozen=True, slots=True)
class Prompts:
    """What is known of all lines that can be planned, by their place.

    Attributes:
        planned: their indices, rising.
        others: indices of lines without a prompt, such as wrong ones, that have no result.
        done: output tokens of a choice of those that have their answer.
    """

    tokens: list[NDArray[np.uint32]]
    longest: list[int | None]
    choices: list[int]
    planned: list[int]
    others: list[int]
    done: dict[int, int]


async def read_prompts(
    source: LineSource,
    sink: Sink,
    outputs: Mapping[int, int],
    prompt_of: Callable[[BatchLine], Prompt | None],
) -> Prompts:
    """Read all prompts. All of them are in memory, 4 bytes a token.

    Args:
        outputs: output tokens by index of lines that have their answer.
        prompt_of: reads a line; None if there is nothing to plan. Raises what is wrong with it.
    """
    found = Prompts([], [], [], [], [], {})
    for index in range(len(source)):
        if index % PAUSE_EVERY == 0:
            await asyncio.sleep(0)
        if sink.done(index) and index not in outputs:
            continue
        try:
            prompt = prompt_of(source.line(index))
        except WeftError:
            prompt = None  # running the line gives the error
        if prompt is None or not len(prompt.tokens):
            found.others.extend([] if sink.done(index) else [index])
            continue
        if sink.done(index):
            found.done[len(found.planned)] = prompt.each(outputs[index])
        found.planned.append(index)
        found.tokens.append(prompt.tokens)
        found.longest.append(prompt.longest)
        found.choices.append(prompt.choices)
    return found


def plan(kind: str, prompts: Prompts, room: Room, rates: Rates) -> Planned:
    """Put lines in order: ``blend`` or ``dfs``."""
    tokens = cast(Seq[Seq[int]], prompts.tokens)
    jobs = Jobs(tokens, prompts.longest, prompts.done, prompts.choices)
    order = make_order(kind if tokens else "fcfs", jobs, room, rates)
    return Planned(order, prompts.planned, prompts.others, room.requests, prompts.choices)
