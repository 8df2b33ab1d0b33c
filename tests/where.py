"""Where tests of kernels and executors run: a GPU if there is one, or WEFT_TEST_DEVICE."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "WEFT_TEST_DEVICE"
THERE = any(Path("/dev").glob("nvidia[0-9]*"))
NAME = os.environ.get(VARIABLE) or ("cuda" if THERE else "cpu")
ON_GPU = NAME == "cuda"


def complaint() -> str | None:
    """What is wrong with the wish for a device, if anything."""
    if NAME not in ("cpu", "cuda"):
        return f"{VARIABLE} is '{NAME}'; it must be cpu or cuda"
    if ON_GPU and not THERE:
        return f"{VARIABLE} is cuda, but this machine has no NVIDIA GPU"
    return None
