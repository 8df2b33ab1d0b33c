"""One batch from its validation to its files of results, whatever ends the process meanwhile.

The journal says which lines are done: two files under the ids that the results will have. Who
answers the lines holds a lock on the first. The batch ends in one transaction, after its bytes are
on the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

import orjson

from weft.api.errors import error_object
from weft.batch import points
from weft.batch.database import reachable
from weft.batch.engine import EngineAsker
from weft.batch.forecast import LATEST_S, EndForecast
from weft.batch.intake import QueuedTokensError, begin_batch
from weft.batch.journal import Journal, ResultsError, open_to_append, sync_folder
from weft.batch.lines import InputChangedError, InputFile
from weft.batch.orders import LearningOrder, ServedOrders
from weft.batch.pool import Pool, Share
from weft.batch.ports import NobodyAnswersError, Result
from weft.batch.promotion import BATCH_CLASS, next_class
from weft.batch.records import UNFINISHED, BatchRecord
from weft.batch.runner import Runner
from weft.batch.store import BatchStore
from weft.batch.validate import describe, examine
from weft.core.errors import ConfigError, ParameterError, WeftError
from weft.core.salt import key_salt
from weft.core.types import Request

RETRY_S = 2.0  # after a full disk, or an engine that is gone
PUT_AT_ONCE = 256  # lines that end without an answer, between looks at anything else

logger = logging.getLogger("weft.batch")

Returned = TypeVar("Returned")
Reason = Literal["cancelled", "expired"]
UNANSWERED: dict[Reason, str] = {
    "cancelled": "This request was not answered because the batch was cancelled.",
    "expired": "This request was not answered before the completion window was over.",
}


@dataclass(frozen=True, slots=True)
class Desk:
    """What all sessions of a process share.

    Attributes:
        thread: the one on which the store is used.
        make_asker: makes who answers lines, from what marks their sequences and the name of the
            key that they are counted for.
        orders: makes the order of each batch's lines.
        salted: each key has prefixes of its own in the cache.
        promotion: the highest class that late batches go on in; "none" for the one they began in.
    """

    store: BatchStore
    thread: Executor
    pool: Pool
    make_asker: Callable[[Callable[[Request], Request], str], EngineAsker]
    orders: ServedOrders
    max_lines: int
    salted: bool
    promotion: str

    async def call(self, work: Callable[[BatchStore], Returned]) -> Returned:
        """Let the thread do some work on the store. Raises as `reachable`."""

        def run() -> Returned:
            with reachable():
                return work(self.store)

        return await asyncio.get_running_loop().run_in_executor(self.thread, run)


class ElsewhereError(WeftError):
    """Another process answers the batch."""


class BatchFailedError(WeftError):
    """The batch cannot be answered at all.

    Attributes:
        errors: entries of the batch's list.
    """

    def __init__(self, errors: list[dict[str, Any]]) -> None:
        super().__init__("The batch has failed.")
        self.errors = errors


class Session:
    """One batch.

    Attributes:
        service_class: in which its lines are asked from now on.
    """

    def __init__(self, record: BatchRecord, desk: Desk) -> None:
        self.record = record
        self.service_class = record.service_class
        self._desk = desk
        self._due = record.expires_at
        self._journal: Journal | None = None
        self._shown: dict[str, Any] = {}
        self._forecast = EndForecast()
        self._predicted_at: int | None = None
        self._predicted_from: str | None = None
        self._promotions: list[dict[str, Any]] = orjson.loads(record.promotions)
        self._share: Share | None = None
        self._over: Reason | None = None
        self._ending = asyncio.Event()

    def see(self, record: BatchRecord) -> None:
        """Take note of the record as it is now."""
        self._due = record.expires_at
        reason = over_because(record)
        if reason is not None:
            self.end(reason)

    def end(self, reason: Reason) -> None:
        """Answer no more lines; those without an answer become errors."""
        if self._over is None:
            self._over = reason
            self._ending.set()

    def progress(self, by_rates: Callable[[BatchRecord], float | None]) -> dict[str, Any]:
        """Columns of the record that have changed since the last call.

        Args:
            by_rates: predicts the end of a batch by the rates of earlier ones.
        """
        if self._journal is None:
            return {}
        self._predict(self._journal, by_rates)
        columns = {
            **counts_of(self._journal),
            "service_class": self.service_class,
            "promotions": orjson.dumps(self._promotions),
            "predicted_at": self._predicted_at,
            "predicted_from": self._predicted_from,
        }
        changed = {name: n for name, n in columns.items() if self._shown.get(name) != n}
        self._shown = columns
        return changed

    def _predict(self, journal: Journal, by_rates: Callable[[BatchRecord], float | None]) -> None:
        """Predict the end, and go on in a better class if that comes after the window."""
        done, now = journal.answered + journal.refused, time.monotonic()
        asked = 0 if self._share is None else self._share.open
        left_s: float | None = None
        if asked:
            end = self._forecast.look(now, done, self.record.total, asked)
            left_s = None if end is None else min(end - now, LATEST_S)
        else:  # it waits for its turn, which says nothing of how fast it will be
            self._forecast = EndForecast()
        source = "progress"
        if left_s is None or self._forecast.stalled:
            at = by_rates(replace(self.record, **counts_of(journal)))
            by_rates_s = None if at is None else at - time.time()
            still_s = self._forecast.still_s
            # Rates may say better until nothing has ended for as long as they give the whole rest.
            if left_s is None or (by_rates_s is not None and still_s < by_rates_s < left_s):
                left_s, source = by_rates_s, "rates"
        self._predicted_at = None if left_s is None else int(time.time() + left_s)
        self._predicted_from = None if left_s is None else source
        late = left_s is not None and time.time() + left_s > self._due
        # Rates of others may lead to the first step; how fast that is has to be seen.
        telling = source == "progress" or self.service_class == BATCH_CLASS
        if late and telling and asked:
            self._promote(done)

    def _promote(self, done: int) -> None:
        """Go on in the next class, if there is one, and see how fast that is."""
        better = next_class(
            self.service_class, self._desk.promotion, self.record.promotable.split()
        )
        if better is None:
            return
        self.service_class = better
        self._forecast = EndForecast()
        step = {
            "service_class": better,
            "at": int(time.time()),
            "predicted_end_at": self._predicted_at,
        }
        self._promotions.append(step)
        logger.warning(
            "Batch %s would miss its window of %s: %d of %d lines are done. The rest is asked "
            "as '%s'.",
            *(self.record.id, self.record.window, done, self.record.total, better),
        )

    async def run(self) -> None:
        """Bring the batch to its end.

        Raises:
            ElsewhereError: another process does.
            WeftError: it cannot go on at present.
        """
        lock = self._lock()
        try:
            self.record = await self._desk.call(lambda store: store.reload(self.record.id))
            if self.record.status in UNFINISHED:
                await self._bring_to_end()
        except BatchFailedError as error:
            await self._finish("failed", errors=orjson.dumps(error.errors))
        finally:
            if self._journal is not None:
                self._journal.close()
            os.close(lock)

    def _lock(self) -> int:
        """Hold the batch, until the descriptor is closed."""
        path = self._desk.store.files_folder.path(self.record.output_name)
        fd = open_to_append(path, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise ElsewhereError("Another process answers this batch.") from None
        return fd

    async def _bring_to_end(self) -> None:
        self.see(self.record)
        untouched = self.record.in_progress_at is None and not self.record.of_messages
        if self.record.status == "cancelling" and untouched:
            await self._finish("cancelled")  # none of its lines was ever looked at
            return
        source = await self._open_input()
        with contextlib.closing(source):
            if self.record.status == "validating" and not await self._validate(source):
                await self._bring_to_end()  # it was cancelled meanwhile
                return
            journal = self._journal = await asyncio.to_thread(self._recover, source)
            await self._answer(source, journal)
            over = self._over
            if over is not None and not _all_done(journal, source):
                await self._refuse_rest(source, journal, over)
            elif over == "expired" and self.record.ending is None:
                over = None  # the last line came in time
            await self._complete(journal, over)

    async def _open_input(self) -> InputFile:
        path = self._desk.store.files_folder.path(self.record.input_file_id)
        try:
            return await asyncio.to_thread(InputFile, path, self._desk.max_lines)
        except ConfigError:
            if path.exists():
                raise  # it cannot be read at present
            error = ParameterError("The input file is not there any more.", param="input_file_id")
            raise BatchFailedError([describe(error, code="file_not_found")]) from None
        except ParameterError as error:
            raise BatchFailedError([describe(error)]) from None

    async def _validate(self, source: InputFile) -> bool:
        """Whether the batch is in progress now. Raises BatchFailedError for a wrong input."""
        demand = self.record.demand
        if not self.record.of_messages:
            errors, demand = await asyncio.to_thread(
                examine, source, self.record.endpoint, lambda: self._over == "cancelled"
            )
            if errors:
                raise BatchFailedError(errors)
        points.reached("batch validated")
        try:
            begun = await self._desk.call(
                lambda store: begin_batch(store, self.record, len(source), demand)
            )
        except QueuedTokensError as error:
            raise BatchFailedError([describe(error)]) from None
        self.record = await self._desk.call(lambda store: store.reload(self.record.id))
        points.reached("batch started")
        return begun

    def _recover(self, source: InputFile) -> Journal:
        """The journal with what was done before."""
        folder, record = self._desk.store.files_folder, self.record
        output, errors = folder.path(record.output_name), folder.path(record.errors_name)
        os.close(open_to_append(errors, 0o600))
        journal = Journal(output, errors, source, f"{record.id.partition('_')[2]}_")
        for path in (output, errors):
            journal.recover(path)
        sync_folder(output.parent)
        return journal

    async def _answer(self, source: InputFile, journal: Journal) -> None:
        """Have all lines answered, or as many as there is time for."""
        asker = self._desk.make_asker(self._mark, self.record.payer)
        while self._over is None and not _all_done(journal, source):
            waits: WeftError | None = None
            record = self.record
            order = self._desk.orders.make(source, journal, asker, record.endpoint)
            mean = record.demand * (1 / max(1, record.demand_lines))
            share = self._desk.pool.join(record.owner, record.expires_at, order, mean)
            self._share = share
            runner = Runner(source, journal, asker, share, share.watch)
            share.wake = runner.look
            order.wake = self._desk.pool.wake_next
            order.full = partial(_waits, asker)
            asker.progress = partial(self._grown, source, order)
            asker.started = partial(self._started, source, order)
            preparing = asyncio.create_task(order.prepare())
            try:
                await self._until_over(_both(runner.run(), preparing))
            except InputChangedError as error:
                raise BatchFailedError([describe(error)]) from None
            except (ResultsError, NobodyAnswersError) as error:
                if journal.unsure:
                    raise  # another session begins with what is sure
                waits = error
            finally:
                self._share = None
                preparing.cancel()
                await asyncio.wait([preparing])  # no thread reads the input any more
                order.close()
                self._desk.pool.leave(share)  # others may go now
            if waits is not None:
                logger.warning("Batch %s waits: %s", self.record.id, waits.message)
                await self._until_over(asyncio.sleep(RETRY_S))

    def _grown(self, source: InputFile, order: LearningOrder, number: int, tokens: int) -> None:
        """The oldest line that runs has so many tokens; another one may go now."""
        order.progress(source.index(number), tokens)
        self._desk.pool.wake_next()

    def _started(
        self, source: InputFile, order: LearningOrder, number: int, computing: bool
    ) -> None:
        """The engine has got a line, or computes it; if it had to wait, others may go now."""
        order.started(source.index(number), computing)
        if not computing:
            self._desk.pool.wake_next()

    async def _until_over(self, work: Awaitable[None]) -> None:
        """Do some work, unless the batch is to end meanwhile."""
        working = asyncio.ensure_future(work)
        ending = asyncio.create_task(self._ending.wait())
        try:
            await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                await working
        finally:
            for task in (working, ending):
                task.cancel()
            await asyncio.gather(working, ending, return_exceptions=True)

    def _mark(self, request: Request) -> Request:
        salt = request.cache_salt
        if self._desk.salted and self.record.owner:
            salt = key_salt(self.record.owner, salt)
        return replace(request, service_class=self.service_class, cache_salt=salt)

    async def _refuse_rest(self, source: InputFile, journal: Journal, reason: Reason) -> None:
        """Lines without an answer get the reason as their error."""
        await self._desk.call(lambda store: store.update(self.record.id, ending=reason))
        self.record = replace(self.record, ending=reason)
        points.reached("end recorded")
        code = f"batch_{reason}"
        plain = error_object(UNANSWERED[reason], status=400, code=code)["error"]
        rest = [index for index in range(len(source)) if not journal.done(index)]
        for place in range(0, len(rest), PUT_AT_ONCE):
            for index in rest[place : place + PUT_AT_ONCE]:
                error = {**plain, "line": source.number(index)}
                journal.put(index, Result(source.custom_id(index), None, error))
            await asyncio.sleep(0)
        points.reached(f"lines {reason}")

    async def _complete(self, journal: Journal, over: Reason | None) -> None:
        """All lines are done: give the results their rows."""
        if over is None:
            changed = await self._desk.call(
                lambda store: store.update(
                    self.record.id,
                    before=("in_progress", "finalizing"),
                    status="finalizing",
                    finalizing_at=int(time.time()),
                )
            )
            points.reached("batch finalizing")
            over = None if changed else "cancelled"
        await asyncio.to_thread(journal.sync)
        points.reached("results synchronised")
        await self._finish(over or "completed", **counts_of(journal))

    async def _finish(
        self, status: Literal["completed", "cancelled", "expired", "failed"], **columns: Any
    ) -> None:
        await self._desk.call(lambda store: store.finish(self.record, status, **columns))
        logger.info("Batch %s is over: %s.", self.record.id, status)


async def _both(work: Awaitable[None], beside: asyncio.Task[None]) -> None:
    """Do some work; what is done beside it may end, but not fail, before."""
    working = asyncio.ensure_future(work)
    try:
        await asyncio.wait({working, beside}, return_when=asyncio.FIRST_COMPLETED)
        if beside.done():
            await beside
        await working
    finally:
        working.cancel()
        await asyncio.wait([working])


def _waits(asker: EngineAsker) -> bool:
    return asker.waiting > 0


def over_because(record: BatchRecord) -> Reason | None:
    """Why no more lines of a batch are answered; None if they are."""
    if record.status == "cancelling":
        return "cancelled"
    late = record.ending == "expired" or time.time() >= record.expires_at
    return "expired" if late else None


def counts_of(journal: Journal) -> dict[str, Any]:
    """Columns of a record that a journal says."""
    usage = journal.usage
    return {
        "completed": journal.answered,
        "failed": journal.refused,
        "given_up": journal.given_up,
        "input_tokens": usage.input_tokens,
        "output_tokens": usage.output_tokens,
        "cached_tokens": usage.cached_tokens,
        "reasoning_tokens": usage.reasoning_tokens,
    }


def _all_done(journal: Journal, source: InputFile) -> bool:
    return journal.answered + journal.refused == len(source)
