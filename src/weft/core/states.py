"""The states of batches and of models, as they are kept and as the API shows them."""

from __future__ import annotations

from typing import Literal

BatchStatus = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
LoadState = Literal["asleep", "loading", "awake", "failed"]
