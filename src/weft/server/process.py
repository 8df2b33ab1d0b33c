"""The request-plane process: tokenises, serves HTTP, and talks to the engine through a ring.

    python -m weft.server.process --number N --ring FDS --socket FD --card FD --board FD
                                  --quotas FD --parent PID [--targets FD] [--models FDS]
                                  [--announce]

Settings come as JSON on standard input, the model's facts as one JSON line on the card descriptor
once the engine is ready. The parent keeps an engine at the ring: while there is none, requests
wait in it. Several of these processes may share the listening socket. With several models ring,
board and targets are given for each of them, and the line on the card descriptor is of the first
one that is awake.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from weft.api import ModelCard
from weft.core.class_table import describe_classes
from weft.core.errors import ModelChangedError, RingLinkError, RingRefusedError, WeftError
from weft.core.logs import log_level, notice, set_up_logs
from weft.core.process import (
    beat_s,
    die_with,
    give_back_freed_memory,
    raise_file_limit,
    set_process_title,
)
from weft.core.schedulers import POLICIES
from weft.core.served import ServedModel
from weft.core.settings import format_bytes
from weft.core.types import ServiceClass
from weft.ring.client import RingClient
from weft.ring.layout import EngineInfo, LoggedRecovery, LoggedStep
from weft.ring.link import RingAccess, parse_ring
from weft.ring.model_board import ModelRow
from weft.ring.port import FIRST_DELAY_S, LONGEST_DELAY_S
from weft.ring.progress import Progress
from weft.ring.segment import RingFds
from weft.ring.target_board import TargetBoard
from weft.server.counts import Board
from weft.server.keeper import EXIT_CHANGED, EXIT_REFUSED
from weft.server.main import run_server
from weft.server.options import ServerOptions
from weft.server.place_metrics import places_of
from weft.server.probe import EngineLoad
from weft.server.quota_board import QuotaBoard
from weft.text import Tokenizer
from weft.text.renderer import shared_renderer
from weft.text.template import find_template, has_template

SETTLED_S = 2.0  # after the start
logger = logging.getLogger("weft")

_ALWAYS_AWAKE = ModelRow("awake", starts=1)
KEPT_WEIGHTS = {"mapped": "mapped from the cache", "packed": "packed"}


def prepare() -> None:
    """Do what every request plane does, whatever its arguments will be."""
    import uvloop  # noqa: F401


def main() -> None:
    """Serve until SIGTERM; exit code 0 then."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ring", action="append", required=True)
    parser.add_argument("--board", type=int, action="append", required=True)
    for name in ("--socket", "--card", "--parent", "--quotas", "--number"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--targets", type=int, action="append")  # without it there are no others
    parser.add_argument("--models")
    parser.add_argument("--announce", action="store_true")
    arguments = parser.parse_args()
    set_process_title("weft-frontend")
    raise_file_limit()
    die_with(arguments.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when Ctrl-C ends the server
    settings = json.load(sys.stdin)
    known = settings["folder"]
    if known is None or has_template(Path(known), settings["chat_template"]):
        with contextlib.suppress(WeftError):  # which the first template meets again
            shared_renderer().start()  # it is there before the engine is
    # While the engine is built.
    early = _load_early(settings) if arguments.models is None else None
    with os.fdopen(arguments.card) as card:
        line = card.readline()
    if not line:
        sys.exit(1)  # the engine did not start; the parent tells why
    served = ServedModel.from_json(line)
    set_up_logs("frontend", log_level(settings["log_level"]), settings["log_format"])
    try:
        if arguments.models is not None:
            from weft.server.several_process import serve_several

            serve_several(arguments, settings, served)
        else:
            _serve(arguments, settings, served, early)
    except WeftError as error:
        print(f"weft: {error.message}", file=sys.stderr)
        sys.exit(EXIT_CHANGED if isinstance(error, ModelChangedError) else EXIT_REFUSED)


def _load_early(settings: Mapping[str, Any]) -> tuple[Path, Tokenizer] | None:
    """The tokeniser and its folder, where that is known before the engine has found its model.

    Errors wait until the engine is there: its own may say more.
    """
    folder = settings["tokenizer"] or settings["folder"]
    if folder is None:
        return None
    with contextlib.suppress(WeftError):
        return Path(folder), Tokenizer.load(Path(folder))
    return None


def _serve(
    arguments: argparse.Namespace,
    settings: Mapping[str, Any],
    served: ServedModel,
    early: tuple[Path, Tokenizer] | None,
) -> None:
    options = ServerOptions(**settings["options"])
    folder = Path(settings["tokenizer"] or served.folder)
    tokenizer = early[1] if early and early[0] == folder else Tokenizer.load(folder)
    template = find_template(Path(served.folder), settings["chat_template"])
    if template is None:
        shared_renderer().close()
    ring = parse_ring(arguments.ring[0])
    board = Board(arguments.board[0], arguments.number)
    client = meet_ring(ring, board, beat_s(options.watchdog_s))
    client.on_model_change = lambda: os.kill(os.getpid(), signal.SIGTERM)

    def on_listening(address: str) -> None:
        loop = asyncio.get_running_loop()
        client.attach(loop)
        loop.call_later(SETTLED_S, give_back_freed_memory)  # by reading the tokeniser
        if arguments.announce:
            planes = options.frontends or 1
            by = f" by {planes} request planes" if planes > 1 else ""
            isa = f", instruction set {served.isa}" if served.isa else ""
            if isinstance(ring, RingAccess):
                tell_page(options, address)
                notice(f"serving {served.name} on {address}{by}, with the engine at {ring.address}")
                return
            for line in _about(served):
                notice(line)
            tell_page(options, address)
            notice(f"serving {served.name} on {address}{by}{isa}")

    try:
        run_server(
            client,
            tokenizer,
            template,
            ModelCard.of(served, options.served_model_name, settings["base_seed"]),
            options,
            probe=RingProbe(client, served),
            sockets=[socket.socket(fileno=arguments.socket)],
            on_listening=on_listening,
            board=board,
            quotas=QuotaBoard(arguments.quotas, arguments.number),
            targets=None if arguments.targets is None else TargetBoard(arguments.targets[0]),
        )
    finally:
        client.leave()
    if client.model_change is not None:
        raise client.model_change


def tell_page(options: ServerOptions, address: str) -> None:
    """Say where the page for browsers is; none can reach a Unix socket."""
    if options.ui and options.uds is None:
        notice(f"the page with chat and live view: {address}{options.root_path}/")


def _about(served: ServedModel) -> Iterator[str]:
    """What an operator wants to see of a server at its start, a line each."""
    if served.threads:
        yield served.threads
    if served.kept_weights:
        size = format_bytes(served.weight_bytes)
        yield f"weights {KEPT_WEIGHTS[served.kept_weights]} ({size})"
    tokens = served.block_size * min(served.kv_blocks.values(), default=0)
    yield (
        f"KV cache of {format_bytes(served.kv_memory)} in {served.kv_dtype}: {tokens} tokens; up "
        f"to {served.max_num_seqs} sequences at once, of up to {served.max_model_len} tokens"
    )
    lines = (served.host_attention, served.host_costs, served.kv_disk, served.halves)
    yield from filter(None, (*served.stages, *lines, served.scheduling))
    yield f"classes: {describe_classes(served.classes)}"
    if served.started:
        yield f"the engine was {served.started}"


def meet_ring(ring: RingFds | RingAccess, board: Board, every_s: float) -> RingClient:
    """Meet a ring; an engine elsewhere is waited for, however long it takes.

    Args:
        board: gets a sign of life every ``every_s`` seconds meanwhile.

    Raises:
        RingRefusedError: the engine refuses for good.
    """
    met = threading.Event()

    def beat() -> None:
        while not met.wait(every_s):
            board.sign(time.monotonic_ns())

    beating = threading.Thread(target=beat, name="weft-beat", daemon=True)
    beating.start()
    said, delay_s = "", FIRST_DELAY_S
    try:
        while True:
            try:
                return RingClient(ring)
            except RingRefusedError:
                raise
            except RingLinkError as error:
                if error.message != said:
                    said = error.message
                    logger.warning("Waiting for the engine. %s", said)
            time.sleep(delay_s)
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)
    finally:
        met.set()
        beating.join()


class RingProbe:
    """The state of the engine, from the info page of the ring.

    Args:
        row: what the supervisor says of the model, where it may sleep.
    """

    def __init__(
        self,
        client: RingClient,
        served: ServedModel,
        row: Callable[[], ModelRow] = lambda: _ALWAYS_AWAKE,
    ) -> None:
        self._client = client
        self._served = served
        self._row = row
        self._progress = Progress()
        self._classes: Sequence[ServiceClass] = served.classes

    def ready(self) -> bool:
        return bool(self._client.info().ready)

    def out_of_memory(self) -> bool:
        return self._client.out_of_memory

    def killed_for_memory(self) -> bool:
        return self._client.killed_for_memory

    def memory_kills(self) -> int:
        return self._client.memory_kills

    def idle_s(self) -> float:
        return time.monotonic() - self._progress.look(asdict(self._client.info()))

    def poke(self) -> None:
        self._client.poke()

    def gauges(self) -> Mapping[str, float]:
        info = self._client.info()
        used = (info.blocks - info.free_blocks) / info.blocks if info.blocks else 0.0
        return {
            "num_requests_running": info.running,
            "num_requests_waiting": info.waiting,
            "kv_cache_usage_perc": used,
            "engine_restarts": max(0, self._client.engines - self._row().starts),
            "engine_memory_kills": self._client.memory_kills,
            "host_kv_blocks": info.host_blocks,
            "host_kv_blocks_free": info.free_host_blocks,
            "kv_blocks_to_host": info.blocks_to_host,
            "kv_blocks_to_device": info.blocks_to_device,
            "host_attention_tokens": info.host_tokens,
            "host_attention_queue": info.host_queue,
            "host_attention_calls": info.host_calls,
            "host_attention_jobs": info.host_jobs,
            "host_attention_busy_seconds": info.host_busy_us / 1e6,
            "host_attention_round_trip_seconds": info.host_round_trip_us / 1e6,
            "host_attention_restarts": info.host_restarts,
            "host_attention_step_slowdown": info.host_slower_permille / 1e3,
            "host_attention_step_surplus_seconds": info.host_surplus_us / 1e6,
            "host_sequences_lost": info.lost_sequences,
            "kv_disk_bytes": info.disk_bytes,
            "kv_disk_blocks_saved": info.disk_saved,
            "kv_disk_blocks_lost": info.disk_lost,
            "kv_disk_blocks_missing": info.disk_missing,
            "kv_disk_tokens": info.disk_tokens,
            "num_preemptions": info.preemptions,
            "prefix_cache_queries": info.prompt_tokens,
            "prefix_cache_hits": info.cached_tokens,
            "spec_decode_num_draft_tokens": info.drafted_tokens,
            "spec_decode_num_accepted_tokens": info.accepted_tokens,
            "engine_steps": info.steps,
            "resident_steps": info.resident_steps,
            "split_steps": info.split_steps,
            "slo_requests_refused": info.refused,
            "slo_requests_demoted": info.demoted,
        }

    def places(self) -> Mapping[str, Mapping[str, float]]:
        return places_of(self._served.places, self._client.info())

    def load(self) -> EngineLoad:
        info = self._client.info()
        return EngineLoad(
            updated_ns=info.updated_ns,
            engine=info.started_ns,
            waiting=info.waiting,
            queued_tokens=info.queued_prompt_tokens,
            free_rows=max(0, info.max_num_seqs - info.running),
            started=info.requests - info.waiting,
            prompt_tokens=info.prompt_tokens,
        )

    def info(self) -> Mapping[str, Any]:
        from importlib.metadata import version  # which takes longer to import than to answer

        text = {name: version(name) for name in ("llguidance", "tokenizers")}
        return {
            **asdict(self._served),
            "versions": {**self._served.versions, **text},
            "scheduling": self._scheduling(),
        }

    def _scheduling(self) -> dict[str, Any]:
        """The policy that plans now, and the targets that it keeps, by class."""
        targets = {
            row.name: {"ttft_s": row.ttft_s, "tpot_s": row.tpot_s}
            for row in self.classes()
            if row.has_target
        }
        return {"policy": self.policy(), "targets": targets}

    def page(self) -> EngineInfo:
        return self._client.info()

    def steps(self, since: int) -> tuple[int, Sequence[LoggedStep]]:
        return self._client.steps(since)

    def recoveries(self) -> Sequence[LoggedRecovery]:
        """See ``EngineProbe``; one that ended a sleep took over from none."""
        row = self._row()
        found = self._client.recoveries()
        return [one for one in found if not row.slept(one.died_ns, one.back_ns)]

    def engines(self) -> int:
        return self._client.engines

    def policy(self) -> str:
        return list(POLICIES)[self._client.info().policy]

    def classes(self) -> Sequence[ServiceClass]:
        """See ``EngineProbe``; while there is no engine, those of the last one."""
        info = self._client.info()
        if not info.ready:
            return self._classes
        names = sorted(row.name for row in self._served.classes)
        known = dict(zip(names, info.targets, strict=False))
        self._classes = [
            replace(row, ttft_s=known[row.name][0], tpot_s=known[row.name][1])
            if row.name in known
            else row
            for row in self._served.classes
        ]
        return self._classes


if __name__ == "__main__":
    main()
