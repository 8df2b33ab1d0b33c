"""Lengths of prompts and answers: fixed, uniform, around a mean, or log-normal."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable

from weft.core.errors import ParameterError
from weft.core.settings import shortened

Draw = Callable[[random.Random], int]
LONGEST = 2**24
LENGTH_WORDS = "128, or evenly from 64..256 or 100+-10%, or lognormal:MEAN:DEVIATION"
_EVEN = re.compile(r"([0-9]{1,9})\.\.([0-9]{1,9})")
_ABOUT = re.compile(r"([0-9]{1,9})\+-([0-9]{1,2})%")
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
        if (match := _ABOUT.fullmatch(words)) and 1 <= int(match[1]) <= LONGEST // 2:
            return _about(int(match[1]), int(match[2]) / 100)
        if (match := _LOGNORMAL.fullmatch(words)) and 1 <= float(match[1]) <= LONGEST:
            return _lognormal(float(match[1]), float(match[2]))
    except ValueError:
        pass
    raise ParameterError(
        f"{param} must be a length such as 128, a range such as 64..256, 1000+-10%, or "
        f"lognormal:MEAN:DEVIATION, not {shortened(words)}.",
        param=param,
    )


def _about(middle: int, share: float) -> Draw:
    """Evenly from a share below the middle to as much above it (NEO, section 5.1)."""
    low, high = math.ceil(middle * (1 - share)), math.floor(middle * (1 + share))
    return lambda draw: draw.randint(max(1, low), high)


def _lognormal(mean: float, deviation: float) -> Draw:
    """Log-normal by the mean and the standard deviation of the lengths themselves."""
    variance = math.log(1 + (deviation / mean) ** 2)
    mu, sigma = math.log(mean) - variance / 2, math.sqrt(variance)
    return lambda draw: min(LONGEST, max(1, round(draw.lognormvariate(mu, sigma))))
