"""Reads untrusted JSON files: bounded in bytes and depth, with one typed error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.core.errors import WeftError, short

MOST_BYTES = 16 * 2**20  # no file of a model is longer but those with a vocabulary or an index
MOST_DEPTH = 32

Refusal = Callable[[str], WeftError]


def read_object(path: Path, refuse: Refusal, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file.

    Args:
        refuse: makes the error that is raised if the file cannot be read, is longer, or is none.
    """
    return parse_object(read_text(path, refuse, most_bytes), path.name, refuse)


def read_text(path: Path, refuse: Refusal, most_bytes: int = MOST_BYTES) -> str:
    """Return the UTF-8 text in a file of so many bytes at most. Raises as `read_object`."""
    try:
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else short(error)
        raise refuse(f"{path.name} cannot be read as UTF-8 text ({why}).") from error
    if len(data) > most_bytes:
        raise refuse(f"{path.name} is longer than {most_bytes} bytes; download the file again.")
    return text


def parse_object(text: str, name: str, refuse: Refusal) -> dict[str, Any]:
    """Return the JSON object that the text of the file ``name`` is. Raises as `read_object`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else short(error)
        raise refuse(f"{name} cannot be read as JSON ({why}); download the file again.") from error
    if not isinstance(value, dict):
        raise refuse(f"{name} is not a JSON object; download the file again.")
    return value


def check_depth(value: Any, name: str, refuse: Refusal) -> None:
    """Refuse a value of the file ``name`` in which more than 32 arrays and objects are nested."""
    level = [value]
    for _ in range(MOST_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise refuse(f"{name} is nested more than {MOST_DEPTH} levels deep; download the file again.")
