"""``/v1/targets``: shows the latency targets of the service classes, and changes them."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weft.api import decode_body
from weft.core.errors import ConfigError, NoTargetsError, ParameterError, suggest
from weft.ring.target_board import LOOK_S, TargetBoard, TargetChange
from weft.server.body import read_body
from weft.server.errors import json_response
from weft.server.service import Service

PATH = "/v1/targets"
SEEN_S = 1.0  # that the info page of the engine may be older than its verdict
Seconds = Annotated[float, Meta(gt=0, lt=1e6)]


class ClassTargets(Struct, forbid_unknown_fields=True, kw_only=True):
    """Targets of one class in seconds; one that is missing is as at the start of the server."""

    ttft_s: Seconds | None = None
    tpot_s: Seconds | None = None


class TargetsBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of ``PUT /v1/targets``."""

    classes: Annotated[dict[str, ClassTargets], Meta(max_length=64)] = {}
    interactivity: Annotated[float, Meta(ge=0, le=1)] | None = None


def target_routes(service: Service, board: TargetBoard | None) -> list[Route]:
    """The routes of targets.

    Args:
        board: where the engine finds changes; None where it looks at none.
    """

    async def show(_: Request) -> Response:
        return json_response(_shown(service))

    async def change(request: Request) -> Response:
        data = await read_body(request, service.options)
        body = decode_body(TargetsBody, data, notes=service.notes())
        if board is None:
            raise NoTargetsError("The engine of this server takes no other targets.")
        wanted = _change(body, [row.name for row in service.builder.card.classes])
        before = service.probe.classes()
        with board.proposing():
            proposal = board.propose(wanted)
            service.probe.poke()
            try:
                while not board.outcome(proposal):
                    await asyncio.sleep(LOOK_S)
            except ConfigError as error:
                raise ParameterError(error.message, param=error.param) from None
        await _seen(service, before)
        return json_response(_shown(service))

    return [Route(PATH, show, methods=["GET"]), Route(PATH, change, methods=["PUT"])]


def _change(body: TargetsBody, names: list[str]) -> TargetChange:
    """What an engine is asked for. Raises ParameterError for a class that there is not."""
    classes = {}
    for name, row in body.classes.items():
        if name not in names:
            message = f"There is no service class '{name[:64]}'.{suggest(name[:64], names)}"
            raise ParameterError(message, param="classes")
        given = {"ttft_s": row.ttft_s, "tpot_s": row.tpot_s}
        classes[name] = {target: value for target, value in given.items() if value is not None}
    return TargetChange({name: row for name, row in classes.items() if row}, body.interactivity)


async def _seen(service: Service, before: Any) -> None:
    """Wait until the engine's info page has what it has just agreed to, if that is anything new."""
    for _ in range(int(SEEN_S / LOOK_S)):
        if service.probe.classes() != before:
            return
        await asyncio.sleep(LOOK_S)


def _shown(service: Service) -> dict[str, Any]:
    rows = service.probe.classes() or service.builder.card.classes
    return {
        "object": "targets",
        "policy": service.probe.policy(),
        "classes": [
            {
                "name": row.name,
                "priority": row.priority,
                "ttft_s": row.ttft_s,
                "tpot_s": row.tpot_s,
            }
            for row in rows
        ],
    }
