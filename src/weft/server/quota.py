"""Quotas of one API key: its limits, and the rates at which they come back.

A rate is kept as in OpenAI's API: a bucket that holds a minute's worth, and fills evenly. Its state
is one number, the time at which it will be full (the generic cell rate algorithm), so that several
processes can share it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from weft.core.errors import WeftError
from weft.core.settings import check_settings, setting

MINUTE_NS = 60 * 10**9


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of one key; None for no limit.

    Raises:
        ParameterError: a limit is malformed or out of bounds.
    """

    requests_per_minute: int | None = setting(
        "int", None, "requests that the engine is asked for in a minute", low=1, high=10**6
    )
    tokens_per_minute: int | None = setting(
        "int", None, "tokens of their prompts and outputs", low=1, high=10**9
    )
    max_concurrent_requests: int | None = setting(
        "int", None, "requests in progress, over all request planes", low=1, high=2**20
    )
    max_queued_batch_tokens: int | None = setting(
        "int",
        None,
        "tokens of batches that have not ended: of prompts, by an estimate, and the most that "
        "outputs may have",
        low=1,
        high=2**40,
    )

    def __post_init__(self) -> None:
        check_settings(self)


NO_LIMITS = Quota()


class RateLimitError(WeftError):
    """A key has used up its requests or tokens of a minute."""

    http_status = 429
    code = "rate_limit_exceeded"

    def __init__(self, message: str, retry_after_s: int | None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Level(NamedTuple):
    """How full a bucket is.

    Attributes:
        limit: what it holds: a minute's worth.
        remaining: what can be taken from it now.
        reset_ns: until it is full.
    """

    limit: int
    remaining: int
    reset_ns: int


def level(limit: int, full_ns: int, now_ns: int) -> Level:
    """How full a bucket is that will be full at ``full_ns``."""
    empty_ns = max(0, full_ns - now_ns)
    return Level(limit, max(0, (MINUTE_NS - empty_ns) * limit // MINUTE_NS), empty_ns)


def after_taking(limit: int, full_ns: int, now_ns: int, amount: int) -> int:
    """When a bucket will be full if so much more is taken from it; given back, below 0."""
    shift = -(-abs(amount) * MINUTE_NS // limit)
    return max(full_ns, now_ns) + (shift if amount >= 0 else -shift)


def wait_ns(limit: int, full_ns: int, now_ns: int, amount: int) -> int | None:
    """Time until so much can be taken, 0 for now; None if the bucket never holds so much."""
    if amount > limit:
        return None
    return max(0, after_taking(limit, full_ns, now_ns, amount) - now_ns - MINUTE_NS)


def seconds_up(time_ns: int) -> int:
    """Whole seconds that are not over before a time."""
    return max(1, math.ceil(time_ns / 1e9))


def duration(time_ns: int) -> str:
    """A time as OpenAI's headers have it: ``6m0s``, ``1.2s``, ``20ms``."""
    millis = -(-time_ns // 10**6)
    if millis < 1000:
        return f"{millis}ms" if millis else "0s"
    minutes, rest = divmod(millis, 60_000)
    seconds = f"{rest / 1000:g}s"
    return f"{minutes}m{seconds}" if minutes else seconds
