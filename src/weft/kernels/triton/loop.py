"""Loops with bounds that a kernel reads from memory, compiled or in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import triton

if triton.knobs.runtime.interpret:

    def bound(number: Any) -> int:
        """Return a scalar as a bound of ``range``, which numpy >= 2.4 does not take as it is."""
        return int(number.handle.data.item()) if hasattr(number, "handle") else int(number)

else:

    @triton.jit
    def bound(number):
        """Return a scalar as a bound of ``range``."""
        return number
