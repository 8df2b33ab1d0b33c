"""Runs a batch: takes lines in an order, asks many at once, and stores the results."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import orjson

from weft.api.errors import describe_error, error_object
from weft.batch.lines import InputChangedError
from weft.batch.ports import (
    Asker,
    BatchLine,
    LineAnswer,
    LineOrder,
    LineSource,
    NobodyAnswersError,
    Result,
    Sink,
    new_request_id,
)
from weft.batch.usage import Usage, usage_of
from weft.core.errors import WeftError
from weft.core.logs import REQUEST_ID

SYNC_S = 1.0  # results of the last second may have to be computed again after a loss of power

logger = logging.getLogger("weft")


class Runner:
    """One run of a batch.

    Args:
        watch: called with every result.

    Attributes:
        open: lines that were taken and have no result yet.
    """

    def __init__(
        self,
        source: LineSource,
        sink: Sink,
        asker: Asker,
        order: LineOrder,
        watch: Callable[[Result], None] = lambda _: None,
    ) -> None:
        self._source = source
        self._sink = sink
        self._asker = asker
        self._order = order
        self._watch = watch
        self._changed = asyncio.Event()
        self._stopping = False
        self.open = 0

    def stop(self) -> None:
        """Take no more lines; those that were taken are still answered."""
        self._stopping = True
        self._changed.set()

    def look(self) -> None:
        """Ask the order again: it may have a line now."""
        self._changed.set()

    async def run(self) -> None:
        """Run until every line has its result, or until those taken before ``stop`` have.

        Raises:
            NobodyAnswersError: the engine or server no longer answers.
            InputChangedError: the input is another one than at the start.
            WeftError: a result cannot be kept.
        """
        try:
            async with asyncio.TaskGroup() as beside:
                syncing = beside.create_task(self._sync())
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._hand_out(group))
                syncing.cancel()
        except BaseExceptionGroup as failures:
            raise _first(failures) from None
        finally:
            self._sink.sync()

    async def _hand_out(self, group: asyncio.TaskGroup) -> None:
        while not self._stopping:
            index = self._order.next()
            if index is not None:
                self.open += 1
                group.create_task(self._one(index))
                await asyncio.sleep(0)  # so that it is asked before the next is read
            elif self._order.remaining:
                self._changed.clear()
                await self._changed.wait()
            else:
                return

    async def _one(self, index: int) -> None:
        """Have one line answered, and store its result."""
        number = self._source.number(index)
        REQUEST_ID.set(f"line {number}")
        line: BatchLine | None = None
        answer: LineAnswer | None = None
        try:
            line = self._source.line(index)
            answer = await self._asker.ask(number, line)
            error = error_of(answer)
        except (NobodyAnswersError, InputChangedError):
            raise
        except Exception as failure:
            answer, error = _refused(failure, asked=line is not None)
        if error is not None:
            error = {**error, "line": number}
        name = self._source.custom_id(index) if line is None else line.custom_id
        usage = usage_of(answer.body) if answer is not None and error is None else Usage()
        result = Result(name, answer, error, usage)
        self._sink.put(index, result)
        self._order.ended(index, usage.output_tokens if error is None else None)
        self._changed.set()
        self.open -= 1
        self._watch(result)

    async def _sync(self) -> None:
        while True:
            await asyncio.sleep(SYNC_S)
            await asyncio.to_thread(self._sink.sync)


def error_of(answer: LineAnswer) -> dict[str, Any] | None:
    """OpenAI's error object of an answer; None if it is no error."""
    if answer.status < 400:
        return None
    said: Any = None
    with contextlib.suppress(ValueError):
        said = orjson.loads(answer.body)
    found = said.get("error") if isinstance(said, dict) else None
    given = found if isinstance(found, dict) else {}
    plain = error_object(f"The server answered {answer.status}.", status=answer.status, code=None)
    return {name: given.get(name, value) for name, value in plain["error"].items()}


def _refused(failure: Exception, asked: bool) -> tuple[LineAnswer | None, dict[str, Any]]:
    """The answer that a server would give for an error, and OpenAI's error object."""
    status, body = describe_error(failure)
    if not isinstance(failure, WeftError):
        logger.error("%s: %s", REQUEST_ID.get(), failure, exc_info=failure)
    error: dict[str, Any] = body["error"]
    return LineAnswer(status, new_request_id(), orjson.dumps(body)) if asked else None, error


def _first(failures: BaseExceptionGroup[Any]) -> BaseException:
    """The first of the exceptions in a group, which may have groups in it."""
    inner = failures.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner
