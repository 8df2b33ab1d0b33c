"""Keys of compiled kernels that do not depend on the order in which Triton hashes functions.

Triton's key of a kernel covers the constants of the functions that it calls. It takes them over
before it hashes such a function, so they are missing unless another kernel has had it hashed
before, and two processes that launch kernels in different orders disagree about the keys.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from triton.runtime.jit import DependenciesFinder


def hash_callees_first() -> None:
    """Have Triton hash each function before it takes over its constants; once a process."""
    take_over = DependenciesFinder._update_hash
    if hasattr(take_over, "__wrapped__"):
        return

    @wraps(take_over)
    def hashed_first(finder: DependenciesFinder, function: Any) -> None:
        _ = function.cache_key  # computes it
        take_over(finder, function)

    DependenciesFinder._update_hash = hashed_first
