"""Writes results as JSON files, headed by date and version."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from weft import __version__
from weft.core.errors import ConfigError


def check_output(path: str | None) -> None:
    """Find out before the work that its result can be written. Raises ConfigError."""
    if path is None:
        return
    try:
        with open(path, "a", encoding="utf-8"):
            pass
    except OSError as error:
        raise ConfigError(f"Cannot write '{path}': {error.strerror}.", param="output") from None


def check_folder(path: str | None, param: str) -> None:
    """Make a folder for results before the work. Raises ConfigError, naming ``param``."""
    if path is None:
        return
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"Cannot make '{path}': {error.strerror}.", param=param) from None


def write_json(path: str | Path, result: Mapping[str, Any]) -> None:
    """Write a result and what made it. A folder that is not there is the caller's mistake."""
    head = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "weft": __version__}
    Path(path).write_text(json.dumps({**head, **result}, indent=2) + "\n", encoding="utf-8")
