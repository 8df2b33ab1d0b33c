"""``weft serve`` with models that sleep and wake: one supervisor, and an engine for each awake."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

from weft.batch.database import waiting_models
from weft.core.config import EngineConfig
from weft.core.early import Starter
from weft.core.errors import ConfigError, ModelFailedError, ModelsBusyError, WeftError
from weft.core.kept_process import KeptProcess
from weft.core.memory import available_memory
from weft.core.process import give_back_freed_memory
from weft.core.served import ServedModel
from weft.core.settings import format_bytes
from weft.engine.driver import has_driver
from weft.kept_model import ENGINE_BYTES, KeptModel
from weft.models.named import NamedModel
from weft.ring.model_board import UNLOAD, ModelBoard, create_model_board
from weft.server.data import data_folder
from weft.server.keeper import FrontendKeeper
from weft.server.options import ServerOptions
from weft.server.quota_board import create_quota_board
from weft.supervise import on_signals, run_kept

AUTO_SHARE = 0.8  # of the free memory, for all models together
KV_SHARE = 0.25  # of the limit at least, for the KV of all models together
PATIENCE_S = 5.0  # that an order to load waits for memory
TICK_S = 0.2  # while something is awaited that rings no bell
BATCHES_S = 1.0  # while there are batch processes, whose lines ring none either
ONE_MODEL = {  # settings that are of one model, and what to do instead
    "tokenizer": "it is of one model",
    "chat_template": "it is of one model",
    "revision": "it is of one model; put the folder of that revision in place of its name",
}

logger = logging.getLogger("weft")


def check_several(
    models: Seq[NamedModel], settings: Mapping[str, Any], options: ServerOptions
) -> None:
    """Refuse settings that make no sense for models that sleep and wake. Raises ConfigError."""
    config = EngineConfig.from_mapping({**settings, "model": models[0].source})
    if options.engine_only:
        raise ConfigError("--engine-only is for one model that is always awake.", param="model")
    on_gpu = config.device == "cuda" or (config.device == "auto" and has_driver())
    if on_gpu or config.processes > 1:
        raise ConfigError(
            "Models sleep and wake only on a CPU (--device cpu), each with an engine of one "
            "process; with a GPU start a server for each model.",
            param="device",
        )
    if len(models) == 1:
        return
    if options.served_model_name:
        raise ConfigError(
            "--served-model-name is for one model; with several name each of them, as in: "
            "--model chat=Qwen/Qwen3-0.6B",
            param="served_model_name",
        )
    for name, why in ONE_MODEL.items():
        if getattr(config, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} cannot be used with several models: {why}.", param=name)


async def supervise_models(
    models: Seq[NamedModel],
    settings: Mapping[str, Any],
    options: ServerOptions,
    listener: socket.socket,
    start: Starter,
) -> int:
    """Serve until SIGINT or SIGTERM; return the exit code. Raises what ends the server."""
    signals = on_signals()
    planes = options.frontends or 1
    limit = options.models_memory or int(AUTO_SHARE * available_memory())
    fds = create_model_board(len(models), planes)
    board, quotas = ModelBoard(fds), create_quota_board(planes)
    budgets: list[dict[str, Any]] = [{}] * len(models)
    if settings.get("kv_memory") is None:  # else the sum is known before a model is woken
        shares = share_out(limit, [model.nbytes for model in models])
        budgets = [{"memory_limit": share} for share in shares]
    kept = [
        KeptModel(model, {**budget, **settings}, options, start, board, number)
        for number, (model, budget) in enumerate(zip(models, budgets, strict=True))
    ]
    keeper = ModelsKeeper(kept, board, fds.bell, limit, options)
    card: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    given = {
        **kept[0].given,
        "options": asdict(options),
        "models": [{"names": model.options.served_model_name, **model.given} for model in kept],
    }
    frontends = [
        FrontendKeeper(
            *(number, given, [model.links(number) for model in kept], listener),
            *(quotas, card, options.watchdog_s, start),
            models=fds,
        )
        for number in range(planes)
    ]

    def make_batches() -> KeptProcess:
        for model in kept:
            model.make_batches(keeper.look_again)
        return AllBatches(kept)

    return await run_kept(frontends, signals, options.drain_timeout_s, keeper, card, make_batches)


def share_out(limit: int, weights: Seq[int]) -> list[int]:
    """Bytes that each model may take, by the bytes of its files: its weights and a share for KV."""
    room = max(limit - sum(weights), int(KV_SHARE * limit)) // len(weights)
    return [max(2**20, min(limit, size + room) - ENGINE_BYTES) for size in weights]


class AllBatches(KeptProcess):
    """The batch processes of all models, each from when its model was awake once."""

    def __init__(self, models: Seq[KeptModel]) -> None:
        super().__init__()
        self._models = models

    async def run(self) -> None:
        await asyncio.gather(*map(self._run, self._models))

    async def _run(self, model: KeptModel) -> None:
        ending = asyncio.create_task(self._ending.wait())
        waits: list[asyncio.Future[Any]] = [ending, model.card]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ending.cancel()
        if not self._ending.is_set():
            await model.batches.run()

    def end(self) -> None:
        self._ending.set()
        for model in self._models:
            model.batches.end()

    def kill(self) -> None:
        self._ending.set()
        for model in self._models:
            model.batches.kill()


class ModelsKeeper:
    """Wakes models that are wanted, within a limit of memory, and lets others sleep.

    Args:
        bell: the eventfd by which request planes ask for a look.
        limit: bytes that all awake models may take.
    """

    def __init__(
        self,
        models: Seq[KeptModel],
        board: ModelBoard,
        bell: int,
        limit: int,
        options: ServerOptions,
    ) -> None:
        self._models = models
        self._board = board
        self._bell = bell
        self._limit = limit
        self._idle_s = options.idle_sleep_s
        self._folder = data_folder(options)
        self._rung = asyncio.Event()
        self._first = list(models)  # to be woken at the start, as far as there is room

    @property
    def pids(self) -> set[int]:
        """Processes that are waited for."""
        return set().union(*(model.pids for model in self._models))

    def look_again(self, *_: object) -> None:
        """Something has happened."""
        self._rung.set()

    async def start(self) -> ServedModel:
        """Wake models in their order until one is awake. Raises the first error if none is."""
        try:
            return await self._start()
        except BaseException:
            self._cancel()
            raise

    async def _start(self) -> ServedModel:
        failures: list[WeftError] = []
        await self._remember_batches()
        while self._first:
            model = self._first.pop(0)
            if not self._admits(model):
                failures.append(_too_large(model, self._limit))
                await model.fail(failures[-1])
                continue
            model.wake(self.look_again)
            task = model._task
            assert task is not None
            await asyncio.wait([task])
            error = task.exception()
            if error is not None and not isinstance(error, WeftError):
                raise error
            await model.settle(self.look_again)
            if error is None and model.served is not None:
                return model.served
            assert isinstance(error, WeftError)
            failures.append(error)
        raise failures[0]

    def _admits(self, model: KeptModel) -> bool:
        """Whether it may be awake, if need be alone: one that was is not refused for its size."""
        return model.row.bytes <= self._limit or model.served is not None

    @property
    def _taken(self) -> int:
        """Bytes of models that are awake or being woken."""
        return sum(m.row.bytes for m in self._models if m.row.state in ("loading", "awake"))

    async def run(self) -> None:
        """Wake models and let them sleep until cancelled."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._bell, self._on_bell)
        try:
            give_back_freed_memory()
            while True:
                self._rung.clear()
                await self._look()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._rung.wait(), self._pause_s())
        finally:
            loop.remove_reader(self._bell)
            self._cancel()

    def _cancel(self) -> None:
        for model in self._models:
            model.cancel()

    def _on_bell(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        self._rung.set()

    async def _remember_batches(self) -> None:
        """Have models woken, and first, that have batches from before the start."""
        try:
            waiting = await asyncio.to_thread(waiting_models, self._folder)
        except Exception as error:
            logger.warning("The batches in '%s' cannot be read: %s.", self._folder, error)
            return
        has = [m for m in self._first if any(one.startswith(m.identity) for one in waiting)]
        for model in has:
            model.has_old_batches = True
        self._first = has + [model for model in self._first if model not in has]

    async def _look(self) -> None:
        """Do what there is to do."""
        for model in self._models:
            await model.settle(self.look_again)
        for model in self._models:
            for order in list(model.orders()):
                await self._obey(model, *order)
        self._wake_first()
        for model in sorted(self._models, key=lambda m: m.row.blocked_ns or 2**63):
            if model.wanted:
                await self._wake(model)
            elif model.row.blocked_ns:
                model.show(blocked_ns=0)
        await self._keep_within_limit()
        await self._let_idle_sleep()

    def _wake_first(self) -> None:
        """At the start wake what fits without putting others to sleep, one after the other."""
        if any(model.row.state == "loading" for model in self._models):
            return
        while self._first:
            model = self._first.pop(0)
            if model.row.state == "asleep" and self._taken + model.row.bytes <= self._limit:
                model.wake(self.look_again)
                return

    async def _wake(self, model: KeptModel) -> None:
        """Wake a model, if need be in place of those that were least recently used."""
        if not self._admits(model):
            await model.fail(_too_large(model, self._limit))
            return
        idle = [m for m in self._models if m.row.state == "awake" and not await m.busy()]
        fits = self._lacks(model) <= sum(m.row.bytes for m in idle)  # else none sleeps in vain
        while fits and self._lacks(model) > 0:
            fits = await self._put_one_to_sleep(f"{model.name} needs its memory", spared=model)
        if fits:
            if model.row.bytes > self._limit:
                logger.warning(
                    "The model %s takes %s, more than --models-memory; it is awake alone.",
                    model.name,
                    format_bytes(model.row.bytes),
                )
            model.wake(self.look_again)
        elif not model.row.blocked_ns:
            model.show(blocked_ns=time.monotonic_ns())

    def _lacks(self, model: KeptModel) -> int:
        """Bytes that others would have to give up for it to be awake; 0 or less: none."""
        return self._taken + min(model.row.bytes, self._limit) - self._limit

    async def _put_one_to_sleep(self, why: str, spared: KeptModel) -> bool:
        """Let the least recently used model sleep that is not busy; whether there was one."""
        awake = [m for m in self._models if m.row.state == "awake" and m is not spared]
        for model in sorted(awake, key=KeptModel.last_used):
            if not await model.busy() and await model.sleep(why):
                return True
        return False

    async def _keep_within_limit(self) -> None:
        """Let models sleep if one has turned out larger than its estimate."""
        while self._taken > self._limit:
            newest = max(
                (m for m in self._models if m.row.state == "awake"),
                key=KeptModel.last_used,
                default=None,
            )
            why = "models take more memory than --models-memory allows"
            if newest is None or not await self._put_one_to_sleep(why, spared=newest):
                return

    async def _let_idle_sleep(self) -> None:
        if not self._idle_s:
            return
        for model in self._models:
            idle_s = time.monotonic() - model.last_used()
            if model.row.state == "awake" and idle_s >= self._idle_s and not await model.busy():
                await model.sleep(f"it was not used for {self._idle_s:g} s")

    async def _obey(
        self, model: KeptModel, plane: int, number: int, kind: int, since_s: float
    ) -> None:
        """Carry out an order of an administrator, or wait until that can be told."""
        state, answer = model.row.state, partial(model.answer, plane, number)
        if kind == UNLOAD:
            if state == "awake" and (await model.busy() or not await model.sleep("as asked")):
                answer(_in_use(model))
            elif state != "loading":
                answer()
        elif state == "awake":
            answer()
        elif state == "failed" and since_s > 0:
            answer(ModelFailedError(model.row.error))
        elif state != "loading":
            await self._wake(model)
            if model.row.blocked_ns and since_s > PATIENCE_S:
                answer(ModelsBusyError.no_room(model.name))

    def _pause_s(self) -> float | None:
        """Seconds until the next look without a bell; None for ever."""
        if any(m.row.blocked_ns or any(m.orders()) for m in self._models):
            return TICK_S
        pauses = [BATCHES_S for m in self._models if m.batches_wait and m.row.state != "awake"]
        if self._idle_s:
            now = time.monotonic()
            awake = (m for m in self._models if m.row.state == "awake")
            pauses += [max(BATCHES_S, m.last_used() + self._idle_s - now) for m in awake]
        return min(pauses, default=None)

    def stop(self) -> None:
        """End all engines."""
        for model in self._models:
            model.stop()


def _too_large(model: KeptModel, limit: int) -> ConfigError:
    return ConfigError(
        f"The model {model.name} needs some {format_bytes(model.row.bytes)}, and --models-memory "
        f"is {format_bytes(limit)}; raise it, or lower --kv-memory.",
        param="models_memory",
    )


def _in_use(model: KeptModel) -> ModelsBusyError:
    return ModelsBusyError(f"The model '{model.name}' is in use; it sleeps once it is not.")
