"""The supervisor of ``weft serve``: starts engine and request planes and restarts them.

It does nothing else, so that nothing can make it fail. Children that lose it end by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from weft.core.config import EngineConfig
from weft.core.early import Starter
from weft.core.kept_process import KeptProcess
from weft.core.logs import log_level, set_up_logs
from weft.core.process import (
    beat_s,
    give_back_freed_memory,
    raise_file_limit,
    reap_orphans,
    set_process_title,
    start_child,
)
from weft.core.service_manager import ServiceManager

if TYPE_CHECKING:
    from weft.core.served import ServedModel
    from weft.models.named import NamedModel
    from weft.server.batch_keeper import BatchKeeper
    from weft.server.options import ServerOptions

SIGNALS = (signal.SIGINT, signal.SIGTERM)
CORES_FOR_TWO = 4  # from here on a second request plane is the default
ABRUPT_S = 1.5  # before they are asked again: signals that come together count as one
REAP_AFTER_S = 1.0  # from the death of a child; who waits for it is to come first
GRACE_S = 5.0  # to end what is open with an error, until the request planes are killed

logger = logging.getLogger("weft")


class Engines(Protocol):
    """Keeps the engines of a server, of one model or of several."""

    @property
    def pids(self) -> set[int]:
        """Processes that it waits for."""

    async def start(self) -> ServedModel:
        """Start the first engine. Raises the error with which it failed."""

    async def run(self) -> None:
        """Keep engines at the rings; returns only by an error that ends the server."""

    def stop(self) -> None:
        """End all engines."""


def serve(
    settings: Mapping[str, Any],
    options: ServerOptions,
    start: Starter = start_child,
    models: Seq[NamedModel] = (),
) -> int:
    """Serve until SIGINT or SIGTERM; return the exit code.

    Args:
        start: how to start engines and request planes.
        models: that sleep and wake, instead of the one of the settings.

    Raises:
        ConfigError: a setting is wrong, or the address cannot be used.
        WeftError: what kept the engine from starting, or processes that died again and again.
    """
    config = EngineConfig.from_mapping(settings)
    set_up_logs("supervisor", log_level(config.log_level), config.log_format)
    set_process_title("weft")
    raise_file_limit()
    if options.engine_only:
        from weft.engine_only import serve_engine

        return serve_engine(settings, config, options, start)
    options = fit_limits(options)
    chosen = replace(options, frontends=num_frontends(config.base_seed, options))
    classes = [row.name for row in config.service_classes()]
    with listening(options, classes) as listener, shared_store(chosen) as shared:
        if models:
            from weft.several import supervise_models

            return asyncio.run(supervise_models(models, settings, shared, listener, start))
        return asyncio.run(_supervise(settings, config, shared, listener, start))


def num_frontends(base_seed: int | None, options: ServerOptions) -> int:
    """The default number of request planes.

    One may be killed without a second one noticing. With ``base_seed`` there is one: seeds count
    the requests of a plane, and are to be the same at each start.
    """
    from weft.engine.machine import usable_cores

    if options.frontends is not None:
        return options.frontends
    return 2 if usable_cores() >= CORES_FOR_TWO and base_seed is None else 1


@contextlib.contextmanager
def shared_store(options: ServerOptions) -> Iterator[ServerOptions]:
    """Let all request planes, and their successors, share what they store as long as we serve."""
    from weft.server.scratch import room, scratch_folder

    with contextlib.ExitStack() as stack:
        if options.responses_db is None or options.usage_db is None:
            try:
                folder = stack.enter_context(scratch_folder())
            except OSError as error:
                logger.warning(
                    "Request planes cannot share stored responses and usage in memory (%s): one "
                    "that dies takes its own along, and several store no responses. --responses-db "
                    "FILE and --usage-db FILE keep them.",
                    error.strerror,
                )
            else:
                options = _in_folder(options, folder, room(folder))
        yield options


def _in_folder(options: ServerOptions, folder: Path, room: int) -> ServerOptions:
    """The options with the files in a folder that they do not name."""
    if options.usage_db is None:
        options = replace(options, usage_db=str(folder / "usage.db"))
    if options.responses_db is not None:
        return options
    most = max(1, min(options.max_responses_bytes, room))
    path = str(folder / "responses.db")
    return replace(options, responses_db=path, max_responses_bytes=most)


async def _supervise(
    settings: Mapping[str, Any],
    config: EngineConfig,
    options: ServerOptions,
    listener: socket.socket,
    start: Starter,
) -> int:
    from weft.engine.keeper import EngineKeeper
    from weft.engine.kv_file import create_kv_file
    from weft.engine.links import EngineLinks
    from weft.ring.segment import ring_of
    from weft.ring.target_board import create_target_board
    from weft.server.counts import create_board
    from weft.server.keeper import FrontendKeeper, Links
    from weft.server.quota_board import create_quota_board

    signals = on_signals()
    planes = options.frontends or 1
    rings = [ring_of(config) for _ in range(planes + 1)]  # the last one is for batches
    counts, quotas = create_board(planes + 1), create_quota_board(planes)
    targets = create_target_board()
    beat = beat_s(options.watchdog_s, options.stalled_s)
    links = EngineLinks(rings, targets, beat, create_kv_file())
    engines = EngineKeeper(
        settings, links, start, standby=options.standby, watchdog_s=options.watchdog_s
    )
    card: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    given = frontend_settings(config, options)
    frontends = [
        FrontendKeeper(
            *(number, given, [Links(ring, counts, targets)], listener),
            *(quotas, card, options.watchdog_s, start),
        )
        for number, ring in enumerate(rings[:planes])
    ]

    def make_batches() -> BatchKeeper:
        from weft.server.batch_keeper import BatchKeeper

        return BatchKeeper(options, given, rings[-1], card, counts, planes)

    return await run_kept(frontends, signals, options.drain_timeout_s, engines, card, make_batches)


async def run_kept(
    planes: Seq[KeptProcess],
    signals: asyncio.Queue[int],
    drain_timeout_s: float,
    engines: Engines | None = None,
    card: asyncio.Future[str] | None = None,
    make_batches: Callable[[], KeptProcess] | None = None,
) -> int:
    """Keep everything running until a signal, or until a part gives up; return the exit code.

    Args:
        planes: who serves requests; they have ``drain_timeout_s`` to finish what is open.
        card: gets the facts of the first of the engines.
    """
    engine = None
    if engines is not None and card is not None:
        engine = asyncio.create_task(_keep_engine(engines, card))
    serving = [asyncio.create_task(plane.run()) for plane in planes]
    await asyncio.sleep(0)  # they start; what follows takes a while
    batches = None if make_batches is None else make_batches()
    answering = [] if batches is None else [asyncio.create_task(batches.run())]
    stop = asyncio.create_task(signals.get())
    reaping = asyncio.create_task(_reap(engines, planes if batches is None else [*planes, batches]))
    working = [*serving, *([] if engine is None else [engine])]
    manager = ServiceManager.of()
    manager.follow(lambda: all(plane.serves() for plane in planes))
    try:
        await asyncio.wait([stop, *working], return_when=asyncio.FIRST_COMPLETED)
        if stop.done():
            manager.stopping()
        if batches is not None:
            batches.end()
        drain_s = ABRUPT_S if engine is not None and engine.done() else drain_timeout_s
        await _drain(planes, serving, engine, signals, drain_s)
    finally:
        if batches is not None:
            await _end_batches(batches, answering[0])
        for task in (stop, reaping, *working):
            task.cancel()
        if engines is not None:
            await asyncio.to_thread(engines.stop)
        failures = await asyncio.gather(*working, return_exceptions=True)
        manager.close()
    for failure in failures:
        if isinstance(failure, Exception):
            raise failure
    return 0


async def _end_batches(batches: KeptProcess, answering: asyncio.Task[None]) -> None:
    """See to the end of the batch process; what it has done is kept."""
    batches.end()
    if not (await asyncio.wait([answering], timeout=GRACE_S))[0]:
        batches.kill()
        answering.cancel()
    for failure in await asyncio.gather(answering, return_exceptions=True):
        if isinstance(failure, Exception):
            logger.error("Batches were not answered any more: %s.", failure, exc_info=failure)


async def _reap(engines: Engines | None, others: Seq[KeptProcess]) -> None:
    """Forget what children have left behind, as engines their other ranks."""
    died = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, died.set)
    died.set()  # those of before
    while True:
        await died.wait()
        await asyncio.sleep(REAP_AFTER_S)
        died.clear()
        kept = set() if engines is None else engines.pids
        if not reap_orphans({*kept, *(other.pid for other in others)}):
            died.set()


async def _keep_engine(engines: Engines, card: asyncio.Future[str]) -> None:
    card.set_result((await engines.start()).to_json())
    give_back_freed_memory()  # of the command line and of imports
    await engines.run()


def frontend_settings(config: EngineConfig, options: ServerOptions) -> dict[str, Any]:
    from weft.models.hub import local_source

    folder = local_source(config.model)
    if folder is not None and folder.is_file():  # whose text may have to be made of it first
        folder = folder.parent if (folder.parent / "tokenizer.json").is_file() else None
    return {
        "options": asdict(options),
        "folder": None if folder is None else str(folder),
        "tokenizer": config.tokenizer,
        "chat_template": config.chat_template,
        "base_seed": config.base_seed,
        "log_level": config.log_level,
        "log_format": config.log_format,
    }


async def _drain(
    frontends: Seq[KeptProcess],
    serving: list[asyncio.Task[None]],
    engine: asyncio.Task[None] | None,
    signals: asyncio.Queue[int],
    timeout_s: float,
) -> None:
    """Have the request planes finish open requests and end.

    After the time-out, at another signal, or when there will be no engine any more, they are asked
    to end what is open with an error; if that takes longer than a moment, or at a third signal,
    they are killed.
    """
    for patience_s in (timeout_s, GRACE_S):
        for frontend in frontends:
            frontend.end()
        over: list[asyncio.Task[Any]] = [
            asyncio.create_task(asyncio.wait(serving)),
            asyncio.create_task(signals.get()),
        ]
        if engine is not None and not engine.done():
            over.append(engine)
        await asyncio.wait(over, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        for task in over[:2]:
            task.cancel()
        if all(task.done() for task in serving):
            return
    for frontend in frontends:
        frontend.kill()
    await asyncio.wait(serving)


def on_signals() -> asyncio.Queue[int]:
    """The signals that end the server, as they come."""
    queue: asyncio.Queue[int] = asyncio.Queue()
    for number in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, queue.put_nowait, number)
    return queue


def fit_limits(options: ServerOptions) -> ServerOptions:
    from weft.server.places import fit_file_limit

    return fit_file_limit(options)


@contextlib.contextmanager
def listening(options: ServerOptions, classes: list[str]) -> Iterator[socket.socket]:
    """Listen on the address of the options; a Unix socket is removed at the end."""
    from weft.server.listen import listen

    with listen(options, classes) as bound:
        try:
            yield bound
        finally:
            if options.uds is not None:
                Path(options.uds).unlink(missing_ok=True)
