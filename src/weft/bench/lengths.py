"""Lengths of prompts and answers: fixed, even, or log-normal."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable

from weft.core.errors import ParameterError
from weft.core.settings import shortened

Draw = Callable[[random.Random], int]
LONGEST = 2**24
_EVEN = re.compile(r"([0-9]{1,9})\.\.([0-9]{1,9})")
_LOGNORMAL = re.compile(r"lognormal:([0-9.]{1,9}):([0-9.]{1,9})")


def parse_lengths(words: str, param: str) -> Draw:
    """Return what draws a length in tokens. Raises ParameterError, naming ``param``."""
    try:
        if words.isascii() and words.isdigit() and 1 <= int(words[:9]) == int(words) <= LONGEST:
            fixed = int(words)
            return lambda _: fixed
        if (match := _EVEN.fullmatch(words)) and 1 <= int(match[1]) <= int(match[2]) <= LONGEST:
            low, high = int(match[1]), int(match[2])
            return lambda draw: draw.randint(low, high)
        if (match := _LOGNORMAL.fullmatch(words)) and 1 <= float(match[1]) <= LONGEST:
            return _lognormal(float(match[1]), float(match[2]))
    except ValueError:
        pass
    raise ParameterError(
        f"{param} must be a length such as 128, a range such as 64..256, or "
        f"lognormal:MEAN:DEVIATION, not {shortened(words)}.",
        param=param,
    )


def _lognormal(mean: float, deviation: float) -> Draw:
    """Log-normal by the mean and the standard deviation of the lengths themselves."""
    variance = math.log(1 + (deviation / mean) ** 2)
    mu, sigma = math.log(mean) - variance / 2, math.sqrt(variance)
    return lambda draw: min(LONGEST, max(1, round(draw.lognormvariate(mu, sigma))))
