"""The folder of what weft cannot make again: uploaded files and batches, the history of chats."""

from __future__ import annotations

import os
from pathlib import Path


def state_folder() -> Path:
    """``weft`` in ``$XDG_STATE_HOME``, or in ``~/.local/state``."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "weft"
