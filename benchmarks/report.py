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
        "command": f"python benchmarks/{Path(sys.argv[0]).name} {shlex.join(sys.argv[1:])}",
        "python": platform.python_version(),
    }
    path.write_text(json.dumps({**head, **facts}, indent=2) + "\n")
