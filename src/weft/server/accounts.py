"""Accounts of API keys: requests in progress, rates, and the bill of one request."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from collections.abc import Sequence as Seq

from weft.api.jobs import Job
from weft.core.errors import WeftError
from weft.server.counts import Use
from weft.server.keyfile import Key
from weft.server.quota import Level, RateLimitError, duration, seconds_up
from weft.server.quota_board import QuotaBoard

KINDS = ("requests", "tokens")  # of the two buckets
RATE_HEADERS = tuple(
    f"x-ratelimit-{what}-{kind}" for kind in KINDS for what in ("limit", "remaining", "reset")
)


class KeyBusyError(WeftError):
    """A key has as many requests in progress as it may."""

    http_status = 429
    code = "too_many_requests"
    retry_after_s = 1


class Accounts:
    """What the API keys use, over all request planes.

    Args:
        most: requests in progress of a key whose entry says nothing of them; None for any number.
    """

    def __init__(self, board: QuotaBoard, most: int | None = None) -> None:
        self._board = board
        self._most = most

    def most_in_progress(self, key: Key | None) -> int | None:
        """Requests that a key may have in progress; None for any number."""
        if key is None:
            return None
        own = key.quota.max_concurrent_requests
        return self._most if own is None else own

    @contextlib.contextmanager
    def in_progress(self, key: Key) -> Iterator[None]:
        """Count a request of a key while it is answered. Raises KeyBusyError."""
        most = self.most_in_progress(key)
        if most is None:
            yield
            return
        place = self._board.enter(key.account, most)
        if place is None:
            raise KeyBusyError(f"This API key has {most} requests in progress, which is its limit.")
        try:
            yield
        finally:
            self._board.leave(place)

    def bill(self, key: Key | None) -> Bill:
        """The bill of a new request; None where no key is demanded."""
        return Bill(self._board, key)

    def resumed(self, payer: str) -> Bill:
        """The bill of a request that another process has charged to the key of this name."""
        bill = Bill(self._board, None, payer)
        bill.resumed = True
        return bill

    def close(self) -> None:
        """Let the shared memory go."""
        self._board.close()


class Bill:
    """What one request costs its key: charged before it begins, corrected when it has ended.

    Attributes:
        payer: name of the key; "" where no key is demanded.
        headers: ``x-ratelimit-*`` for the answer, once it is charged or refused.
        counted: whether it has begun.
        resumed: it had begun elsewhere, and usage has its prompt already.
    """

    def __init__(self, board: QuotaBoard, key: Key | None, payer: str = "") -> None:
        self.payer = payer if key is None else key.name
        self.headers: list[tuple[bytes, bytes]] = []
        self.counted = self.resumed = False
        self._board = board
        self._account = b"" if key is None else key.account
        quota = None if key is None else key.quota
        self._limits = (
            (None, None) if quota is None else (quota.requests_per_minute, quota.tokens_per_minute)
        )
        self._charged = [0, 0]
        self._spent = 0

    def charge(self, job: Job) -> None:
        """Take a request, and all tokens that it may need, from what the key has of them.

        Raises:
            RateLimitError: it has not so many; nothing was taken.
        """
        if self._limits == (None, None):
            return
        amounts = [1, most_tokens(job)]
        waits, levels = self._board.take(self._account, self._limits, amounts)
        self.headers = list(_headers(levels))
        for kind, wait, found, amount in zip(KINDS, waits, levels, amounts, strict=True):
            if wait != 0 and found is not None:
                raise _refusal(kind, wait, found, amount)
        self._charged = amounts

    def begin(self, prompt_tokens: int) -> Use:
        """The engine has taken a part of the request; what usage is to have of it."""
        first, self.counted = not self.counted, True
        return Use() if self.resumed else Use(int(first), prompt_tokens)

    def spend(self, tokens: int) -> None:
        """Note tokens that a part of the request has taken, prompt and output."""
        self._spent += tokens

    def settle(self) -> None:
        """Correct what was charged to what was spent; a request that never began costs nothing.

        May be called twice.
        """
        if not self._charged[0]:
            return
        begun = 0 if self.counted else -1
        amounts = [begun, self._spent - self._charged[1]]
        self._board.correct(self._account, self._limits, amounts)
        self._charged = [0, 0]


def most_tokens(job: Job) -> int:
    """Tokens that a job is charged before it begins: prompts, and the limits of its outputs.

    An output without a limit of its own is charged when it has ended.
    """
    outputs = (request.sampling.max_tokens for request in job.requests if not request.embed)
    return job.prompt_tokens + sum(limit or 0 for limit in outputs)


def _refusal(kind: str, wait: int | None, found: Level, amount: int) -> RateLimitError:
    limit = f"This API key may use {found.limit} {kind} a minute"
    if wait is None:
        message = f"{limit}, but this request alone may need {amount}; lower max_tokens."
        return RateLimitError(message, None)
    return RateLimitError(
        f"{limit}, and has {found.remaining} left; this request may need {amount}. "
        f"Try again in {duration(wait)}.",
        seconds_up(wait),
    )


def _headers(levels: Seq[Level | None]) -> Iterator[tuple[bytes, bytes]]:
    for kind, found in zip(KINDS, levels, strict=True):
        if found is not None:
            shown = (str(found.limit), str(found.remaining), duration(found.reset_ns))
            for what, value in zip(("limit", "remaining", "reset"), shown, strict=True):
                yield f"x-ratelimit-{what}-{kind}".encode(), value.encode()
