"""``weft batch``: starts an engine or finds the server, runs the batch, and says how it went."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.batch.http import HttpAsker
from weft.batch.lines import InputFile
from weft.batch.options import URL_CONCURRENCY, BatchOptions
from weft.batch.order import InOrder
from weft.batch.ports import Asker
from weft.batch.progress import Progress
from weft.batch.results import Results
from weft.batch.runner import Runner
from weft.core.config import EngineConfig
from weft.core.errors import ConfigError

EXIT_SOME_FAILED, EXIT_INTERRUPTED = 3, 130
SIGNALS = (signal.SIGINT, signal.SIGTERM)
WATCHDOG_S = 300.0  # as of a server
WAITING_SHARE = 2  # requests that are open, for each that the engine computes at once


def run_batch(path: str, options: BatchOptions, engine_settings: Mapping[str, Any]) -> int:
    """Run a batch to its end, or until Ctrl-C or SIGTERM; return the exit code.

    0: every line has its answer. 3: every line has a result, some of them errors. 130: interrupted.

    Raises:
        ConfigError: a setting or a file is wrong.
        WeftError: the engine does not start, nobody answers, or results cannot be written.
    """
    config = _check(options, engine_settings)
    source = InputFile(Path(path))
    if not len(source):
        raise ConfigError(f"'{path}' has no lines.", param="input")
    answered_by = "--url" if options.url is not None else f"--model {config.model}"
    results = Results(
        options.output_path,
        options.errors_path,
        source,
        answered_by,
        restart=options.restart,
        retry_errors=options.retry_errors,
    )
    with contextlib.closing(source), contextlib.closing(results):
        progress = Progress(results, len(source))
        interrupted = False
        if results.resumed < len(source):
            batch = _Batch(options, config, engine_settings, source, results, progress)
            try:
                interrupted = asyncio.run(batch.run())
            finally:
                progress.close()
        print(progress.summary())
        if interrupted:
            print("Give the same command again to go on.")
            return EXIT_INTERRUPTED
        return EXIT_SOME_FAILED if results.refused else 0


def _check(options: BatchOptions, engine_settings: Mapping[str, Any]) -> EngineConfig:
    if options.url is not None and engine_settings:
        name = next(iter(engine_settings))
        raise ConfigError(
            f"{name} is a setting of the engine, but --url asks a server that has its own.",
            param=name,
        )
    return EngineConfig.from_mapping(engine_settings)


@dataclass(frozen=True, slots=True)
class _Answering:
    """Who answers, how many at once, and what else has to go on meanwhile."""

    asker: Asker
    at_once: int
    name: str
    beside: asyncio.Task[None] | None = None


class _Batch:
    """One run, from the first process that it starts to the last that it ends."""

    def __init__(
        self,
        options: BatchOptions,
        config: EngineConfig,
        engine_settings: Mapping[str, Any],
        source: InputFile,
        results: Results,
        progress: Progress,
    ) -> None:
        self._options = options
        self._config = config
        self._engine_settings = engine_settings
        self._source = source
        self._results = results
        self._progress = progress
        self._runner: Runner | None = None
        self._main: asyncio.Task[Any] | None = None
        self._stopping = False

    async def run(self) -> bool:
        """Whether a signal ended it before all lines had their results."""
        self._main = asyncio.current_task()
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        answering = self._server() if self._options.url is not None else self._engine()
        try:
            async with answering as found:
                await self._answer(found)
        except asyncio.CancelledError:
            if not self._stopping:
                raise
        return self._results.answered + self._results.refused < len(self._source)

    async def _answer(self, found: _Answering) -> None:
        self._progress.start(f"{found.name} answers up to {found.at_once} at once")
        order = InOrder(len(self._source), self._results, found.at_once)
        self._runner = Runner(self._source, self._results, found.asker, order, self._progress.watch)
        running = asyncio.create_task(self._runner.run())
        both = {running} if found.beside is None else {running, found.beside}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not running.done() and found.beside is not None:
                found.beside.result()  # raises why there is no engine any more
            await running
        finally:
            running.cancel()
            await asyncio.wait([running])

    @contextlib.asynccontextmanager
    async def _server(self) -> AsyncIterator[_Answering]:
        options = self._options
        assert options.url is not None
        asker = HttpAsker(
            options.url,
            options.api_key or os.environ.get("OPENAI_API_KEY"),
            service_tier=options.service_tier,
            retries=options.retries,
            timeout_s=options.timeout_s,
            patience_s=options.patience_s,
        )
        try:
            await asker.check()
            yield _Answering(asker, options.concurrency or URL_CONCURRENCY, asker.url)
        finally:
            await asker.aclose()

    @contextlib.asynccontextmanager
    async def _engine(self) -> AsyncIterator[_Answering]:
        """An engine of one's own: one that dies is replaced, and what it was at goes on."""
        from weft.engine.keeper import EngineKeeper
        from weft.ring.client import RingClient
        from weft.ring.segment import create_ring

        ring = create_ring()
        keeper = EngineKeeper(self._engine_settings, [ring], standby=False, watchdog_s=WATCHDOG_S)
        client = RingClient(ring)
        keeping: asyncio.Task[None] | None = None
        try:
            starting = asyncio.create_task(keeper.start())
            await asyncio.sleep(0)  # the engine loads while the text part is imported
            from weft.api import Builder, ModelCard
            from weft.batch.engine import EngineAsker
            from weft.text import Tokenizer
            from weft.text.template import find_template

            served = await starting
            config, folder = self._config, Path(served.folder)
            tokenizer = Tokenizer.load(Path(config.tokenizer) if config.tokenizer else folder)
            template = find_template(folder, config.chat_template)
            card = ModelCard.of(served, self._options.served_model_name, config.base_seed)
            client.attach(asyncio.get_running_loop())
            keeping = asyncio.create_task(keeper.run())
            asker = EngineAsker(client, Builder(tokenizer, template, card), config.base_seed)
            at_once = self._options.concurrency or WAITING_SHARE * served.max_num_seqs
            yield _Answering(asker, at_once, served.name, keeping)
        finally:
            if keeping is not None:
                keeping.cancel()
                await asyncio.wait([keeping])
            await asyncio.to_thread(keeper.stop)
            client.close()
            ring.close()

    def _on_signal(self) -> None:
        """At the first signal finish what is open; at the second leave."""
        if self._stopping:
            self._progress.close()
            print("weft: left at once; what is done is kept.", file=sys.stderr, flush=True)
            os._exit(EXIT_INTERRUPTED)  # the engine ends with this process
        self._stopping = True
        if self._runner is None:
            assert self._main is not None
            self._main.cancel()
            return
        self._progress.say(
            f"finishing {self._runner.open} open requests; Ctrl-C again leaves at once."
        )
        self._runner.stop()
