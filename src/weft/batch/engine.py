"""Runs batch lines on an engine at the other end of a ring."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from hashlib import blake2b

import msgspec
import numpy as np
from msgspec import Struct

from weft.api import Builder, Job, TokenTexts
from weft.api.asked import Asked, Whole
from weft.api.endpoints import read_whole
from weft.api.errors import DeadlineExceededError
from weft.api.structured import check_grammar
from weft.batch.demand import POOLED
from weft.batch.order import Prompt
from weft.batch.ports import BatchLine, LineAnswer, NobodyAnswersError, new_request_id
from weft.batch.promotion import BATCH_CLASS
from weft.core.errors import EngineBusyError, EngineDeadError
from weft.core.plan import Update
from weft.core.ports import EngineClient
from weft.core.types import MAX_SEED, FinishReason, Request

TELL_EVERY = 8  # tokens
TRY_EVERY_S = 0.25  # whether a ring that others fill has room
MOST_NEWS = 64  # tokens of a request that wait to become text


class EngineAsker:
    """Asks an engine whose client is driven by the event loop.

    Args:
        base_seed: makes the seeds of requests without one repeatable, by the number of the line.
        beside: another one with the same client, for other lines.
        mark: puts a sequence into its class.

    Attributes:
        progress: called now and then with the number of the oldest line that runs and its tokens.
        started: called with the number of a line when the engine has got it, and with True when
            it computes it.
        waiting: lines that the ring has no room for yet.
    """

    progress: Callable[[int, int], None] | None = None
    started: Callable[[int, bool], None] | None = None
    waiting: int = 0

    def __init__(
        self,
        client: EngineClient,
        builder: Builder,
        base_seed: int | None = None,
        *,
        beside: EngineAsker | None = None,
        mark: Callable[[Request], Request] = lambda request: replace(
            request, service_class=BATCH_CLASS
        ),
    ) -> None:
        self._client = client
        self._builder = builder
        self._texts: TokenTexts = TokenTexts(builder.tokenizer) if beside is None else beside._texts
        self._base_seed = base_seed
        self._mark = mark
        self._running: dict[_Running, None] = {}  # a set that keeps the order
        # All askers of a client wait for room together.
        self._freed: asyncio.Event = asyncio.Event() if beside is None else beside._freed

    async def ask(self, number: int, line: BatchLine) -> LineAnswer:
        asked = self.read(line)
        if asked.job.constrained_by is not None:
            await asyncio.to_thread(check_grammar, asked.job, self._builder)
        whole = asked.whole()
        try:
            async with asyncio.timeout(asked.job.timeout_s):
                for part in asked.parts():
                    await self._run(number, self._requests(number, line, part), whole)
        except TimeoutError:
            raise DeadlineExceededError from None
        return LineAnswer(200, new_request_id(), whole.body())

    def read(self, line: BatchLine) -> Asked:
        """Check the body of a line. Raises WeftError if the engine cannot be asked that."""
        return read_whole(line.url, bytes(line.body), self._builder, self._texts)

    def prompt(self, line: BatchLine) -> Prompt | None:
        """The prompt of a line, for the order; None if it has no output to plan with.

        May be called on any thread. Raises WeftError if the engine refuses the line.
        """
        if line.url.endswith(POOLED):
            return None
        job = self.read(line).job
        tokens = [token for request in job.requests[:: job.n] for token in request.prompt]
        bounds = [request.sampling.max_tokens for request in job.requests]
        longest = None if None in bounds else max(bound or 0 for bound in bounds)
        return Prompt(np.array(tokens, np.uint32), longest, len(job.requests))

    def _requests(self, number: int, line: BatchLine, job: Job) -> list[Request]:
        """The sequences of a job, in the class of batches, with seeds that others do not move."""
        requests = [self._mark(request) for request in job.requests]
        if self._base_seed is None or msgspec.json.decode(line.body, type=_Seeded).seed is not None:
            return requests
        name = f"{self._base_seed} {number}".encode()
        seed = int.from_bytes(blake2b(name, digest_size=8).digest()) % (MAX_SEED + 1)
        return [
            replace(request, sampling=replace(request.sampling, seed=(seed + i) % (MAX_SEED + 1)))
            for i, request in enumerate(requests)
        ]

    async def _run(self, number: int, requests: Seq[Request], whole: Whole) -> None:
        """Compute sequences into an answer. Raises what ended one of them."""
        running = _Running(self._client, whole, requests)
        await self._submit(requests, running)
        self._running[running] = None
        if self.started is not None:
            self.started(number, False)
            running.began = partial(self.started, number, True)
        if self.progress is not None:
            running.grown = lambda tokens: self._grown(running, number, tokens)
        try:
            await running.ended
        finally:
            running.cancel()
            del self._running[running]
            self._freed.set()

    def _grown(self, running: _Running, number: int, tokens: int) -> None:
        if self.progress is not None and next(iter(self._running)) is running:
            self.progress(number, tokens)

    async def _submit(self, requests: Seq[Request], running: _Running) -> None:
        """Hand sequences over as soon as the ring has room for all of them.

        Others may fill the ring, too, who do not tell when they make room: it is tried again and
        again. Raises ParameterError if there would be no room in an empty ring either.
        """
        while not self._try(requests, running):
            self.waiting += 1
            try:
                self._freed.clear()
                async with asyncio.timeout(TRY_EVERY_S):
                    await self._freed.wait()
            except TimeoutError:
                pass
            finally:
                self.waiting -= 1

    def _try(self, requests: Seq[Request], running: _Running) -> bool:
        """Hand sequences over; False if there is no room at present."""
        try:
            self._client.submit(requests, running.sink)
        except EngineDeadError as error:
            raise NobodyAnswersError(error.message) from None
        except EngineBusyError:
            return False
        return True


class _Running:
    """Sequences that the engine works on, and what their updates go into.

    Attributes:
        ended: done when all have ended, or one has failed.
        began: called at the first token.
        grown: called with the number of tokens so far, now and then.
    """

    began: Callable[[], None] | None = None
    grown: Callable[[int], None] | None = None

    def __init__(self, client: EngineClient, whole: Whole, requests: Seq[Request]) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._client = client
        self._whole = whole
        self._open = {request.id for request in requests}
        self._tokens, self._choices = 0, len(requests)
        self._news: list[Update] = []
        # Text is made of many tokens at once, unless it may say that the engine should stop.
        self._most_news = 1 if any(r.sampling.stop for r in requests) else MOST_NEWS

    def sink(self, updates: Seq[Update]) -> None:
        """Take news; on the thread of the event loop."""
        ends = [update.sequence_id for update in updates if update.finish is not None]
        self._open.difference_update(ends)
        if self.ended.done():
            return
        before, self._tokens = self._tokens, self._tokens + len(updates)
        if self.began is not None and not before:
            self.began()
        if self.grown is not None and before // TELL_EVERY < self._tokens // TELL_EVERY:
            self.grown(self._tokens // self._choices)
        self._news += updates
        if len(self._news) < self._most_news and not ends:
            return
        news, self._news = self._news, []
        try:
            for sequence_id in self._whole.push(news):
                self._client.cancel(sequence_id, FinishReason.STOP)
        except EngineDeadError as error:
            self.ended.set_exception(NobodyAnswersError(error.message))
        except Exception as error:
            self.ended.set_exception(error)
        else:
            if not self._open:
                self.ended.set_result(None)

    def cancel(self) -> None:
        """Cancel everything that the engine still computes."""
        for sequence_id in self._open:
            self._client.cancel(sequence_id)


class _Seeded(Struct):
    seed: int | None = None
