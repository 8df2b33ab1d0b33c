"""Reads sentence-transformers' ``modules.json``: what a checkpoint has behind the model itself.

See https://sbert.net/docs/sentence_transformer/usage/custom_models.html. Torch-free.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any

from weft.core.errors import UnsupportedModelError
from weft.core.json_files import read_text

MODULES = "modules.json"
MOST_MODULES = 16
DENSE = "Dense"  # a module with weights of its own


def listed_modules(folder: Path) -> list[tuple[str, str]]:
    """Return the class of each module and its folder within a model folder; none without the file.

    Raises:
        UnsupportedModelError: the file is not what it should be.
    """
    if not (folder / MODULES).is_file():
        return []
    text = read_text(folder / MODULES, UnsupportedModelError)
    try:
        listed = json.loads(text)
    except (ValueError, RecursionError):
        listed = None
    whole = isinstance(listed, list) and 0 < len(listed) <= MOST_MODULES
    if not whole or not all(_is_module(one) for one in listed):
        raise UnsupportedModelError(
            f"{MODULES} is not a list of up to {MOST_MODULES} modules with type and path; download "
            "the file again.",
            param=MODULES,
        )
    return [(one["type"].rpartition(".")[2], one.get("path", "")) for one in listed]


def _is_module(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        return False
    path = value.get("path", "")
    if not isinstance(path, str):
        return False
    parts = PurePosixPath(path)
    return not parts.is_absolute() and ".." not in parts.parts and "\0" not in path
