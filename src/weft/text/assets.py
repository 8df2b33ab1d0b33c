"""Reads the text files of a model folder: tokenizer_config.json and its companions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.core.errors import TokenizerError

MAX_FILE_BYTES = 16 * 2**20  # of a file without a vocabulary
NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in ``path``, an empty one if there is no such file.

    Raises:
        TokenizerError: the file cannot be read, or is not a JSON object.
    """
    if not path.is_file():
        return {}
    return parse_json(read_text(path), path.name)


def parse_json(text: str, name: str) -> dict[str, Any]:
    """Return the JSON object that the text of the file ``name`` is. Raises TokenizerError."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(
            f"{name} cannot be read as JSON ({_short(error)}); download the file again."
        ) from error
    if not isinstance(data, dict):
        raise TokenizerError(f"{name} is not a JSON object; download the file again.")
    return data


def read_text(path: Path, most_bytes: int = MAX_FILE_BYTES) -> str:
    """Return the UTF-8 text in ``path``. Raises TokenizerError if it cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
        if len(data) > most_bytes:
            raise TokenizerError(f"{path.name} is longer than {most_bytes} bytes.")
        return data.decode("utf-8")
    except (OSError, ValueError) as error:
        raise TokenizerError(
            f"{path.name} cannot be read as UTF-8 text ({_short(error)})."
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json, with names missing in it taken from special_tokens_map.json."""
    return read_json(folder / "special_tokens_map.json") | read_json(
        folder / "tokenizer_config.json"
    )


def named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return ``{"bos_token": "<s>", ...}`` of a tokenizer_config, as chat templates see them."""
    found = {name: _content(config.get(name)) for name in NAMED_TOKENS}
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):
        found |= {str(name): _content(token) for name, token in extra.items()}
    return {name: token for name, token in found.items() if token is not None}


def _content(token: Any) -> str | None:
    """A token is written as a string or as ``{"content": ...}``."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None


def _short(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
