"""The request plane of a server whose models sleep and wake, in its process."""

from __future__ import annotations

import argparse
import asyncio
import socket
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.api import ModelCard
from weft.core.class_table import describe_classes
from weft.core.logs import notice
from weft.core.process import beat_s, give_back_freed_memory
from weft.core.served import ServedModel
from weft.ring.client import RingClient
from weft.ring.link import parse_ring
from weft.ring.model_board import ModelBoard, ModelFds, ModelRow
from weft.ring.target_board import TargetBoard
from weft.server.app import Common, ModelParts
from weft.server.counts import Board
from weft.server.main import DrainingServer
from weft.server.models import Models, PlaneModel
from weft.server.options import ServerOptions
from weft.server.process import SETTLED_S, RingProbe, meet_ring, tell_page
from weft.server.quota_board import QuotaBoard
from weft.server.service import Service
from weft.server.several_app import create_models_app
from weft.text import Tokenizer
from weft.text.template import find_template


def serve_several(
    arguments: argparse.Namespace, settings: Mapping[str, Any], served: ServedModel
) -> None:
    """Serve until SIGTERM.

    Args:
        served: the first model that was awake.

    Raises:
        WeftError: it cannot be served with these settings.
    """
    options = ServerOptions(**settings["options"])
    board = ModelBoard(ModelFds.parse(arguments.models))
    classes = [row.name for row in served.classes]
    common = Common(options, classes, QuotaBoard(arguments.quotas, arguments.number))
    boards = [Board(memory, arguments.number) for memory in arguments.board]
    beat = beat_s(options.watchdog_s)
    clients = [meet_ring(parse_ring(ring), boards[0], beat) for ring in arguments.ring]
    targets = [TargetBoard(memory) for memory in arguments.targets]
    found = [
        PlaneModel(
            *(number, tuple(given["names"]), board, arguments.number),
            _maker(
                common, given, clients[number], boards[number], targets[number],
                _row(board, number),
                [name for one in settings["models"] if one is not given for name in one["names"]],
            ),
        )
        for number, given in enumerate(settings["models"])
    ]  # fmt: skip
    models = Models(found, board, options, lambda: boards[0].sign(time.monotonic_ns()))

    def on_listening(address: str) -> None:
        loop = asyncio.get_running_loop()
        for client in clients:
            client.attach(loop)
        loop.call_later(SETTLED_S, give_back_freed_memory)
        if arguments.announce:
            notice(f"classes: {describe_classes(served.classes)}")
            tell_page(options, address)
            _announce(address, found, options)

    server = DrainingServer(create_models_app(models, common), options, on_listening)
    try:
        server.run([socket.socket(fileno=arguments.socket)])
    finally:
        for client in clients:
            client.leave()


def _row(board: ModelBoard, number: int) -> Callable[[], ModelRow]:
    return lambda: board.row(number)


def _maker(
    common: Common,
    given: Mapping[str, Any],
    client: RingClient,
    board: Board,
    targets: TargetBoard,
    row: Callable[[], ModelRow],
    others: Seq[str],
) -> Callable[[str], ModelParts]:
    """Return what makes the service of a model, once its engine has said what it is."""

    def make(card: str) -> ModelParts:
        served = ServedModel.from_json(card)
        names = tuple(given["names"])
        options = replace(common.options, served_model_name=names)
        service = Service(
            client,
            Tokenizer.load(Path(given["tokenizer"] or served.folder)),
            find_template(Path(served.folder), given["chat_template"]),
            ModelCard.of(served, names, given["base_seed"]),
            options,
            RingProbe(client, served, row),
            common.accounts,
        )
        service.metrics.share(board)
        return ModelParts(service, common, targets, others)

    return make


def _announce(address: str, models: Seq[PlaneModel], options: ServerOptions) -> None:
    planes = options.frontends or 1
    by = f" by {planes} request planes" if planes > 1 else ""
    states = ", ".join(f"{model.names[0]} ({model.row.state})" for model in models)
    what = "1 model" if len(models) == 1 else f"{len(models)} models"
    notice(f"serving {what} on {address}{by}: {states}")
