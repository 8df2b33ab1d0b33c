"""Reads the text files of a model folder: tokenizer_config.json and its companions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.core.errors import TokenizerError
from weft.core.json_files import read_object

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
    return read_object(path, TokenizerError)


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
