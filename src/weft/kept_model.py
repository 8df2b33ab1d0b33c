"""One of several models: its rings, its engine while it is awake, and its batch process."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import replace
from typing import Any

from msgspec.structs import replace as changed

from weft.api.card import ModelCard
from weft.core.config import EngineConfig
from weft.core.early import Starter
from weft.core.errors import WeftError
from weft.core.logs import notice
from weft.core.process import beat_s
from weft.core.served import ServedModel
from weft.core.settings import format_bytes
from weft.engine.keeper import EngineKeeper
from weft.engine.kv_file import create_kv_file
from weft.engine.links import EngineLinks
from weft.models.named import NamedModel
from weft.ring._native import Page
from weft.ring.model_board import MOST_SLEEPS, ModelBoard, ModelRow, OrderAnswer
from weft.ring.segment import RingFds, ring_of
from weft.ring.target_board import create_target_board
from weft.server.batch_keeper import BatchKeeper
from weft.server.counts import create_board
from weft.server.keeper import Links
from weft.server.options import ServerOptions
from weft.supervise import frontend_settings

ENGINE_BYTES = 96 * 2**20  # of an engine beside weights and KV
RETRY_S = 30.0  # until a model that could not be loaded is tried again

logger = logging.getLogger("weft")


class KeptModel:
    """One model: its rings, its engine while it is awake, and its batch process.

    Attributes:
        row: what request planes see of it.
        options: the server's, with the names of this model.
        given: what its request planes get.
        used: when it was last in use, on the monotonic clock.
        has_old_batches: whether it has batches from before the start. Until it was awake once, it
            is wanted for them; then it has a batch process.
    """

    def __init__(
        self,
        model: NamedModel,
        settings: Mapping[str, Any],
        options: ServerOptions,
        start: Starter,
        board: ModelBoard,
        number: int,
    ) -> None:
        names = options.served_model_name or (model.name,)
        self.name = names[0]
        self.options = replace(options, served_model_name=names)
        settings = {**settings, "model": model.source, "device": "cpu"}
        if settings.get("cpu_pinning", "auto") == "auto":
            settings["cpu_pinning"] = "off"  # no engine has the machine to itself
        config = EngineConfig.from_mapping(settings)
        self.given = frontend_settings(config, self.options)
        self.given.pop("options")
        planes = options.frontends or 1
        self._rings = [ring_of(config) for _ in range(planes + 1)]  # the last one is for batches
        self._pages = [Page(ring.memory) for ring in self._rings]
        self._counts, self._targets = create_board(planes + 1), create_target_board()
        beat = beat_s(options.watchdog_s, options.stalled_s)
        self._engines = EngineKeeper(
            settings,
            EngineLinks(self._rings, self._targets, beat, create_kv_file()),
            start,
            standby=options.standby,
            watchdog_s=options.watchdog_s,
            whose=f" of '{self.name}'",
        )
        self.card: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._batches: BatchKeeper | None = None
        self._board, self._number = board, number
        self._task: asyncio.Task[Any] | None = None  # that wakes the engine, or keeps it
        self.served: ServedModel | None = None
        self.used = time.monotonic()
        self.has_old_batches = False
        self._seen: dict[tuple[int, int], float] = {}  # orders, and when they came
        self.row = ModelRow()
        self.show(bytes=ENGINE_BYTES + self._estimate(model, config))

    @staticmethod
    def _estimate(model: NamedModel, config: EngineConfig) -> int:
        """Bytes of weights and KV, before an engine has said what they are."""
        weights = model.nbytes
        if config.kv_memory is not None:
            return weights + config.kv_memory
        return weights + max(0, (config.memory_limit or 0) - weights) // 2

    def links(self, plane: int) -> Links:
        """What a request plane gets."""
        return Links(self._rings[plane], self._counts, self._targets)

    @property
    def pids(self) -> set[int]:
        """Processes that somebody waits for."""
        return self._engines.pids | ({self._batches.pid} if self._batches is not None else set())

    def show(self, **changes: Any) -> None:
        """Change the row, and show it to request planes."""
        self.row = changed(self.row, **changes)
        self._board.write(self._number, self.row)

    # -- what it is needed for ----------------------------------------------------------------

    @property
    def identity(self) -> str:
        """Of its batches, or how it begins as long as it was never awake."""
        if self.served is None:
            return f"{self.name} "
        return ModelCard.of(self.served, self.options.served_model_name).identity

    def make_batches(self, on_start: Callable[[], None]) -> None:
        """Make the keeper of its batch process."""
        planes = self.options.frontends or 1
        ring: RingFds = self._rings[-1]
        self._batches = BatchKeeper(
            self.options, self.given, ring, self.card, self._counts, planes, on_start
        )

    @property
    def batches(self) -> BatchKeeper:
        assert self._batches is not None, "make_batches was called"
        return self._batches

    @property
    def batches_live(self) -> bool:
        """Whether there is a batch process."""
        return self._batches is not None and self._batches.alive

    def _holds(self, rings: Seq[Page]) -> bool:
        """Whether slots of rings are not empty."""
        return any(state != 0 for page in rings for state in page.states())

    @property
    def open(self) -> bool:
        """Whether request planes have requests for it, or a batch has lines."""
        if any(cell.open for cell in self._board.cells(self._number)):
            return True
        return self.row.state != "failed" and self._holds(self._pages[-1:])

    async def busy(self) -> bool:
        """Whether anything is computed or waits; it must not sleep then."""
        if self.open or self._holds(self._pages):
            self.used = time.monotonic()
            return True
        return self._batches is not None and await self._batches.has_work(self.identity)

    def last_used(self) -> float:
        """When it was last in use, on the monotonic clock."""
        cells = self._board.cells(self._number)
        self.used = max([self.used, *(cell.used_ns / 1e9 for cell in cells)])
        return self.used

    @property
    def batches_wait(self) -> bool:
        """Whether it has batches, though its lines need not be in the ring."""
        return self.batches_live or self._old_batches_wait

    @property
    def _old_batches_wait(self) -> bool:
        return self.has_old_batches and self.served is None

    @property
    def wanted(self) -> bool:
        """Whether it is to be woken."""
        if self.row.state == "failed":
            due = time.monotonic_ns() >= self.row.retry_ns
            return due and (self.open or self.batches_wait)
        return self.row.state == "asleep" and (self.open or self._old_batches_wait)

    # -- waking and sleeping ------------------------------------------------------------------

    def wake(self, done: Callable[..., None]) -> None:
        """Begin to wake it; ``done`` is called at its end."""
        self.show(state="loading", blocked_ns=0, error="", starts=self.row.starts + 1)
        self._task = asyncio.create_task(self._wake())
        self._task.add_done_callback(done)

    async def _wake(self) -> float:
        began = time.monotonic()
        if self.served is None:
            self.served = await self._engines.start()
        else:
            await self._engines.wake()
        return time.monotonic() - began

    async def settle(self, done: Callable[..., None]) -> None:
        """Take note of what has ended: its waking, or all engines."""
        task = self._task
        if task is None or not task.done():
            return
        self._task = None
        error = task.exception()
        if error is not None:
            await self.fail(error)
        elif self.row.state == "loading":
            self._is_awake(task.result())
            self._task = asyncio.create_task(self._engines.run())
            self._task.add_done_callback(done)

    def _is_awake(self, wake_s: float) -> None:
        served = self.served
        assert served is not None
        self.used = time.monotonic()
        size = ENGINE_BYTES + served.weight_bytes + served.kv_memory + served.host_kv_memory
        self.show(
            state="awake", card=served.to_json(), bytes=size, wake_s=wake_s,
            sleeps=tuple((began, ended or time.monotonic_ns()) for began, ended in self.row.sleeps),
        )  # fmt: skip
        if not self.card.done():
            self.card.set_result(self.row.card)
        notice(
            f"model {self.name} is awake after {wake_s:.1f} s: weights of "
            f"{format_bytes(served.weight_bytes)}, KV cache of {format_bytes(served.kv_memory)}, "
            f"sequences of up to {served.max_model_len} tokens"
        )

    async def fail(self, error: BaseException) -> None:
        """It cannot be served at present; it is tried again when it is wanted after a while."""
        message = error.message if isinstance(error, WeftError) else f"{type(error).__name__}"
        logger.error("The model %s cannot be loaded: %s", self.name, message)
        if not isinstance(error, WeftError):
            logger.error("%s", error, exc_info=error)
        await asyncio.to_thread(self._engines.rest)
        retry_ns = time.monotonic_ns() + int(RETRY_S * 1e9)
        self.show(state="failed", error=message[:2000], retry_ns=retry_ns, blocked_ns=0)

    async def sleep(self, why: str) -> bool:
        """Let it sleep; whether it does. Requests that come meanwhile wake it again."""
        self.show(state="asleep")  # from here on who submits something rings the bell
        if await self.busy():
            self.show(state="awake")
            return False
        self.show(sleeps=(*self.row.sleeps[1 - MOST_SLEEPS :], (time.monotonic_ns(), 0)))
        await self.end()
        notice(f"model {self.name} sleeps: {why}")
        return True

    async def end(self) -> None:
        """End what wakes or keeps its engine, and the engine."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait([self._task])
            self._task = None
        await asyncio.to_thread(self._engines.rest)

    def cancel(self) -> None:
        """Neither wake the engine nor keep it any more, at the end of the server."""
        if self._task is not None:
            self._task.cancel()

    def stop(self) -> None:
        """End all engines, at the end of the server; another thread may do that."""
        self._engines.stop()

    # -- orders of administrators -------------------------------------------------------------

    def orders(self) -> Iterator[tuple[int, int, int, float]]:
        """Orders that have no answer: plane, number, kind, and seconds since they came."""
        now = time.monotonic()
        for plane, cell in enumerate(self._board.cells(self._number)):
            number, kind = divmod(cell.order, 4)
            answered = self.row.answers.get(plane)
            if number > (0 if answered is None else answered.order):
                yield plane, number, kind, now - self._seen.setdefault((plane, number), now)

    def answer(self, plane: int, number: int, error: WeftError | None = None) -> None:
        """Answer an order."""
        self._seen.pop((plane, number), None)
        given = (
            OrderAnswer(number) if error is None else OrderAnswer(number, error.code, error.message)
        )
        self.show(answers={**self.row.answers, plane: given})
