"""``weft frontend``: the request plane of an engine on another machine."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from weft.core.early import Starter
from weft.core.errors import ConfigError, ModelChangedError, RingLinkError, RingRefusedError
from weft.core.flags import add_settings, given_settings
from weft.core.logs import log_level, set_up_logs
from weft.core.process import give_back_freed_memory, raise_file_limit, set_process_title
from weft.core.process import start_child as start_process
from weft.core.served import ServedModel
from weft.ring.facts import ModelFacts, fetch_facts
from weft.ring.link import RingAccess
from weft.server.batch_keeper import BatchKeeper
from weft.server.counts import create_board
from weft.server.frontend_options import FrontendOptions
from weft.server.keeper import FrontendKeeper, Links
from weft.server.options import ServerOptions
from weft.server.quota_board import create_quota_board
from weft.supervise import fit_limits, listening, num_frontends, on_signals, run_kept, shared_store

AGAIN_S = 1.0
OF_ENGINES = (
    *("engine_only", "ring_listen", "ring_planes", "standby"),
    *("models_memory", "idle_sleep_s"),
)

logger = logging.getLogger("weft")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.set_defaults(run=run_command, parser=parser)
    parser.add_argument("--config", metavar="FILE", help="YAML file with the same names")
    add_settings(parser, "frontend", FrontendOptions)
    add_settings(parser, "server", ServerOptions, there=OF_ENGINES)


def run_command(options: Mapping[str, Any]) -> int:
    """Run the command; see ``serve_frontend``."""
    own_settings, server_settings = given_settings(options, FrontendOptions, ServerOptions)
    for name in OF_ENGINES:
        if name in server_settings:
            raise ConfigError(
                f"{name} is a setting of weft serve, where the engine is.", param=name
            )
    start = options["start"] or start_process
    return serve_frontend(FrontendOptions(**own_settings), ServerOptions(**server_settings), start)


def serve_frontend(own: FrontendOptions, options: ServerOptions, start: Starter) -> int:
    """Serve HTTP until SIGINT or SIGTERM; return the exit code. Waits for an engine at first.

    When the engine has another model one day, all request planes start anew with its facts.

    Raises:
        ConfigError: a setting is wrong, or an address cannot be used.
        RingRefusedError: key or version of the engine differ.
        WeftError: request planes that died again and again.
    """
    set_up_logs("supervisor", log_level(own.log_level), own.log_format)
    set_process_title("weft")
    raise_file_limit()
    options = fit_limits(options)
    chosen = replace(options, frontends=num_frontends(own.base_seed, options))
    access = RingAccess(
        own.ring, options.ring_key_file, options.ring_timeout_s, secrets.token_hex(8)
    )
    facts = _wait_for_facts(access, own.tokenizer)
    classes = [row.name for row in facts.served.classes]
    with listening(options, classes) as listener, shared_store(chosen) as shared:
        planes = shared.frontends or 1
        counts, quotas = create_board(planes + 1), create_quota_board(planes)
        given = {
            "options": asdict(shared),
            "chat_template": own.chat_template,
            "base_seed": own.base_seed,
            "log_level": own.log_level,
            "log_format": own.log_format,
        }
        while True:
            given |= {"folder": facts.folder, "tokenizer": facts.tokenizer}
            known = replace(access, model=facts.digest)
            try:
                return asyncio.run(
                    _supervise(given, shared, known, facts.served, listener, counts, quotas, start)
                )
            except ModelChangedError as error:
                logger.warning("%s The request planes start anew with its facts.", error.message)
            time.sleep(AGAIN_S)
            facts = _wait_for_facts(access, own.tokenizer)


def _wait_for_facts(access: RingAccess, tokenizer: str | None) -> ModelFacts:
    """Ask the engine for its facts until it answers. Raises as ``serve_frontend``.

    Args:
        tokenizer: a folder here with the text files, which are not fetched then.
    """
    said = ""
    while True:
        try:
            facts = fetch_facts(access, with_files=tokenizer is None)
            return facts if tokenizer is None else replace(facts, folder=tokenizer)
        except RingRefusedError:
            raise
        except RingLinkError as error:
            if error.message != said:
                said = error.message
                logger.warning("Waiting for the engine at %s. %s", access.address, said)
            time.sleep(AGAIN_S)


async def _supervise(
    given: Mapping[str, Any],
    options: ServerOptions,
    access: RingAccess,
    served: ServedModel,
    listener: socket.socket,
    counts: int,
    quotas: int,
    start: Starter,
) -> int:
    signals = on_signals()
    planes = options.frontends or 1
    card: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    card.set_result(json.dumps(asdict(served)))
    rings = [replace(access, plane=f"{access.plane}-{number}") for number in range(planes + 1)]
    frontends = [
        FrontendKeeper(
            *(number, given, [Links(ring, counts, None)], listener),
            *(quotas, card, options.watchdog_s, start),
        )
        for number, ring in enumerate(rings[:planes])
    ]
    give_back_freed_memory()

    def make_batches() -> BatchKeeper:
        return BatchKeeper(options, given, rings[-1], card, counts, planes)

    return await run_kept(frontends, signals, options.drain_timeout_s, make_batches=make_batches)
