"""``weft batch``: starts an engine or connects to a server, runs the batch, reports the outcome."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from weft.api import Builder, ModelCard
from weft.batch.choice import ChosenOrder, choose_order
from weft.batch.chunks import ChunkedOrder
from weft.batch.engine import EngineAsker
from weft.batch.fleet import Fleet, Member, PlannedParts, in_random_order
from weft.batch.http import HttpAsker
from weft.batch.lines import InputFile
from weft.batch.memory import KvMemory
from weft.batch.options import URL_CONCURRENCY, BatchOptions
from weft.batch.order import InOrder, Planned, Prompt, Prompts, plan, read_prompts
from weft.batch.ports import BatchLine, LineOrder, NobodyAnswersError
from weft.batch.progress import ProgressBar
from weft.batch.prompts import guess_prompt
from weft.batch.results import Results
from weft.batch.runner import Runner
from weft.blend.density import UNWEIGHED, Rates
from weft.blend.jobs import Room
from weft.blend.lengths import LengthTable
from weft.blend.sheets import sheet_rates
from weft.core.config import EngineConfig
from weft.core.errors import ConfigError, ProfileError, WeftError
from weft.cost.fit import Fitted, ProfileKey, profile_path
from weft.cost.hardware import hardware
from weft.cost.shape import ModelShape, model_shape
from weft.text import Tokenizer
from weft.text.template import find_template

EXIT_SOME_FAILED, EXIT_INTERRUPTED = 3, 130
SIGNALS = (signal.SIGINT, signal.SIGTERM)
WATCHDOG_S = 300.0  # as of a server
WAITING_SHARE = 2  # requests that are open, for each that the engine computes at once
WHOLE_BYTES = 64 * 2**20  # of an input; longer ones are put in order in chunks
BLOCK_TOKENS = 16  # in which servers that do not say it share prefixes, as most do


def run_batch(path: str, options: BatchOptions, engine_settings: Mapping[str, Any]) -> int:
    """Run a batch to its end, or until Ctrl-C or SIGTERM; return the exit code.

    0: every line has its answer. 3: every line has a result, some of them errors. 130: interrupted.

    Raises:
        ConfigError: a setting or a file is wrong.
        WeftError: the engine does not start, no server answers, or results cannot be written.
    """
    config = _check(options, engine_settings)
    source = InputFile(Path(path))
    if not len(source):
        raise ConfigError(f"'{path}' has no lines.", param="input")
    answered_by = "--url" if options.url else f"--model {config.model}"
    results = Results(
        options.output_path,
        options.errors_path,
        source,
        answered_by,
        restart=options.restart,
        retry_errors=options.retry_errors,
    )
    with contextlib.closing(source), contextlib.closing(results):
        progress = ProgressBar(results, len(source))
        interrupted = False
        if results.resumed < len(source):
            batch = _Batch(options, config, engine_settings, source, results, progress)
            try:
                interrupted = asyncio.run(batch.run())
            except WeftError:
                if progress.ended:
                    print(progress.summary())
                raise
            finally:
                progress.close()
        print(progress.summary())
        if interrupted:
            print("Run the same command again to continue.")
            return EXIT_INTERRUPTED
        return EXIT_SOME_FAILED if results.refused else 0


def _check(options: BatchOptions, engine_settings: Mapping[str, Any]) -> EngineConfig:
    if options.url and engine_settings:
        name = next(iter(engine_settings))
        raise ConfigError(
            f"{name} is a setting of the engine, but --url asks a server that has its own.",
            param=name,
        )
    if options.hardware is not None:
        hardware(options.hardware)
    if options.shape is not None:
        model_shape(options.shape)
    return EngineConfig.from_mapping(engine_settings)


def _shape(folder: Path) -> ModelShape:
    """The sizes of a model. Raises ConfigError if its folder does not say them."""
    try:
        return ModelShape.from_config(json.loads((folder / "config.json").read_bytes()))
    except (OSError, ValueError):
        raise ConfigError(
            f"Order blend reads the model's sizes from '{folder / 'config.json'}', which cannot be "
            "read.",
            param="order",
        ) from None


@dataclass(frozen=True, slots=True)
class _Answering:
    """The asker, and the facts of it that an order needs.

    Attributes:
        at_once: requests that are open together.
        chosen: the order of the lines.
        prompt: reads the prompt of a line.
        kv_tokens: that the KV memory holds; None if that is not known.
        rates: the costs of the model's compute and memory; None if the order needs none.
        beside: what has to go on meanwhile.
    """

    name: str
    asker: EngineAsker | HttpAsker | Fleet
    at_once: int
    chosen: ChosenOrder
    prompt: Callable[[BatchLine], Prompt | None]
    kv_tokens: int | None
    block_size: int
    rates: Rates | None
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
        progress: ProgressBar,
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
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weft-order")

    async def run(self) -> bool:
        """Whether a signal ended it before all lines had their results."""
        self._main = asyncio.current_task()
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        urls = self._options.url
        ways = self._engine, self._server, self._servers
        answering = ways[min(len(urls), 2)]()
        try:
            async with answering as found:
                await self._answer(found)
        except asyncio.CancelledError:
            if not self._stopping:
                raise
        return self._results.answered + self._results.refused < len(self._source)

    async def _answer(self, found: _Answering) -> None:
        answering = f"{found.name} answers up to {found.at_once} at once"
        order: LineOrder = InOrder(len(self._source), self._results, found.at_once)
        preparing: asyncio.Task[None] | None = None
        if isinstance(found.asker, Fleet):
            order = found.asker
            order.changed = self._look
        elif found.chosen.kind != "fcfs":
            order = planned = await self._order(found)
            planned.wake = self._look
            if isinstance(found.asker, EngineAsker):
                found.asker.progress = partial(self._grown, planned)
            asker = found.asker
            asker.started = partial(self._started, planned)
            planned.full = lambda: asker.waiting > 0
            if isinstance(planned, ChunkedOrder):
                preparing = asyncio.create_task(planned.prepare())
        self._progress.say(str(found.chosen))
        self._progress.start(answering)
        self._runner = Runner(self._source, self._results, found.asker, order, self._progress.watch)
        running = asyncio.create_task(self._runner.run())
        beside = [task for task in (found.beside, preparing) if task is not None]
        try:
            while not running.done():
                await asyncio.wait({running, *beside}, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in beside if task.done()]:
                    task.result()  # raises why there is no engine any more
                    beside.remove(task)
            await running
        finally:
            mine = [running] if preparing is None else [running, preparing]
            for task in mine:
                task.cancel()
            await asyncio.wait(mine)
            self._thread.shutdown()
            if isinstance(found.asker, Fleet):
                self._progress.say(found.asker.report())

    def _look(self) -> None:
        """There may be a line to ask now."""
        if self._runner is not None:
            self._runner.look()

    async def _prompts(self, prompt_of: Callable[[BatchLine], Prompt | None]) -> Prompts:
        self._progress.say("reading all prompts to put them in order")
        return await read_prompts(self._source, self._results, self._results.outputs(), prompt_of)

    async def _order(self, found: _Answering) -> Planned | ChunkedOrder:
        """The order of the lines: as a whole, or of a long file in chunks."""
        kind = found.chosen.kind
        if kind == "blend" and found.kv_tokens is None:
            raise ConfigError(
                f"{found.name} does not report the size of its KV memory; order blend needs "
                "--kv-tokens NUMBER.",
                param="kv_tokens",
            )
        room = Room(found.kv_tokens or 1, found.at_once, found.block_size)
        lengths = LengthTable() if found.chosen.forecast else None
        planning = partial(plan, kind, room=room, rates=found.rates or UNWEIGHED, lengths=lengths)
        if kind == "dfs" and self._source.path.stat().st_size > WHOLE_BYTES:
            memory = KvMemory(room.kv_tokens)
            return ChunkedOrder(
                self._source, self._results, found.prompt, planning, self._thread, memory
            )
        prompts = await self._prompts(found.prompt)
        planned = await asyncio.to_thread(planning, prompts)
        planned.look_on(self._thread)
        return planned

    def _choose(
        self, facts: Mapping[str, Any], rates: Rates | None, *, forecast: bool
    ) -> ChosenOrder:
        weighed = rates is not None
        return choose_order(self._options.order, facts, forecast=forecast, weighed=weighed)

    def _rates(self, shape: Callable[[], ModelShape], engine: Mapping[str, Any]) -> Rates | None:
        """What order blend weighs with: a sheet if one is named, else the engine's own profile.

        Args:
            engine: what is known of it, by the names of ``ServedModel``.

        Raises:
            ConfigError: there is neither.
        """
        name = self._options.hardware
        if self._options.order == "auto" and not engine.get("overlaps"):
            return None
        if self._options.order not in ("auto", "blend"):
            return None
        if name is not None:
            return sheet_rates(shape(), hardware(name), engine)
        key = engine.get("profile_key")
        try:
            if key is None:
                raise ProfileError("This server does not report its profile.")
            path = profile_path(ProfileKey(**key), self._config.profile)
            rates = Rates.of_profile(Fitted.load(path, ProfileKey(**key)))
        except ProfileError as error:
            if self._options.order == "auto":
                return None
            sheet = "--hardware NAME" + (" --shape NAME" if self._options.url else "")
            raise ConfigError(
                f"Order blend weighs compute against memory by a data sheet ({sheet}) or by weft's "
                f"own profile. {error.message}",
                param="hardware",
            ) from None
        self._progress.say(f"compute and memory are weighed by the profile {path}")
        return rates

    def _grown(self, order: Planned | ChunkedOrder, number: int, tokens: int) -> None:
        """Report the progress of the oldest line to the order, which may release another one."""
        order.progress(self._source.index(number), tokens)
        self._look()

    def _started(self, order: Planned | ChunkedOrder, number: int, computing: bool = False) -> None:
        """Tell the order that the engine has got a line; if it had to wait, others may go now."""
        order.started(self._source.index(number), computing)
        if not computing:
            self._look()

    def _at_once(self, computed: int | None, forecast: bool = False) -> int:
        """Requests to be open together, of an engine that computes so many at once."""
        if self._options.concurrency is not None:
            return self._options.concurrency
        if computed is None:
            return URL_CONCURRENCY
        # What waits in the engine's queue is out of the hands of an order that weighs the memory.
        return computed if forecast else WAITING_SHARE * computed

    def _asker(self, url: str) -> HttpAsker:
        options = self._options
        asker = HttpAsker(
            url,
            options.api_key or os.environ.get("OPENAI_API_KEY"),
            service_tier=options.service_tier,
            retries=options.retries,
            timeout_s=options.timeout_s,
            patience_s=options.patience_s,
        )
        asker.say = self._progress.say
        return asker

    @contextlib.asynccontextmanager
    async def _servers(self) -> AsyncIterator[_Answering]:
        """Servers that share the lines; those that do not answer yet may come later."""
        askers = [self._asker(url) for url in self._options.url]
        if len({asker.url for asker in askers}) < len(askers):
            raise ConfigError("Each --url must be another server.", param="url")
        watching: asyncio.Task[None] | None = None
        try:
            members, facts = await self._members(askers)
            left, parts = await self._parts(facts)
            number_of, patience_s = self._source.number, self._options.patience_s
            fleet = Fleet(members, left, len(left), number_of, parts, patience_s)
            fleet.say = self._progress.say
            watching = asyncio.create_task(fleet.watch())
            at_once = sum(member.at_once for member in members)
            name = f"a fleet of {len(members)} servers"
            chosen = self._choose(facts, None, forecast=False)
            yield _Answering(name, fleet, at_once, chosen, guess_prompt, None, 1, None, watching)
        finally:
            if watching is not None:
                watching.cancel()
                await asyncio.wait([watching])
            for asker in askers:
                await asker.aclose()

    async def _members(self, askers: list[HttpAsker]) -> tuple[list[Member], dict[str, Any]]:
        """A member for each server, and what the first one of those that answer says of itself.

        Raises:
            NobodyAnswersError: none answers.
        """
        found = await asyncio.gather(*(asker.check() for asker in askers), return_exceptions=True)
        members = []
        for asker, facts in zip(askers, found, strict=True):
            if isinstance(facts, dict):
                members.append(Member(asker, self._at_once(facts.get("max_num_seqs"))))
            elif isinstance(facts, NobodyAnswersError):
                members.append(Member(asker, self._at_once(None), lost=facts.message))
            else:
                raise facts
        first = next((facts for facts in found if isinstance(facts, dict)), None)
        lost = [member.lost for member in members if member.lost is not None]
        if first is None:
            raise NobodyAnswersError("; ".join(lost))
        for why in lost:
            self._progress.say(f"the batch begins without a server: {why}")
        return members, first

    async def _parts(self, facts: dict[str, Any]) -> tuple[list[int], PlannedParts | None]:
        """Indices of the lines that are left, and what cuts them into parts for several servers."""
        options = self._options
        left = [index for index in range(len(self._source)) if not self._results.done(index)]
        if options.order == "fcfs":
            return left, None
        rates = self._rates(partial(model_shape, options.shape or ""), facts) or UNWEIGHED
        prompts = await self._prompts(guess_prompt)
        others = set(prompts.others)
        planned = in_random_order([index for index in left if index not in others])
        block_size = facts.get("block_size", BLOCK_TOKENS)
        kind = "dfs" if options.order == "auto" else options.order
        making = asyncio.to_thread(PlannedParts, kind, prompts, rates, block_size)
        parts = await making if prompts.tokens else None
        return [*planned, *prompts.others], parts

    @contextlib.asynccontextmanager
    async def _server(self) -> AsyncIterator[_Answering]:
        options = self._options
        asker = self._asker(options.url[0])
        try:
            facts = await asker.check()
            blocks, block_size = facts.get("kv_blocks"), facts.get("block_size", BLOCK_TOKENS)
            shape = partial(model_shape, options.shape or "")
            rates = self._rates(shape, facts)
            # Nothing is heard of lines before they end, and others may use the memory, too.
            chosen = self._choose(facts, rates, forecast=False)
            yield _Answering(
                asker.url,
                asker,
                self._at_once(facts.get("max_num_seqs"), chosen.kind == "blend"),
                chosen,
                guess_prompt,
                options.kv_tokens or (max(blocks.values()) * block_size if blocks else None),
                block_size,
                rates,
            )
        finally:
            await asker.aclose()

    @contextlib.asynccontextmanager
    async def _engine(self) -> AsyncIterator[_Answering]:
        """An own engine; one that dies is replaced, and its requests continue."""
        from weft.engine.keeper import EngineKeeper
        from weft.engine.links import EngineLinks
        from weft.ring.client import RingClient
        from weft.ring.segment import ring_of

        ring = ring_of(self._config, self._options.concurrency or 0)
        keeper = EngineKeeper(
            self._engine_settings, EngineLinks([ring]), standby=False, watchdog_s=WATCHDOG_S
        )
        client = RingClient(ring)
        keeping: asyncio.Task[None] | None = None
        try:
            served = await keeper.start()
            config, folder = self._config, Path(served.folder)
            tokenizer = Tokenizer.load(Path(config.tokenizer) if config.tokenizer else folder)
            template = find_template(folder, config.chat_template)
            card = ModelCard.of(served, self._options.served_model_name, config.base_seed)
            client.attach(asyncio.get_running_loop())
            keeping = asyncio.create_task(keeper.run())
            asker = EngineAsker(client, Builder(tokenizer, template, card), config.base_seed)
            rates = self._rates(partial(_shape, folder), asdict(served))
            chosen = self._choose(asdict(served), rates, forecast=True)
            yield _Answering(
                served.name,
                asker,
                self._at_once(served.max_num_seqs, chosen.forecast),
                chosen,
                asker.prompt,
                max(served.kv_blocks.values()) * served.block_size,
                served.block_size,
                rates,
                keeping,
            )
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
            print("weft: stopped at once; results so far are kept.", file=sys.stderr, flush=True)
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
