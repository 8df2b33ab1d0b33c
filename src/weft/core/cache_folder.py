"""The folder of what weft can make again: profiles of costs, packed weights."""

from __future__ import annotations

import os
import re
from pathlib import Path


def cache_folder() -> Path:
    """``weft`` in ``$XDG_CACHE_HOME``, or in ``~/.cache``; of users without a home, ``/.cache``."""
    home = Path("/", os.path.expanduser("~").removeprefix("~"))
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "weft"


def file_stem(model: str | Path) -> str:
    """The readable beginning of the names of a model's files there."""
    return re.sub(r"[^\w.-]+", "-", Path(model).name)
