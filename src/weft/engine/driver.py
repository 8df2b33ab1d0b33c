"""Looks for NVIDIA's driver, without torch."""

from __future__ import annotations

import ctypes


def has_driver() -> bool:
    """Whether NVIDIA's driver is installed."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
