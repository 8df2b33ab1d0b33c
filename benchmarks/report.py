"""Writes the result of a benchmark with date, command and versions."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def save(path: Path, **facts: Any) -> None:
    """Write ``facts`` as JSON, headed by when and how they were measured."""
    head = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"python {script()} {shlex.join(sys.argv[1:])}",
        "python": platform.python_version(),
    }
    path.write_text(json.dumps({**head, **facts}, indent=2) + "\n")


def script() -> Path:
    """The running script as seen from the repository."""
    path = Path(sys.argv[0]).resolve()
    root = Path(__file__).resolve().parents[1]
    return path.relative_to(root) if path.is_relative_to(root) else Path(path.name)
