"""Arrival times of requests: Poisson, steady or in bursts, and the syntax of rates."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from weft.core.errors import ParameterError
from weft.core.settings import shortened

MOST_RATES = 1000
_RANGE = re.compile(r"([0-9.]+)\.\.([0-9.]+):([0-9]+)")


def gamma_times(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Times of arrivals at ``rate`` a second; intervals are gamma distributed.

    Args:
        burstiness: the shape; 1 is a Poisson process, less comes in bursts.
    """
    draw = random.Random(seed)
    now = 0.0
    while True:
        yield now
        now += draw.gammavariate(burstiness, 1 / (rate * burstiness))


def parse_rates(words: str) -> list[float]:
    """The rates of ``4`` or ``1,2,4`` or ``1..32:13``, ascending. Raises ParameterError."""
    match = _RANGE.fullmatch(words)
    try:
        if match:
            low, high, steps = float(match[1]), float(match[2]), int(match[3])
            width = (high - low) / (steps - 1)
            rates = [low + width * i for i in range(min(steps, MOST_RATES + 1))]
        else:
            rates = sorted(float(word) for word in words.split(","))
    except (ValueError, ZeroDivisionError):
        rates = []
    if not rates or len(rates) > MOST_RATES or not 0 < rates[0] <= rates[-1] < 1e6:
        raise ParameterError(
            f"rate must be numbers above 0, such as 4 or 1,2,4 or 1..32:13, "
            f"not {shortened(words)}.",
            param="rate",
        )
    return rates
