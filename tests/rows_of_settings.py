"""Settings of a choice of tokens as the kernels take them."""

from __future__ import annotations

from weft.core.types import NEUTRAL
from weft.kernels.sampling import SETTINGS


def whole_row(*given: float) -> tuple[float, ...]:
    """The first columns as given, the others neutral."""
    return (*map(float, given), *(float(NEUTRAL[name]) for name in SETTINGS[len(given) :]))
