"""Fields of answers that a client's types do not declare."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


def unknown_fields(value: Any, path: str = "") -> list[str]:
    """Paths of fields that the client's types do not have."""
    if isinstance(value, list):
        return [p for i, item in enumerate(value) for p in unknown_fields(item, f"{path}[{i}]")]
    if not isinstance(value, BaseModel):
        return []
    found = [f"{path}.{name}" for name in value.model_extra or {}]
    for name in type(value).model_fields:
        found += unknown_fields(getattr(value, name, None), f"{path}.{name}")
    return found
