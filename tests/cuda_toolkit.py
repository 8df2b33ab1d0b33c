"""The CUDA compiler that the test packages bring."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def toolkit() -> Path:
    """Where the packages nvidia-cuda-nvcc and its companions put the compiler."""
    spec = importlib.util.find_spec("nvidia.cu13")
    assert spec is not None, "the packages of the extra 'test' bring nvcc; install them"
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations)))
