"""The models of a request plane: their states, and the services of those that were awake once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import Any

from starlette.routing import Router
from starlette.types import Message, Receive

from weft.api import ModelCard, model_object
from weft.api.card import WeightFacts
from weft.api.errors import DeadlineExceededError
from weft.api.sampling import LATEST, check_model
from weft.core.errors import (
    EngineDeadError,
    ModelAsleepError,
    ModelFailedError,
    ModelsBusyError,
    WeftError,
)
from weft.ring.model_board import ModelBoard, ModelRow, OrderAnswer
from weft.server.app import ModelParts
from weft.server.options import ServerOptions
from weft.server.queue import QueueFullError
from weft.server.service import DisconnectedError, Service, time_left_s

LOOK_S = 0.02  # while a request waits for a model that was never awake
PATIENCE_S = 5.0  # with models that are in use, whose memory is needed
STALE_S = 1.0  # until it is known whether they still are, now that there is another request
MOST_WAITING = 256  # requests for a model that was never awake; with their bodies
HELD_BYTES = 2**20  # of a body that nobody reads while its request waits; the rest is not received
MESSAGE_BYTES = 512  # of a piece of it, beside its bytes

logger = logging.getLogger("weft.server")


class PlaneModel:
    """One model, as this request plane sees it.

    Attributes:
        number: on the board.
        names: that requests may use.
        parts: its service and routes, once it was awake.
    """

    def __init__(
        self,
        number: int,
        names: tuple[str, ...],
        board: ModelBoard,
        plane: int,
        make: Callable[[str], ModelParts],
    ) -> None:
        self.number = number
        self.names = names
        self.parts: ModelParts | None = None
        self._router: Router | None = None
        self._refusal: tuple[tuple[int, str], WeftError] | None = None  # of a card
        self._board, self._plane = board, plane
        self._make = make
        self._making = asyncio.Lock()
        self._ordering = asyncio.Lock()
        self._entered = 0
        self._waiting = 0
        self.created = int(time.time())

    @property
    def row(self) -> ModelRow:
        return self._board.row(self.number)

    @property
    def state(self) -> str:
        """Its state, "failed" also where only this process cannot serve it."""
        return self.row.state if self.refused is None else "failed"

    @property
    def refused(self) -> WeftError | None:
        """Why this process cannot serve it, until an engine is started for it again."""
        if self._refusal is None:
            return None
        of, error = self._refusal
        return error if of == self._of(self.row) else None

    @staticmethod
    def _of(row: ModelRow) -> tuple[int, str]:
        return row.starts, row.card

    @property
    def service(self) -> Service | None:
        return None if self.parts is None else self.parts.service

    @property
    def num_open(self) -> int:
        """Requests that are being answered, and jobs in the background."""
        return self._entered + (0 if self.service is None else self.service.num_open)

    def card(self) -> ModelCard:
        """Its facts, as far as they are known."""
        if self.service is not None:
            return self.service.builder.card
        weights = WeightFacts(num_bytes=self.row.bytes)
        return ModelCard(self.names, 0, 0, created=self.created, weights=weights)

    def describe(self) -> dict[str, Any]:
        """Its state for ``/v1/models`` and ``/server_info``."""
        row = self.row
        shown: dict[str, Any] = {"state": self.state, "memory_bytes": row.bytes}
        if row.starts and row.wake_s:
            shown["wake_s"] = round(row.wake_s, 3)
        if (refused := self.refused) is not None:
            shown["error"] = refused.message
        elif row.state == "failed":
            shown["error"] = row.error
        return shown

    def objects(self) -> list[dict[str, Any]]:
        """Its entries in ``/v1/models``."""
        found = []
        for name in self.names:
            entry = model_object(name, self.card())
            if not entry["max_model_len"]:
                del entry["max_model_len"]  # not known yet
            found.append({**entry, **self.describe()})
        return found

    # -- requests -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Count a request, so that the model is awake for it and does not sleep."""
        self._entered += 1
        self.show_open()
        if self.row.state != "awake":
            self._board.ring()
        try:
            yield
        finally:
            self._entered -= 1
            self.show_open()

    def show_open(self) -> int:
        """Let the supervisor see how many requests are open; returns it."""
        count = self.num_open
        self._board.show_open(self.number, self._plane, count)
        return count

    def problem(self) -> WeftError | None:
        """Why no request for it can be answered at present."""
        if (refused := self.refused) is not None:
            return refused
        row, now_ns = self.row, time.monotonic_ns()
        if row.state == "failed" and now_ns < row.retry_ns:
            return ModelFailedError(f"The model '{self.names[0]}' cannot be loaded: {row.error}")
        if row.blocked_ns and now_ns - row.blocked_ns > PATIENCE_S * 1e9:
            return ModelsBusyError.no_room(self.names[0])
        return None

    async def ready(
        self, options: ServerOptions, stopped: Callable[[], WeftError | None], held: Held
    ) -> Router:
        """Wait until the model was awake once; return what answers requests for it.

        Raises:
            QueueFullError: too many wait already.
            DisconnectedError: the client has gone.
            WeftError: its deadline is over, or the model cannot be woken.
        """
        until = time.monotonic() + STALE_S
        while (problem := self.problem()) is not None:
            if not isinstance(problem, ModelsBusyError) or time.monotonic() >= until:
                raise problem
            await asyncio.sleep(LOOK_S)
        if self._router is not None:
            return self._router
        if self._waiting >= MOST_WAITING:
            message = f"{MOST_WAITING} requests wait for the model to be loaded already."
            raise QueueFullError(message, 5)
        self._waiting += 1
        try:
            await self._wait(time_left_s(options), options, stopped, held)
            return await self.open()
        finally:
            self._waiting -= 1

    async def _wait(
        self,
        left_s: float | None,
        options: ServerOptions,
        stopped: Callable[[], WeftError | None],
        held: Held,
    ) -> None:
        until = time.monotonic() + (options.max_request_timeout_s if left_s is None else left_s)
        gone = asyncio.create_task(held.disconnected())
        try:
            while not self.row.card:
                if (problem := self.problem() or stopped()) is not None:
                    raise problem
                if gone.done():
                    raise DisconnectedError
                if time.monotonic() >= until:
                    raise DeadlineExceededError()
                await asyncio.wait([gone], timeout=LOOK_S)
        finally:
            gone.cancel()

    async def open(self) -> Router:
        """Make its service, unless that is done. Its card must be there.

        Raises:
            ModelFailedError: it cannot be made of this card.
        """
        async with self._making:
            if self._router is None:
                if (refused := self.refused) is not None:
                    raise refused
                row = self.row
                try:
                    parts = await asyncio.to_thread(self._make, row.card)
                except WeftError as error:
                    name = self.names[0]
                    logger.error("The model %s cannot be served: %s", name, error.message)
                    failed = ModelFailedError(
                        f"The model '{name}' cannot be served: {error.message}"
                    )
                    self._refusal = self._of(row), failed
                    raise failed from error
                parts.start()
                self.parts, self._router = parts, Router(parts.routes, redirect_slashes=False)
        return self._router

    async def order(self, kind: int, patience_s: float) -> None:
        """Have the supervisor load or unload it.

        Raises:
            WeftError: it does not.
            EngineDeadError: it does not answer in time, though it may still do it.
        """
        try:
            async with asyncio.timeout(patience_s):
                answer = await self._ordered(kind)
        except TimeoutError:
            raise EngineDeadError(
                f"The model '{self.names[0]}' is neither loaded nor unloaded after "
                f"{patience_s:g} s; its state in /v1/models shows what becomes of it."
            ) from None
        if not answer.code:
            return
        kinds = (ModelFailedError, ModelsBusyError)
        kind_of = {one.code: one for one in kinds}.get(answer.code, EngineDeadError)
        raise kind_of(answer.message)

    async def _ordered(self, kind: int) -> OrderAnswer:
        async with self._ordering:
            number = self._board.order(self.number, self._plane, kind)
            while True:
                answer = self.row.answers.get(self._plane)
                if answer is not None and answer.order >= number:
                    return answer
                await asyncio.sleep(LOOK_S)


class Held:
    """What a client sends while its request waits, to be received by whoever answers it."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._messages: deque[Message] = deque()
        self._num_bytes = 0

    async def disconnected(self) -> None:
        """Return once the client has gone; behind a long body that is not noticed."""
        while self._num_bytes < HELD_BYTES:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                return
            self._num_bytes += _size(message)
            self._messages.append(message)
        await asyncio.Event().wait()

    async def receive(self) -> Message:
        """The next message, as ASGI has it."""
        if not self._messages:
            return await self._receive()
        message = self._messages.popleft()
        self._num_bytes -= _size(message)
        return message


def _size(message: Message) -> int:
    return MESSAGE_BYTES + len(message.get("body", b""))


class Models:
    """All models of a request plane; the server drains it as it does the service of one."""

    def __init__(
        self,
        models: Seq[PlaneModel],
        board: ModelBoard,
        options: ServerOptions,
        sign: Callable[[], None],
    ) -> None:
        self.models = models
        self.options = options
        self._board = board
        self._sign = sign
        self._stop: WeftError | None = None
        self._draining = False
        self._opening: set[asyncio.Task[Any]] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """Of all models."""
        return tuple(name for model in self.models for name in model.names)

    @property
    def services(self) -> list[Service]:
        """Of the models that were awake once."""
        return [model.service for model in self.models if model.service is not None]

    def find(self, name: str | None) -> PlaneModel:
        """The model that a request names; the first one if it names none.

        Raises:
            UnknownModelError: there is no such model.
        """
        known = check_model(name or None, ModelCard(self.names, 0, 0))
        for model in self.models:
            if known in model.names or known.removesuffix(LATEST) in model.names:
                return model
        raise AssertionError("the name was checked")

    def known(self) -> PlaneModel:
        """The first model that was awake once, which answers what concerns none of them.

        Raises:
            ModelAsleepError: there is none yet, or none that can be served.
        """
        for model in self.models:
            if model.parts is not None:
                return model
        for model in self.models:
            if (refused := model.refused) is not None:
                raise refused
        raise ModelAsleepError("None of the models was loaded yet; try again in a moment.")

    # -- the server ---------------------------------------------------------------------------

    @property
    def draining(self) -> bool:
        return self._draining

    @draining.setter
    def draining(self, value: bool) -> None:
        self._draining = value
        for service in self.services:
            service.draining = value

    @property
    def num_open(self) -> int:
        """What is being answered, or waits for that."""
        return sum(model.num_open for model in self.models)

    @property
    def stopped(self) -> WeftError | None:
        """Why nothing waits any more."""
        return self._stop

    def look(self) -> None:
        """Keep what is known of other processes up to date; see ``Service.look``."""
        self._sign()
        for model in self.models:
            row, is_open = model.row, model.show_open()
            if is_open and row.state != "awake":
                self._board.ring()
            if row.card and model.parts is None and model.refused is None:
                task = asyncio.create_task(self._open(model))
                self._opening.add(task)
                task.add_done_callback(self._opening.discard)
            if model.service is not None:
                model.service.look()
                if (problem := model.problem()) is not None:
                    model.service.abort_all(problem)

    async def _open(self, model: PlaneModel) -> None:
        with contextlib.suppress(ModelFailedError):  # which is told, and shown from now on
            await model.open()

    def abort_all(self, error: WeftError) -> None:
        """End everything with an error."""
        self._stop = error
        for service in self.services:
            service.abort_all(error)

    async def start(self) -> None:
        """Make the services of models that were awake before this process began."""
        for model in self.models:
            if model.row.card:
                await self._open(model)

    async def close(self) -> None:
        for model in self.models:
            if model.parts is not None:
                await model.parts.close()

    # -- pages --------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """The state in ``/ready``: "ready" as long as one of the models can be asked."""
        if self._draining:
            return "draining"
        states = []
        for model in self.models:
            state = model.state
            if state == "awake" and model.service is not None:
                states.append(model.service.state)
            elif state != "failed":
                return "ready"
        return "ready" if "ready" in states else (states or ["failed"])[0]

    def describe(self) -> list[dict[str, Any]]:
        """All models for ``/server_info``."""
        return [{"names": model.names, **model.describe()} for model in self.models]
