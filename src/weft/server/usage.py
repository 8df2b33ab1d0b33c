"""``/v1/usage``: what API keys have used, by day and service class."""

from __future__ import annotations

from datetime import date
from typing import Any

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weft.core.errors import ParameterError, suggest
from weft.server.errors import json_response
from weft.server.usage_store import Row, UsageQuery, UsageStore

PATH = "/v1/usage"
MOST_ROWS = 10_000
DEFAULT_ROWS = 1000
_PARAMETERS = ("start_date", "end_date", "key", "service_class", "after", "limit")
_SHOWN_CHARS = 100


def usage_routes(store: UsageStore) -> list[Route]:
    """The route of the usage of keys."""

    async def usage(request: Request) -> Response:
        query = read_query(request.query_params)
        page = await store.read(query)
        rows = [_shown(row) for row in page.rows]
        return json_response(
            {
                "object": "list",
                "data": rows,
                "first_id": rows[0]["id"] if rows else None,
                "last_id": rows[-1]["id"] if rows else None,
                "has_more": page.more,
            }
        )

    return [Route(PATH, usage, methods=["GET"])]


def read_query(given: QueryParams) -> UsageQuery:
    """What a query string asks for. Raises ParameterError."""
    for name in given:
        if name not in _PARAMETERS:
            hint = suggest(name[:_SHOWN_CHARS], _PARAMETERS)
            raise ParameterError(
                f"Unknown parameter '{name[:_SHOWN_CHARS]}'.{hint}", param=name[:_SHOWN_CHARS]
            )
    first, last = (_day(given.get(name), name) for name in ("start_date", "end_date"))
    if first is not None and last is not None and first > last:
        raise ParameterError("end_date is before start_date.", param="end_date")
    return UsageQuery(
        first,
        last,
        given.get("key"),
        given.get("service_class"),
        _place(given.get("after")),
        _limit(given.get("limit")),
    )


def _day(given: str | None, param: str) -> date | None:
    if given is None:
        return None
    try:
        return date.fromisoformat(given)
    except ValueError:
        message = f"{param} must be a day such as 2026-12-31, not '{given[:_SHOWN_CHARS]}'."
        raise ParameterError(message, param=param) from None


def _place(given: str | None) -> tuple[str, str, str] | None:
    if given is None:
        return None
    parts = given.split("/")
    if len(parts) != 3:
        raise ParameterError("after must be the id of a row, as last_id has it.", param="after")
    return parts[0], parts[1], parts[2]


def _limit(given: str | None) -> int:
    if given is None:
        return DEFAULT_ROWS
    short = given.isascii() and given.isdecimal() and len(given) <= len(str(MOST_ROWS))
    if not short or not 1 <= int(given) <= MOST_ROWS:
        raise ParameterError(f"limit must be from 1 to {MOST_ROWS}.", param="limit")
    return int(given)


def _shown(row: Row) -> dict[str, Any]:
    day, key, service_class, requests, prompt, completion = row
    return {
        "id": f"{day}/{key}/{service_class}",
        "object": "usage",
        "date": day,
        "key": key or None,
        "service_class": service_class,
        "requests": requests,
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
