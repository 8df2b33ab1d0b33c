"""The batch process: answers the batches of a data folder with the engine at its ring.

    python -m weft.server.batch_process --ring FDS --parent PID --signs FD --board FD --number N

Settings come as JSON on standard input. The parent keeps an engine at the ring. A byte is written
to the descriptor of signs several times a second. The process ends by itself when there has been
nothing to do for a while; whoever keeps it starts it again when the data folder's bell rings.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

from weft.api import Builder, ModelCard
from weft.api.card import ApiLimits
from weft.batch.choice import choose_order
from weft.batch.database import reachable
from weft.batch.engine import EngineAsker
from weft.batch.folder import StoreLimits
from weft.batch.forecast import predict_end
from weft.batch.kept_lengths import changed_nodes
from weft.batch.memory import KvMemory
from weft.batch.orders import ServedOrders
from weft.batch.pace import PaceMeter, TokenPace
from weft.batch.pool import Pool
from weft.batch.promotion import BATCH_CLASS
from weft.batch.records import BatchRecord
from weft.batch.session import Desk, ElsewhereError, Session, over_because
from weft.batch.store import BatchStore
from weft.batch.webhook_settings import WebhookSettings
from weft.batch.webhooks import WebhookSender
from weft.blend.density import UNWEIGHED
from weft.blend.jobs import Room
from weft.blend.lengths import LengthTable
from weft.core.errors import WeftError
from weft.core.logs import log_level, set_up_logs
from weft.core.ports import EngineClient
from weft.core.process import die_with, raise_file_limit, set_process_title
from weft.core.served import ServedModel
from weft.ring.client import RingClient
from weft.ring.link import parse_ring
from weft.text import Tokenizer
from weft.text.detect import choose_dialect
from weft.text.template import find_template

EXIT_REFUSED = 3  # of a batch process that cannot work with these settings
LOOK_S = 0.2
PROGRESS_S = 1.0
SAVE_S = 5.0  # what is known of output lengths
REFRESH_S = 5.0  # batches are read again, even if nobody has written
AGAIN_S = 5.0  # until a batch is tried again that could not go on, or that another process has
IDLE_S = 60.0
MOST_SESSIONS = 32  # batches at once
WAITING_SHARE = 2  # lines that are open, for each that the engine computes at once
MOST_OPEN = 256

logger = logging.getLogger("weft.batch")


class CountsLines(Protocol):
    """Counts what lines use, where it counts."""

    def client_for(self, payer: str) -> EngineClient:
        """A client whose sequences are counted for the key of this name."""

    def show(self) -> None:
        """Let others see the counts; called several times a second."""

    def close(self) -> None:
        """Let them see the last counts."""


def main(count: Callable[[RingClient, Mapping[str, Any], argparse.Namespace], CountsLines]) -> None:
    """Answer batches until SIGTERM, or until there are none.

    Args:
        count: makes what counts, of client, settings and arguments.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--ring", required=True)
    for name in ("--parent", "--signs", "--board", "--number"):
        parser.add_argument(name, type=int, required=True)
    arguments = parser.parse_args()
    set_process_title("weft-batches")
    raise_file_limit()
    die_with(arguments.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when Ctrl-C ends the server
    settings = json.load(sys.stdin)
    set_up_logs("batches", log_level(settings["log_level"]), settings["log_format"])
    try:
        asyncio.run(_work(arguments, settings, count))
    except WeftError as error:
        print(f"weft: batches: {error.message}", file=sys.stderr)
        sys.exit(EXIT_REFUSED)


async def _work(
    arguments: argparse.Namespace,
    settings: Mapping[str, Any],
    count: Callable[[RingClient, Mapping[str, Any], argparse.Namespace], CountsLines],
) -> None:
    served = ServedModel.from_json(settings["card"])
    client = RingClient(parse_ring(arguments.ring))
    client.attach(asyncio.get_running_loop())
    thread = ThreadPoolExecutor(1, thread_name_prefix="weft-data")
    planner = ThreadPoolExecutor(1, thread_name_prefix="weft-order")
    limits = StoreLimits(**settings["limits"])
    webhooks = WebhookSettings(**settings["webhooks"])
    store = thread.submit(
        BatchStore, Path(settings["data_dir"]), limits, webhook_urls=webhooks.urls
    ).result()
    counting = count(client, settings, arguments)
    try:
        builder = _builder(settings, served)
        root = EngineAsker(client, builder, settings["base_seed"])
        kv_tokens = max(served.kv_blocks.values()) * served.block_size
        chosen = choose_order(settings["batch_order"], asdict(served), forecast=True, weighed=False)
        logger.info("Lines of batches go in %s.", chosen)
        # What waits in the engine's queue is out of the hands of an order that weighs the memory.
        waiting = 1 if chosen.forecast else WAITING_SHARE
        most = min(MOST_OPEN, waiting * served.max_num_seqs)
        orders = ServedOrders(
            chosen,
            Room(kv_tokens, most, served.block_size),
            UNWEIGHED,
            planner,
            KvMemory(kv_tokens, client.info),
            await load_lengths(thread, store, builder.card.identity),
        )
        desk = Desk(
            store=store,
            thread=thread,
            pool=Pool(most, FreeRows(client) if settings["queue_limited"] else None),
            make_asker=lambda mark, payer: EngineAsker(
                counting.client_for(payer), builder, settings["base_seed"], beside=root, mark=mark
            ),
            orders=orders,
            max_lines=settings["max_batch_lines"],
            salted=settings["key_salt"],
            promotion=settings["batch_promotion"],
        )
        sender = WebhookSender(desk.call, webhooks) if webhooks.urls else None
        work = BatchWork(desk, builder.card.identity, arguments.signs, sender, counting.show)
        await work.run()
    finally:
        counting.close()
        client.close()
        thread.submit(store.close).result()
        thread.shutdown()
        planner.shutdown()


def _builder(settings: Mapping[str, Any], served: ServedModel) -> Builder:
    tokenizer = Tokenizer.load(Path(settings["tokenizer"] or served.folder))
    template = find_template(Path(served.folder), settings["chat_template"])
    card = ModelCard.of(served, tuple(settings["served_model_name"]), settings["base_seed"])
    limits = ApiLimits(
        settings["max_sequences"], settings["max_prompt_bytes"], settings["request_chat_template"]
    )
    parsers = settings["tool_parser"], settings["reasoning_parser"]
    dialect = choose_dialect(template, *parsers, card.weights.family)
    builder = Builder(tokenizer, template, card, limits, dialect)
    return builder.under(replace(builder.classes, default=BATCH_CLASS))  # which answers name


async def load_lengths(thread: Executor, store: BatchStore, identity: str) -> LengthTable:
    """What is known of the model's output lengths. Raises as `reachable`."""

    def load() -> LengthTable:
        with reachable():
            return store.lengths.load(identity)

    return await asyncio.get_running_loop().run_in_executor(thread, load)


class FreeRows:
    """Room where requests are refused that would have to wait: lines must not wait before them.

    What the engine says of itself is as old as its last step, so lines that went since then count.
    """

    def __init__(self, client: RingClient) -> None:
        self._client = client
        self._said_ns = 0
        self._gone = 0

    def free(self) -> bool:
        info = self._client.info()
        if info.updated_ns != self._said_ns:
            self._said_ns, self._gone = info.updated_ns, 0
        return not info.waiting and info.running + self._gone < info.max_num_seqs

    def take(self) -> None:
        self._gone += 1


class BatchWork:
    """Finds batches that have not ended, and has a session for each.

    Args:
        identity: of the model; lines of batches for others are not answered here.
        signs: descriptor that gets a byte again and again; -1 for none.
        sender: of webhooks; runs as long.
        show_counts: called several times a second.
    """

    def __init__(
        self,
        desk: Desk,
        identity: str,
        signs: int = -1,
        sender: WebhookSender | None = None,
        show_counts: Callable[[], None] = lambda: None,
    ) -> None:
        self._desk = desk
        self._show_counts = show_counts
        self._identity = identity
        self._signs = signs
        self._sender = sender
        self._records: list[BatchRecord] = []
        self._sessions: dict[str, Session] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._not_before: dict[str, float] = {}  # by batch, on the monotonic clock
        self._meter = PaceMeter(desk.pool)
        self._pace: TokenPace | None = None
        self._pace_read = False
        self._stale = True
        self._refreshed = self._shown = self._saved = 0.0
        self._busy = time.monotonic()
        self._ending = asyncio.Event()

    async def run(self) -> None:
        """Work until SIGTERM, or until there has been nothing to do for a while."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._ending.set)
        sending = None if self._sender is None else asyncio.create_task(self._sender.run())
        try:
            while not self._ending.is_set() and time.monotonic() - self._busy < IDLE_S:
                self._sign()
                self._show_counts()
                try:
                    await self._look()
                except WeftError as error:
                    logger.warning("%s", error.message)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), LOOK_S)
        finally:
            with contextlib.suppress(WeftError):
                await self._save_lengths()
            tasks = [*self._tasks.values(), *([] if sending is None else [sending])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _sign(self) -> None:
        if self._signs >= 0:
            with contextlib.suppress(BlockingIOError):
                os.write(self._signs, b".")

    async def _look(self) -> None:
        """See what has changed: new batches, cancelled ones, and those whose time is over."""
        now = time.monotonic()
        changed = await self._desk.call(lambda store: store.changed())
        if changed or self._stale or now - self._refreshed > REFRESH_S:
            self._stale, self._refreshed = False, now
            self._records = await self._desk.call(lambda store: store.unfinished())
        self._desk.pool.pause(not self._desk.store.files_folder.has_room())
        self._desk.pool.wake_next()
        self._forget_ended()
        for record in self._records:
            session = self._sessions.get(record.id)
            if session is not None:
                session.see(record)
        for record in self._next():
            self._start(record)
        due_at = None if self._sender is None else self._sender.next_due
        if due_at is not None and due_at < time.time() + IDLE_S:
            self._busy = now
        if now - self._shown > PROGRESS_S:
            self._shown = now
            await self._show()

    def _next(self) -> list[BatchRecord]:
        """Batches to begin now: of each key the one that is due first, then of each the second."""
        mine = [
            r for r in self._records if r.served == self._identity or over_because(r) is not None
        ]
        if mine:
            self._busy = time.monotonic()
        ranks: dict[bytes, int] = {}
        ranked = []
        for record in mine:  # by due time
            rank = ranks[record.owner] = ranks.get(record.owner, -1) + 1
            ranked.append((rank, record.expires_at, record))
        ranked.sort(key=lambda entry: entry[:2])
        room = MOST_SESSIONS - len(self._sessions)
        now = time.monotonic()
        waiting = [
            record
            for _, _, record in ranked
            if record.id not in self._sessions and self._not_before.get(record.id, 0.0) <= now
        ]
        return waiting[:room]

    def _start(self, record: BatchRecord) -> None:
        session = self._sessions[record.id] = Session(record, self._desk)
        self._tasks[record.id] = asyncio.create_task(session.run())

    def _forget_ended(self) -> None:
        for batch_id, task in list(self._tasks.items()):
            if not task.done():
                continue
            del self._tasks[batch_id], self._sessions[batch_id]
            self._stale = True
            self._not_before.pop(batch_id, None)
            error = None if task.cancelled() else task.exception()
            if error is not None:
                self._not_before[batch_id] = time.monotonic() + AGAIN_S
                if isinstance(error, WeftError):
                    if not isinstance(error, ElsewhereError):
                        logger.warning("Batch %s waits: %s", batch_id, error.message)
                else:
                    logger.error("Batch %s: %s", batch_id, error, exc_info=error)
            self._records = [record for record in self._records if record.id != batch_id]

    def _predict(self, record: BatchRecord) -> float | None:
        if self._pace is None:
            return None
        return predict_end(self._pace, record, self._records, time.time())

    async def _show(self) -> None:
        """Let everybody see how far batches have come, and note how fast that was."""
        row = self._meter.look(time.monotonic())
        if row is not None:
            await self._desk.call(lambda store: store.paces.add(self._identity, row))
        if row is not None or not self._pace_read:
            self._pace = await self._desk.call(lambda store: store.paces.pace(self._identity))
            self._pace_read = True
        found = [
            (batch_id, session.progress(self._predict))
            for batch_id, session in self._sessions.items()
        ]
        changed = [(batch_id, columns) for batch_id, columns in found if columns]
        if changed:
            await self._desk.call(lambda store: store.show_progress(changed))
        if time.monotonic() - self._saved > SAVE_S:
            await self._save_lengths()

    async def _save_lengths(self) -> None:
        """Keep what is known of output lengths."""
        self._saved = time.monotonic()
        lengths = self._desk.orders.lengths
        nodes = changed_nodes(lengths)
        if not nodes:
            return
        try:
            await self._desk.call(lambda store: store.lengths.save(self._identity, nodes))
        except WeftError:
            lengths.touched.update(node.number for node in nodes)
            raise
