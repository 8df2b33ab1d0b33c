"""Open jobs: from the bytes of a body to updates of the engine, and cleanup in every case."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import TypeVar

from weft.api import (
    ApiLimits,
    Builder,
    Job,
    ModelCard,
    Notes,
    TokenTexts,
)
from weft.api.classes import CLASS_HEADER
from weft.api.errors import DeadlineExceededError
from weft.api.structured import check_grammar
from weft.core.errors import EngineOutOfMemoryError, ParameterError, WeftError
from weft.core.plan import Update
from weft.core.ports import EngineClient
from weft.core.types import FinishReason, Request
from weft.server.accounts import Accounts, Bill
from weft.server.bridge import Bridge, Mailbox
from weft.server.errors import ShuttingDownError
from weft.server.exchange import EXCHANGE
from weft.server.metrics import Metrics
from weft.server.options import ServerOptions
from weft.server.probe import EngineProbe
from weft.server.queue import QueueLimit, Waiting
from weft.server.quota_board import QuotaBoard
from weft.server.timer import JobTimer
from weft.server.usage_store import UsageStore
from weft.text import ChatTemplate, Tokenizer
from weft.text.detect import choose_dialect

TIMEOUT_HEADER = "X-Request-Timeout"
LEAST_TIMEOUT_S = 0.001  # less is a mistake, and no time to answer anything in
MEMORY_PATIENCE_S = 15.0  # without an engine since memory ran out, until requests are ended
INLINE_BYTES = 16 * 1024  # texts up to here are tokenised on the event loop: some 100 us

Result = TypeVar("Result")
Prepared = TypeVar("Prepared")


class DisconnectedError(Exception):
    """The client has disconnected; no answer can be sent."""


class Service:
    """State that all handlers share.

    Attributes:
        draining: no new jobs are taken; open ones go on.
        usage: keeps what keys use, while the server runs.
    """

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        card: ModelCard,
        options: ServerOptions,
        probe: EngineProbe,
        accounts: Accounts | None = None,
    ) -> None:
        limits = ApiLimits(
            options.max_sequences, options.max_prompt_bytes, options.request_chat_template
        )
        prefixes = ("weft", "vllm") if options.vllm_metrics else ("weft",)
        self.client = client
        self.options = options
        self.probe = probe
        self.accounts = accounts or Accounts(QuotaBoard.alone())
        dialect = choose_dialect(
            chat_template, options.tool_parser, options.reasoning_parser, card.weights.family
        )
        self.builder = Builder(tokenizer, chat_template, card, limits, dialect)
        self.texts = TokenTexts(tokenizer)
        self.metrics = Metrics(card.served_names[0], probe, prefixes, card.classes)
        self.draining = False
        self.usage: UsageStore | None = None
        self._memory_s = time.monotonic()  # when it was last not lacking
        self._queue = QueueLimit(options, probe)
        self._open: dict[OpenJob, None] = {}  # a set that keeps the order
        self._answering = 0
        self._bridge: Bridge | None = None
        self._pool = ThreadPoolExecutor(options.tokenizer_threads, thread_name_prefix="weft-text")
        self._chats = ThreadPoolExecutor(1, thread_name_prefix="weft-chats")

    @property
    def state(self) -> str:
        """The state in ``/ready``; requests are accepted at once in state "ready"."""
        if self.draining:
            return "draining"
        if not self.probe.ready():
            return "out_of_memory" if self.probe.out_of_memory() else "recovering"
        return "stalled" if self.probe.idle_s() > self.options.stalled_s else "ready"

    def look(self) -> None:
        """Keep what is known of other processes up to date.

        Called twice a second, at rest less often.
        """
        self.metrics.show()
        if self.usage is not None:
            self.usage.keep(self.metrics.fresh_uses())
        self.probe.idle_s()
        if not self.probe.out_of_memory():
            self._memory_s = time.monotonic()
        elif self._starved:
            self.abort_all(self._out_of_memory())

    @property
    def _starved(self) -> bool:
        """Whether there has been no engine for too long, for want of memory."""
        return self.probe.out_of_memory() and time.monotonic() - self._memory_s > MEMORY_PATIENCE_S

    def _out_of_memory(self) -> WeftError:
        """The error of requests that no engine computes, for want of memory."""
        if self.probe.killed_for_memory():
            return EngineOutOfMemoryError(
                "The engine was killed because memory ran out, and cannot start again for the same "
                "reason; the server's log says what to lower."
            )
        return EngineOutOfMemoryError(
            "There is too little free memory to start the next engine; the server's log says how "
            "much it needs."
        )

    def notes(self) -> Notes:
        """The collector of ignored parameters of the current request."""
        exchange = EXCHANGE.get()
        notes = Notes() if exchange is None else exchange.notes
        notes.strict = self.options.strict
        return notes

    @property
    def num_open(self) -> int:
        """Jobs that are being computed or answered, and answers without a job of their own."""
        return len(self._open) + self._answering

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Count an answer that needs no job."""
        self._answering += 1
        try:
            yield
        finally:
            self._answering -= 1

    async def prepare(
        self, num_bytes: int | None, build: Callable[[], Prepared], *, renders: bool = True
    ) -> Prepared:
        """Have ``build`` turn a body of so many bytes into a job; see `compute`.

        Raises a typed error for everything that is wrong with the body.
        """
        if self.draining:
            raise ShuttingDownError("The server is shutting down; try again in a moment.")
        if self._starved:
            raise self._out_of_memory()

        notes = self.notes()

        def work() -> Prepared:
            try:
                built = build()
                notes.log()
                return built
            except RecursionError:
                message = "The body of the request is nested too deeply."
                raise ParameterError(message) from None

        return await self.compute(num_bytes, work, renders=renders)

    async def compute(
        self, num_bytes: int | None, work: Callable[[], Result], *, renders: bool = False
    ) -> Result:
        """Call ``work``, which handles so many bytes, beside the event loop if they are many.

        Also where requests bring templates or images of their own, which may take seconds.

        Args:
            num_bytes: None: the work may be long, whatever the length of the body.
            renders: it may ask the renderer of chat templates, for which nothing else must wait.
                Short chats take turns there on a thread of their own, not behind long texts.
        """
        long = self.options.request_chat_template or self.builder.card.images is not None
        if num_bytes is None or num_bytes > INLINE_BYTES or long:
            return await self._aside(work)
        return await self._aside(work, self._chats) if renders else work()

    async def check_grammar(self, job: Job) -> None:
        """Compile what the job's output has to follow, beside the event loop.

        Raises:
            GrammarError: it cannot be compiled.
        """
        grammar = job.requests[0].sampling.grammar
        if grammar is None:
            return

        def check() -> None:
            with self.metrics.counting_refusals():
                check_grammar(job, self.builder)

        if self.builder.grammars.knows(grammar):
            check()
        else:
            await self._aside(check)

    async def _aside(
        self, work: Callable[[], Result], pool: ThreadPoolExecutor | None = None
    ) -> Result:
        run = contextvars.copy_context().run  # so that what is logged bears the request's id
        return await asyncio.get_running_loop().run_in_executor(pool or self._pool, run, work)

    def open(self, job: Job, bill: Bill) -> OpenJob:
        """Start a job; use the result as a context manager.

        Args:
            bill: of the request that it is a part of.
        """
        if self._bridge is None:
            self._bridge = Bridge(asyncio.get_running_loop())
        opened = OpenJob(self, job, Mailbox(self._bridge), bill)
        self._open[opened] = None
        return opened

    def own_builder(self) -> Builder:
        """The builder for the request that is being answered, with what decides its class."""
        exchange = EXCHANGE.get()
        if exchange is None:
            return self.builder
        header, key, rules = exchange.headers.get(CLASS_HEADER), exchange.key, self.builder.classes
        if key is not None:
            rules = replace(rules, allowed=key.classes, default=key.default_class, header=header)
        elif header is not None:
            rules = replace(rules, header=header)
        else:
            return self.builder
        return self.builder.under(rules)

    def charged(self, job: Job) -> Bill:
        """The bill of a job of the request that is being answered, of which all is charged.

        Raises:
            RateLimitError: its key has used up its requests or tokens of this minute.
        """
        exchange = EXCHANGE.get()
        bill = self.accounts.bill(None if exchange is None else exchange.key)
        with self.metrics.counting_refusals():
            try:
                bill.charge(job)
            finally:
                if exchange is not None:
                    name = job.requests[0].service_class
                    exchange.reply += [*bill.headers, (CLASS_HEADER.encode(), name.encode())]
        return bill

    def most_in_progress(self) -> int | None:
        """Requests that the key of the request that is being answered may have in progress."""
        exchange = EXCHANGE.get()
        return self.accounts.most_in_progress(None if exchange is None else exchange.key)

    def forget(self, job: OpenJob) -> None:
        """Called by a job that has been closed."""
        self._open.pop(job, None)

    def salted(self, requests: tuple[Request, ...]) -> tuple[Request, ...]:
        """Sequences under the salt of the key of the request that is being answered."""
        exchange = EXCHANGE.get()
        if exchange is None or exchange.key is None or not self.options.key_salt:
            return requests
        salt = exchange.key.salt(requests[0].cache_salt)
        return tuple(replace(request, cache_salt=salt) for request in requests)

    def admit(self, job: Job) -> None:
        """Raise QueueFullError if too much waits already for another job to wait."""
        tokens = sum(len(request.prompt) for request in job.requests)
        waiting = (w for opened in reversed(self._open) if (w := opened.waiting()) is not None)
        self._queue.admit(len(job.requests), tokens, waiting)

    def time_left_s(self, job: Job) -> float | None:
        """Seconds until the deadline of the request that is being answered; None without one.

        Raises:
            ParameterError: the time that it asks for is malformed, or longer than allowed.
        """
        return time_left_s(self.options, job.timeout_s)

    def abort_all(self, error: WeftError) -> None:
        """End every open job with an error."""
        for job in list(self._open):
            job.interrupt(error)

    def close(self) -> None:
        """Stop the threads."""
        for pool in (self._pool, self._chats):
            pool.shutdown(wait=False, cancel_futures=True)


class OpenJob:
    """A job that the engine works on. Leaving its context frees whatever is still computed."""

    def __init__(self, service: Service, job: Job, mailbox: Mailbox, bill: Bill) -> None:
        self.job = job
        self._bill = bill
        self._service = service
        self._mailbox = mailbox
        self._open_ids = {request.id for request in job.requests}
        self._timer: JobTimer | None = None  # from when the engine has taken the sequences
        self._alarm: asyncio.TimerHandle | None = None
        self._billed = False

    def submit(self) -> None:
        """Hand the sequences to the engine.

        Raises:
            ParameterError: the request's deadline is malformed.
            WeftError: as `submit_within`.
        """
        with self._service.metrics.counting_refusals():
            left_s = self._service.time_left_s(self.job)
        self.submit_within(left_s)

    def submit_within(self, left_s: float | None) -> None:
        """Hand the sequences to the engine, for so many seconds; None for no limit.

        Raises:
            DeadlineExceededError: the time is over already.
            QueueFullError: too much waits already.
            WeftError: the engine cannot take the sequences.
        """
        job, service, bill = self.job, self._service, self._bill
        with service.metrics.counting_refusals():
            if left_s is not None and left_s <= 0:
                raise DeadlineExceededError()
            service.admit(job)
            service.client.submit(service.salted(job.requests), self._mailbox.sink)
        tokens = job.prompt_tokens
        self._timer = JobTimer(
            service.metrics, job.requests, tokens, bill.payer, bill.begin(tokens)
        )
        if left_s is not None:
            loop = asyncio.get_running_loop()
            self._alarm = loop.call_later(left_s, lambda: self.interrupt(DeadlineExceededError()))
        exchange = EXCHANGE.get()
        if exchange is not None:
            exchange.job, exchange.timer = job, self._timer

    def waiting(self) -> Waiting | None:
        """The part of the job that waits for the engine; None if there is none."""
        timer = self._timer
        if timer is None or not timer.unseen:
            return None
        share = timer.unseen / len(self.job.requests)
        tokens = sum(len(request.prompt) for request in self.job.requests)
        return Waiting(timer.start_ns, timer.unseen, int(tokens * share))

    async def take(self) -> list[Update]:
        """Wait for updates. Raises DisconnectedError, or what ended the job from outside."""
        updates = await self._mailbox.take()
        if self._timer is not None:
            self._open_ids.difference_update(self._timer.saw(updates))
        return updates

    def stop(self, sequence_ids: Iterable[int]) -> None:
        """Report to the engine that a stop string has ended these."""
        for sequence_id in sequence_ids:
            self._service.client.cancel(sequence_id, FinishReason.STOP)

    def interrupt(self, error: Exception) -> None:
        """Free everything now, and make ``take`` raise."""
        self._cancel()
        self._mailbox.interrupt(error)

    async def watch(self, receive: Callable[[], Awaitable[object]]) -> None:
        """Interrupt the job when the client goes away; the body must have been read."""
        while True:
            message = await receive()
            if isinstance(message, dict) and message["type"] == "http.disconnect":
                self.interrupt(DisconnectedError())
                return

    def _cancel(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        if self._timer is not None:
            self._timer.close(len(self._open_ids))
            if not self._billed:
                self._billed = True
                self._bill.spend(self.job.prompt_tokens + self._timer.output_tokens)
        for sequence_id in self._open_ids:
            self._service.client.cancel(sequence_id)
        self._open_ids.clear()

    def __enter__(self) -> OpenJob:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._cancel()
        self._service.forget(self)


def time_left_s(options: ServerOptions, asked_s: float | None = None) -> float | None:
    """Seconds until the deadline of the request that is being answered; None without one.

    Args:
        asked_s: what its body asks for, unless a header does.

    Raises:
        ParameterError: the time that it asks for is malformed, or longer than allowed.
    """
    exchange = EXCHANGE.get()
    header = None if exchange is None else exchange.headers.get(TIMEOUT_HEADER)
    if header is not None:
        wanted = _timeout(header, options.max_request_timeout_s, TIMEOUT_HEADER)
    elif asked_s is not None:
        wanted = _timeout(asked_s, options.max_request_timeout_s, "timeout")
    elif options.request_timeout_s is not None:
        wanted = options.request_timeout_s
    else:
        return None
    return wanted if exchange is None else exchange.started + wanted - time.monotonic()


def _timeout(given: str | float, most: float, param: str) -> float:
    """The seconds that a request asks for. Raises ParameterError if they make no sense."""
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not LEAST_TIMEOUT_S <= seconds <= most:
        raise ParameterError(
            f"{param} must be a number of seconds from {LEAST_TIMEOUT_S:g} to {most:g}.",
            param=param,
        )
    return seconds
