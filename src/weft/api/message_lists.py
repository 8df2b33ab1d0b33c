"""Models, and pages of lists, as Anthropic's API has them."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from datetime import UTC, datetime
from typing import Any

from weft.core.errors import ParameterError


def moment(seconds: int) -> str:
    """Unix time in the form of RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def check_cursors(after: str | None, before: str | None) -> None:
    """Refuse a page that is to begin and to end somewhere. Raises ParameterError."""
    if after is not None and before is not None:
        raise ParameterError("Give after_id or before_id, not both.", param="before_id")


def page_object(data: Seq[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """A page of a list of objects with ids."""
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"data": data, "has_more": has_more, "first_id": first, "last_id": last}


def message_model(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A model.

    Args:
        entry: as OpenAI's API has it.
    """
    context = entry.get("max_model_len")  # not known before it was awake
    return {
        "type": "model",
        "id": entry["id"],
        "display_name": entry["id"],
        "created_at": moment(entry["created"]),
        "lifecycle": "active",
        "max_input_tokens": context,
        "max_tokens": context,
    }


def model_page(
    entries: Seq[Mapping[str, Any]], after: str | None, before: str | None, limit: int
) -> dict[str, Any]:
    """A page of models, from the first one on, behind an id, or up to one.

    Args:
        entries: all of them, as OpenAI's API has them.

    Raises:
        ParameterError: there is no such id.
    """
    check_cursors(after, before)
    ids = [entry["id"] for entry in entries]
    for param, cursor in (("after_id", after), ("before_id", before)):
        if cursor is not None and cursor not in ids:
            raise ParameterError(f"{param} is the id of no model here.", param=param)
    if before is not None:
        end = ids.index(before)
        first, rest = max(0, end - limit), end - limit
    else:
        first = 0 if after is None else ids.index(after) + 1
        end, rest = first + limit, len(ids) - first - limit
    return page_object([message_model(one) for one in entries[first:end]], has_more=rest > 0)
