"""Open jobs: from the bytes of a body to updates of the engine, and their end in every case."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

from weft.api import (
    ApiLimits,
    Builder,
    Job,
    ModelCard,
    TokenTexts,
)
from weft.core.errors import ParameterError, WeftError
from weft.core.plan import Update
from weft.core.ports import EngineClient
from weft.core.types import FinishReason
from weft.server.bridge import Bridge, Mailbox
from weft.server.metrics import JobTimer, Metrics
from weft.server.options import ServerOptions
from weft.server.probe import EngineProbe
from weft.text import ChatTemplate, Tokenizer

INLINE_BYTES = 16 * 1024  # bodies up to here are tokenised on the event loop: some 100 us

Result = TypeVar("Result")
Prepared = TypeVar("Prepared")


class ShuttingDownError(WeftError):
    """The server takes no more requests, or gave up waiting for this one."""

    http_status = 503
    code = "shutting_down"
    retry_after_s = 1


class DisconnectedError(Exception):
    """The client has gone; there is nobody to answer."""


class Service:
    """What all handlers share.

    Attributes:
        draining: no new jobs are taken; open ones go on.
    """

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        card: ModelCard,
        options: ServerOptions,
        probe: EngineProbe,
    ) -> None:
        limits = ApiLimits(options.max_sequences, options.max_prompt_bytes)
        prefixes = ("weft", "vllm") if options.vllm_metrics else ("weft",)
        self.client = client
        self.options = options
        self.probe = probe
        self.builder = Builder(tokenizer, chat_template, card, limits)
        self.texts = TokenTexts(tokenizer)
        self.metrics = Metrics(card.served_names[0], probe, prefixes)
        self.draining = False
        self._open: set[OpenJob] = set()
        self._bridge: Bridge | None = None
        self._pool = ThreadPoolExecutor(options.tokenizer_threads, thread_name_prefix="weft-text")

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return not self.draining and self.probe.ready()

    @property
    def num_open(self) -> int:
        """Jobs that are being answered."""
        return len(self._open)

    async def prepare(self, num_bytes: int, build: Callable[[], Prepared]) -> Prepared:
        """Let ``build`` turn a body of so many bytes into a job.

        Raises a typed error for everything that is wrong with the body.
        """
        if self.draining:
            raise ShuttingDownError("The server is shutting down; try again in a moment.")

        def work() -> Prepared:
            try:
                return build()
            except RecursionError:
                message = "The body of the request is nested too deeply."
                raise ParameterError(message) from None

        return await self.compute(num_bytes, work)

    async def compute(self, num_bytes: int, work: Callable[[], Result]) -> Result:
        """Call ``work``, which handles so many bytes, beside the event loop if they are many."""
        if num_bytes <= INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def open(self, job: Job) -> OpenJob:
        """Start a job; use the result as a context manager."""
        if self._bridge is None:
            self._bridge = Bridge(asyncio.get_running_loop())
        opened = OpenJob(self, job, Mailbox(self._bridge))
        self._open.add(opened)
        return opened

    def forget(self, job: OpenJob) -> None:
        """Called by a job that has been closed."""
        self._open.discard(job)

    def abort_all(self, error: WeftError) -> None:
        """End every open job with an error."""
        for job in list(self._open):
            job.interrupt(error)

    def close(self) -> None:
        """Let the threads go."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class OpenJob:
    """A job that the engine works on. Leaving its context frees whatever is still computed."""

    def __init__(self, service: Service, job: Job, mailbox: Mailbox) -> None:
        self.job = job
        self._service = service
        self._mailbox = mailbox
        self._open_ids = {request.id for request in job.requests}
        self._timer: JobTimer | None = None  # from when the engine has taken the sequences

    def submit(self) -> None:
        """Hand the sequences to the engine. Raises its typed error if it cannot take them."""
        job, metrics = self.job, self._service.metrics
        with metrics.counting_refusals():
            self._service.client.submit(job.requests, self._mailbox.sink)
        self._timer = JobTimer(metrics, len(job.requests), job.prompt_tokens)

    async def take(self) -> list[Update]:
        """Wait for updates. Raises DisconnectedError, or what ended the job from outside."""
        updates = await self._mailbox.take()
        if self._timer is not None:
            self._open_ids.difference_update(self._timer.saw(updates))
        return updates

    def stop(self, sequence_ids: Iterable[int]) -> None:
        """Tell the engine that a stop string has ended these."""
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
        if self._timer is not None:
            self._timer.close(len(self._open_ids))
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
