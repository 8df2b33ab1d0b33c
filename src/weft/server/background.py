"""Background responses: run without a connection, stored as they grow, resumed after a death."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import msgspec
import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from weft.api import Job, decode_body
from weft.api.endpoints import EVENT_STREAM
from weft.api.errors import DeadlineExceededError
from weft.api.response_answers import ResponseCancelledError, ResponseWriter
from weft.api.response_body import ResponseBody
from weft.api.response_events import failure
from weft.core.errors import InvariantError, RequestCrashedError, WeftError
from weft.core.plan import Update
from weft.core.types import TokenLogprob
from weft.server.accounts import Bill
from weft.server.errors import ShuttingDownError, log_failure
from weft.server.exchange import EXCHANGE
from weft.server.generation import STREAM_HEADERS
from weft.server.rareline import RareLine
from weft.server.response_store import (
    UNFINISHED,
    ResponseNotFoundError,
    ResponseStore,
    Stored,
    StoreError,
)
from weft.server.run_store import Chunk, Events, Run, RunLostError, RunStore
from weft.server.service import OpenJob, Service

KEEP_EVERY_S = 0.05  # what comes in between is one chunk
FOLLOW_EVERY_S = 0.1
LOOK_EVERY_S = 0.5
LOOK_AT_REST_S = 5.0  # while no process has runs: one may begin some and die at once
RETRY_S = 1.0  # after the engine took nothing more
CANCEL_S = 10.0  # for the keeper of a run to end it
PATIENCE_S = 15.0  # with a store that cannot be read, until a stream ends
STORE_PAUSE_S = 5.0  # after the store could not be written
MAX_ATTEMPTS = 5
_TRY_AGAIN = (429, 503)

logger = logging.getLogger("weft.server")


class _KeptRequest(msgspec.Struct):
    """A request as it is kept: nothing in it depends on the process, or on the time.

    Attributes:
        payer: name of the key whose it is.
    """

    job: Job
    body: bytes
    payer: str = ""


class _Progress(msgspec.Struct):
    """The sources of one chunk: tokens, and the ids of calls that began in it."""

    tokens: list[tuple[int, TokenLogprob | None]]
    call_ids: list[str]


@dataclass(slots=True)
class _Making:
    """A run's writer, and what it has written that is not kept yet.

    Attributes:
        bill: of the request.
        halted: sequences that a stop string has ended already.
        num_kept: events that are kept.
    """

    job: Job
    writer: ResponseWriter
    num_kept: int
    bill: Bill
    halted: list[int] = field(default_factory=list)
    events: bytes = b""
    progress: bytes = b""

    def push(self, updates: Seq[Update]) -> list[int]:
        """Take updates in; return ids that a stop string has ended. Raises as the writer."""
        begun = len(self.writer.call_ids())
        self.events, halted = self.writer.push(updates)
        tokens = [(update.token, update.logprob) for update in updates if update.token is not None]
        self.progress = msgspec.msgpack.encode(_Progress(tokens, self.writer.call_ids()[begun:]))
        return halted

    def chunk(self, last: bytes = b"") -> Chunk:
        """The next chunk to store."""
        return Chunk(
            self.num_kept, self.writer.count - self.num_kept, self.events + last, self.progress
        )

    def kept(self) -> None:
        """The chunk is kept."""
        self.num_kept, self.events, self.progress = self.writer.count, b"", b""


@dataclass(slots=True)
class _Active:
    """A run of this process.

    Attributes:
        begun: whether the store has it.
        stop: why it is to end.
    """

    begun: bool = False
    stop: WeftError | None = None
    opened: OpenJob | None = None
    task: asyncio.Task[None] | None = None

    def end(self, error: WeftError) -> None:
        """End the run with an error; the first one counts."""
        self.stop = self.stop or error
        if self.opened is not None:
            self.opened.interrupt(self.stop)


class Background:
    """Runs background responses, and resumes those whose process has died.

    A run's events and the tokens behind them are kept about twenty times a second. Who takes a run
    up feeds the tokens to a writer of its own, whose events are those that are kept already, and
    lets the engine go on behind them; so the client sees one text, that of an undisturbed run.
    """

    def __init__(self, service: Service, store: ResponseStore, runs: RunStore) -> None:
        self._service = service
        self._store = store
        self._runs = runs
        self._active: dict[str, _Active] = {}
        self._begun = asyncio.Event()  # a run, since the last look
        self._blind = RareLine(
            "Background responses could not be looked after (times since the last such line: %d): "
            "%s"
        )
        self._unkept = RareLine(
            "What came of background responses could not be kept (%d; they are taken up again); "
            "the last was %s: %s"
        )

    async def start(self, job: Job, data: bytes, items: bytes, owner: bytes) -> bytes:
        """Begin a response; return it as it is now. It is kept once this returns.

        Args:
            data: the body that asks for it.
            items: its own input items, as JSON.

        Raises:
            TooManyRunsError: there are too many already.
            WeftError: it cannot be made.
        """
        service = self._service
        await service.check_grammar(job)
        with service.metrics.counting_refusals():
            left_s = service.time_left_s(job)
            if left_s is not None and left_s <= 0:
                raise DeadlineExceededError()
            service.admit(job)
        bill = service.charged(job)
        job = replace(job, requests=service.salted(job.requests), timeout_s=None)
        body = decode_body(ResponseBody, data)
        writer = self._writer(job, body)
        events, response = writer.queued(), orjson.dumps(writer.state("queued"))
        deadline = None if left_s is None else time.time() + left_s
        run = Run(
            job.id, deadline, msgspec.msgpack.encode(_KeptRequest(job, data, bill.payer)), response
        )
        stored = Stored(job.id, owner, body.previous_response_id, items, response)
        active = self._active[run.id] = _Active()
        try:
            chunk = Chunk(0, writer.count, events)
            await self._runs.begin(stored, run, chunk, service.most_in_progress())
        except BaseException:
            del self._active[run.id]
            bill.settle()
            raise
        self._go(active, run, _Making(job, writer, writer.count, bill))
        return response

    async def cancel(self, owner: bytes, response_id: str) -> bytes:
        """End a response that is not complete; return it as it is then.

        Raises:
            ResponseNotFoundError: there is none.
            ParameterError: it is no background response.
        """
        await self._runs.cancel(owner, response_id)
        if (active := self._active.get(response_id)) is not None:
            active.end(_cancelled())
        end = time.monotonic() + CANCEL_S
        while True:
            stored = await self._store.load(owner, response_id)
            done = orjson.loads(stored.response)["status"] not in UNFINISHED
            if done or time.monotonic() > end:
                return stored.response
            await asyncio.sleep(FOLLOW_EVERY_S)

    async def follow(self, owner: bytes, response_id: str, after: int) -> Response:
        """The events of a response after this number: what there is, and then as they come.

        Raises:
            ResponseNotFoundError: there is none.
            StoreError: the store has not been readable for ``PATIENCE_S``.
        """
        reader = _EventReader(self._runs, owner, response_id, after)
        return _Following(self._service, reader, await reader.read())

    async def watch(self) -> None:
        """Resume runs whose process has died, and end those that are due; runs for ever."""
        pause_s = LOOK_EVERY_S
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._begun.wait(), pause_s)
            pause_s = LOOK_EVERY_S
            if self._begun.is_set():
                self._begun.clear()
                continue
            adopting = not self._service.draining
            try:
                look = await self._runs.look(list(self._active), adopting=adopting)
            except Exception as error:  # whatever it is: this goes on for ever
                self._blind.tell(error)
                continue
            if not look.unfinished:
                pause_s = LOOK_AT_REST_S
            for run in look.adopted:
                logger.warning("The background response %s is resumed.", run.id)
                self._go(self._active.setdefault(run.id, _Active()), run)
            for run_id in look.cancelled:
                self._end(run_id, _cancelled())
            for run_id in look.lost:
                self._end(run_id, RunLostError("The response is not made here any more."))

    def _end(self, run_id: str, error: WeftError) -> None:
        active = self._active.get(run_id)
        if active is not None and active.begun:
            active.end(error)

    async def close(self) -> None:
        """Leave what is not complete to others, or to the next start."""
        tasks = [active.task for active in self._active.values() if active.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- one run ------------------------------------------------------------------------------

    def _go(self, active: _Active, run: Run, making: _Making | None = None) -> None:
        active.begun = True
        self._begun.set()
        context = contextvars.copy_context()
        context.run(EXCHANGE.set, None)  # it has nothing to do with the request any more
        work = self._work(active, run, making)
        active.task = asyncio.get_running_loop().create_task(work, context=context)

    async def _work(self, active: _Active, run: Run, making: _Making | None) -> None:
        """Run to the end and store it; leave the run alone if another process has resumed it."""
        try:
            if making is None:
                making = await self._resume(run)
            error = await self._make(active, run, making)
            event, response = making.writer.ended(error)
            await self._runs.finish(run.id, making.chunk(event), response)
        except (RunLostError, ShuttingDownError):
            pass
        except StoreError as error:
            await self._not_kept(run, error)
        except Exception as error:
            await self._give_up(run, error)
        finally:
            del self._active[run.id]
            if making is not None:
                making.bill.settle()

    async def _give_up(self, run: Run, error: Exception) -> None:
        """Store the failure of a run that could not be resumed."""
        log_failure(error)
        known = error if isinstance(error, WeftError) else InvariantError(str(error))
        event, response = failure(run.response, run.num_events, known)
        try:
            await self._runs.finish(run.id, Chunk(run.num_events, 1, event), response)
        except RunLostError:
            pass
        except StoreError as lost:
            await self._not_kept(run, lost)

    async def _not_kept(self, run: Run, error: StoreError) -> None:
        """Log the error and pause the run; it is resumed later."""
        self._unkept.tell(run.id, error.message)
        await asyncio.sleep(STORE_PAUSE_S)

    async def _resume(self, run: Run) -> _Making:
        """Build the writer of a run from the events that its last process stored.

        Raises:
            RequestCrashedError: it was resumed too often without progress.
            WeftError: no process can resume it.
        """
        if not run.served_here:
            raise WeftError("No server has the model of this response any more.")
        if run.attempts > MAX_ATTEMPTS:
            raise RequestCrashedError(
                f"The server has stopped {run.attempts} times while it made this response, which "
                "is therefore not tried again."
            )
        size = sum(map(len, run.progress))
        return await self._service.compute(size, lambda: self._written(run))

    def _written(self, run: Run) -> _Making:
        kept = msgspec.msgpack.decode(run.request, type=_KeptRequest)
        chunks = [msgspec.msgpack.decode(data, type=_Progress) for data in run.progress if data]
        output = tuple(token for chunk in chunks for token, _ in chunk.tokens)
        [request] = kept.job.requests
        [number] = self._service.builder.numbers(1)
        job = replace(kept.job, requests=(replace(request, id=number, output=output),))
        call_ids = [call_id for chunk in chunks for call_id in chunk.call_ids]
        writer = self._writer(job, decode_body(ResponseBody, kept.body), call_ids)
        writer.queued()
        halted: list[int] = []
        for chunk in chunks:
            updates = [Update(number, token, logprob) for token, logprob in chunk.tokens]
            halted += writer.push(updates)[1]
        if writer.count != run.num_events:
            raise InvariantError(
                f"{run.id}: {run.num_events} events are kept, but {writer.count} follow."
            )
        bill = self._service.accounts.resumed(kept.payer)
        return _Making(job, writer, run.num_events, bill, halted)

    def _writer(self, job: Job, body: ResponseBody, call_ids: Seq[str] = ()) -> ResponseWriter:
        service = self._service
        return ResponseWriter(job, body, service.builder.tokenizer, service.texts, call_ids)

    async def _make(self, active: _Active, run: Run, making: _Making) -> WeftError | None:
        """Have the engine compute a run to its end; return the error if one ends it early.

        Raises:
            RunLostError, ShuttingDownError: it is left to another process.
            StoreError: what has come cannot be kept at present.
        """
        try:
            with self._service.open(making.job, making.bill) as opened:
                active.opened = opened
                await self._submit(active, run, opened)
                opened.stop(making.halted)
                await self._write(run, making, opened)
        except (RunLostError, ShuttingDownError, StoreError):
            raise
        except WeftError as error:
            log_failure(error)
            return error
        except Exception as error:
            log_failure(error)
            return InvariantError(str(error))
        return None

    async def _submit(self, active: _Active, run: Run, opened: OpenJob) -> None:
        """Hand a run to the engine, as soon as that takes it.

        Raises:
            DeadlineExceededError: it has not done so in the run's time.
            WeftError: it never will, or the run is to end.
        """
        while True:
            if active.stop is not None:
                raise active.stop
            left_s = run.left_s()
            try:
                return opened.submit_within(left_s)
            except WeftError as error:
                if error.http_status not in _TRY_AGAIN:
                    raise
            await asyncio.sleep(RETRY_S if left_s is None else min(RETRY_S, left_s))

    async def _write(self, run: Run, making: _Making, opened: OpenJob) -> None:
        """Keep what comes, but for the end."""
        waiting = orjson.loads(run.response)["status"] == "queued"
        while True:
            opened.stop(making.push(await opened.take()))
            if making.writer.done:
                return
            begun = orjson.dumps(making.writer.state("in_progress")) if waiting else None
            await self._runs.append(run.id, making.chunk(), begun)
            waiting = False
            making.kept()
            await asyncio.sleep(KEEP_EVERY_S)


def _cancelled() -> ResponseCancelledError:
    return ResponseCancelledError("The response was cancelled.")


class _EventReader:
    """Reads the events of a response one after the other."""

    def __init__(self, runs: RunStore, owner: bytes, response_id: str, after: int) -> None:
        self._runs = runs
        self._owner = owner
        self._id = response_id
        self._after = after

    async def read(self) -> Events:
        """Return the events after the last read. Raises as `Background.follow`."""
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                found = await self._runs.events(self._owner, self._id, self._after)
            except StoreError:
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(FOLLOW_EVERY_S)
            else:
                self._after = found.last
                return found


class _Following(Response):
    """Sends the events of a background response until it is complete, or the client has gone.

    Args:
        first: the first ones, read already.
    """

    def __init__(self, service: Service, reader: _EventReader, first: Events) -> None:
        super().__init__()
        self._service = service
        self._reader = reader
        self._first = first

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        given = {"content-type": EVENT_STREAM, **STREAM_HEADERS}
        headers = [(name.encode(), value.encode()) for name, value in given.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        sending = asyncio.create_task(self._send(send))
        leaving = asyncio.create_task(_left(receive))
        try:
            with self._service.answering():
                await asyncio.wait([sending, leaving], return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            sending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sending

    async def _send(self, send: Send) -> None:
        found = self._first
        # It ends where the response was deleted, or its store fails: the client may ask again.
        with contextlib.suppress(ResponseNotFoundError, StoreError):
            while True:
                if found.events:
                    body = {"type": "http.response.body", "body": found.events, "more_body": True}
                    await send(body)
                if found.complete:
                    break
                if not found.events:
                    await asyncio.sleep(FOLLOW_EVERY_S)
                found = await self._reader.read()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _left(receive: Receive) -> None:
    """Wait until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
