"""The order of a batch's lines: as they come, or planned by ``weft.blend`` from their prompts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from weft.batch.ports import BatchLine, LineSource, Sink
from weft.blend.density import Rates
from weft.blend.forecast import Forecast
from weft.blend.forecasting import ForecastOrder
from weft.blend.lengths import LengthTable
from weft.blend.order import Jobs, Room, make_order
from weft.blend.order import Order as BlendOrder
from weft.core.errors import WeftError

logger = logging.getLogger("weft.batch")

PAUSE_EVERY = 64  # lines, after which others may do something


class InOrder:
    """Lines without a result as they come, a given number at once. Needs no memory for them."""

    ready = True
    wake: Callable[[], None] = staticmethod(lambda: None)
    full: Callable[[], bool] = staticmethod(lambda: False)

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

    def started(self, index: int, computing: bool = False) -> None:
        """Nothing depends on it."""

    def progress(self, index: int, output: int) -> None:
        """Nothing depends on it."""

    async def prepare(self) -> None:
        """There is nothing to prepare."""

    def close(self) -> None:
        """It holds nothing."""


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
        planned: their indices.
        others: indices of lines without a prompt, such as wrong ones.
        choices: outputs that each planned line has beside each other; 1 by default.

    Attributes:
        full: whether a line that was handed out has not reached the engine for want of room; no
            other is handed out until it has.
        wake: called when there may be a line though none has ended.
        forecast: of the KV memory, if the order has one.
    """

    ready = True
    full: Callable[[], bool] = staticmethod(lambda: False)
    wake: Callable[[], None] = staticmethod(lambda: None)

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
        self._rising = np.argsort(self._planned)
        self._choices = choices
        self._others = deque(others)
        self._room = at_once
        self._learning = order if isinstance(order, ForecastOrder) else None
        self._thread: Executor | None = None
        self._looking = False
        self._failure: BaseException | None = None
        self.forecast: Forecast | None = None if self._learning is None else self._learning.forecast

    @property
    def now(self) -> int:
        """Steps that have passed, as far as has been heard."""
        return 0 if self.forecast is None else self.forecast.now

    def look_on(self, thread: Executor) -> None:
        """Let a thread work out what lengths mean for the order, and not the event loop."""
        if self._learning is not None:
            self._learning.deferred = True
            self._thread = thread

    @property
    def remaining(self) -> int:
        return len(self._others) + self._order.remaining

    def next(self) -> int | None:
        if not self._room or self.full():
            return None
        self._look()
        if self._others:
            index: int | None = self._others.popleft()
        else:
            place = self._order.next()
            index = None if place is None else int(self._planned[place])
        self._room -= index is not None
        return index

    def started(self, index: int, computing: bool = False) -> None:
        """The engine has got a line that was handed out, or computes it."""
        place = self._place(index)
        if place is not None:
            self._order.started(place, computing)

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

    def close(self) -> None:
        """Hand out nothing more; what runs was given up, and holds no memory."""
        self._room = 0
        self.wake = Planned.wake
        if self._learning is not None:
            self._learning.close()

    def _look(self) -> None:
        """Begin to look at lengths anew, if it is time. Raises what failed when that was done."""
        if self._failure is not None:
            raise self._failure
        learning = self._learning
        if learning is None or self._thread is None or self._looking or not learning.due():
            return
        self._looking, loop = True, asyncio.get_running_loop()
        working = self._thread.submit(learning.work())

        def looked(done: Future[Any]) -> None:
            with contextlib.suppress(RuntimeError):  # there is no loop any more
                loop.call_soon_threadsafe(self._looked, done)

        working.add_done_callback(looked)

    def _looked(self, done: Future[Any]) -> None:
        self._looking, self._failure = False, done.exception()
        if self._learning is not None and self._failure is None:
            self._learning.use(done.result())
        self.wake()

    def _place(self, index: int) -> int | None:
        at = int(np.searchsorted(self._planned, index, sorter=self._rising))
        place = int(self._rising[at]) if at < len(self._rising) else -1
        return place if place >= 0 and self._planned[place] == index else None


@dataclass(frozen=True, slots=True)
class Prompts:
    """What is known of lines that can be planned, by their place.

    Attributes:
        planned: their indices.
        others: indices of lines without a prompt, such as wrong ones, that have no result.
        done: output tokens of a choice of those that have their answer.
    """

    tokens: list[NDArray[np.uint32]] = field(default_factory=list)
    longest: list[int | None] = field(default_factory=list)
    choices: list[int] = field(default_factory=list)
    planned: list[int] = field(default_factory=list)
    others: list[int] = field(default_factory=list)
    done: dict[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.planned) + len(self.others)

    def add(self, index: int, prompt: Prompt | None, output: int | None = None) -> None:
        """Add a line.

        Args:
            output: tokens of its answer, if it has one.
        """
        if prompt is None:
            self.others.extend([index] if output is None else [])
            return
        if output is not None:
            self.done[len(self.planned)] = prompt.each(output)
        self.planned.append(index)
        self.tokens.append(prompt.tokens)
        self.longest.append(prompt.longest)
        self.choices.append(prompt.choices)


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
    found = Prompts()
    for index in range(len(source)):
        if index % PAUSE_EVERY == 0:
            await asyncio.sleep(0)
        output = outputs.get(index) if sink.done(index) else None
        if output is None and sink.done(index):
            continue
        found.add(index, read_prompt(source, index, prompt_of), output)
    return found


def read_prompt(
    source: LineSource, index: int, prompt_of: Callable[[BatchLine], Prompt | None]
) -> Prompt | None:
    """The prompt of a line; None if there is nothing to plan, as in a wrong line."""
    try:
        prompt = prompt_of(source.line(index))
    except WeftError:
        return None  # running the line gives the error
    except Exception:
        logger.exception("Line %d cannot be put in order.", source.number(index))
        return None
    return prompt if prompt is not None and len(prompt.tokens) else None


def plan(
    kind: str,
    prompts: Prompts,
    room: Room,
    rates: Rates,
    lengths: LengthTable | None = None,
    scope: bytes = b"",
) -> Planned:
    """Put lines in order: ``blend``, or ``dfs``, which has no forecast without lengths.

    Args:
        lengths: what is known of them, shared with other orders, and in which scope.
    """
    tokens = cast(Seq[Seq[int]], prompts.tokens)
    jobs = Jobs(tokens, prompts.longest, prompts.done, prompts.choices)
    kind = kind if tokens else "fcfs"
    order = make_order(kind, jobs, room, rates, lengths=lengths, scope=scope)
    return Planned(order, prompts.planned, prompts.others, room.requests, prompts.choices)
