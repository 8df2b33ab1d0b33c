"""Runs batch lines on any server with OpenAI's API; waits while it is busy or unreachable."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
import msgspec
import orjson
from msgspec import Raw

from weft.batch.ports import BatchLine, LineAnswer, NobodyAnswersError, new_request_id
from weft.core.addresses import base_of
from weft.core.errors import ConfigError, WeftError

CONNECT_TIMEOUT_S = 10.0
FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 30.0
AWAY = (429, 503)  # the server cannot answer at present
ASKED_AGAIN = (408, 409, 500, 502, 504)  # something went wrong with this request
TIER_REFUSED = (400, 403, 422)
DEFAULT_TIERS = ("batch",)
WEFT_TIERS = ("batch", "flex")  # the latter is the lowest that every version knows
_SHOWN_CHARS = 300

logger = logging.getLogger("weft")


class NoAnswerError(WeftError):
    """The server has not answered a request, however often it was asked."""

    http_status = 504
    code = "no_answer"


class HttpAsker:
    """Asks a server over HTTP.

    What fails for a reason that may pass is asked again after a delay that doubles, or the one that
    the server names. A request that fails by itself is asked ``retries`` more times. While the
    server is away or busy nothing counts; it may be away for ``patience_s``, and busy for ever.

    Args:
        url: of the server, with or without ``/v1``.
        service_tier: put into bodies that name no class. By default it is the class of batches; a
            server that refuses it gets the next best, and then none.
        timeout_s: for one answer.

    Attributes:
        started: called with the number of a line that the server had not taken, as it is asked
            again.
        waiting: lines that the server has refused to take at present.
        say: tells the user.

    Raises:
        ConfigError: the URL is not one of a server, or the key cannot be sent.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None,
        *,
        service_tier: str | None = None,
        retries: int = 5,
        timeout_s: float = 1800.0,
        patience_s: float = 300.0,
    ) -> None:
        self.url = base_of(url)
        self.started: Callable[[int], None] | None = None
        self.waiting = 0
        self.say: Callable[[str], None] = logger.warning
        self._tiers: tuple[str, ...] = DEFAULT_TIERS if service_tier is None else (service_tier,)
        self._own_tier = service_tier is not None
        self._refused: dict[str, set[str]] = {}  # tiers by endpoint
        self._retries = retries
        self._patience_s = patience_s
        self._good = time.monotonic()  # when something was last heard of it
        self._free = self._good  # when it last took a request
        headers = {"content-type": "application/json"}
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        try:
            self._http = httpx.AsyncClient(
                headers=headers,
                timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S, pool=None),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            )
        except ValueError:
            raise ConfigError("The key must be printable ASCII.", param="api_key") from None

    async def check(self) -> dict[str, Any]:
        """Check the server; return a weft server's facts of its engine, else {}.

        Raises:
            NobodyAnswersError: there is no server, or it refuses the key.
        """
        where = f"{self.url}/v1/models"
        try:
            answer = await self._http.get(where)
        except httpx.HTTPError as error:
            raise NobodyAnswersError(
                f"No server answers at {self.url} ({_why(error)}); start one with: weft serve"
            ) from None
        if answer.status_code in (401, 403) or answer.is_redirect:
            raise NobodyAnswersError(f"{where} answered {answer.status_code}: {_said(answer)}")
        with contextlib.suppress(httpx.HTTPError, ValueError, KeyError, TypeError):
            told = (await self._http.get(f"{self.url}/server_info")).json()
            facts = dict(told["engine"])
            if not self._own_tier:
                self._tiers = WEFT_TIERS
            return facts
        return {}

    @property
    def silent_s(self) -> float:
        """How long nothing was heard of the server."""
        return time.monotonic() - self._good

    async def alive(self, timeout_s: float) -> bool:
        """Whether the server answers, and takes the key."""
        try:
            answer = await self._http.get(f"{self.url}/v1/models", timeout=timeout_s)
        except httpx.HTTPError:
            return False
        if answer.status_code >= 500 or answer.status_code in (401, 403):
            return False
        self._good = time.monotonic()
        return True

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def ask(self, number: int, line: BatchLine) -> LineAnswer:
        failures, delay_s = 0, FIRST_DELAY_S
        while True:
            answer: httpx.Response | None = None
            tier = self._tier(line.url)
            body = _with_tier(line, tier)
            try:
                answer = await self._http.post(self.url + line.url, content=body)
                why = f"{answer.status_code}: {_said(answer)}"
                away = answer.status_code in AWAY
            except httpx.HTTPError as error:
                why = _why(error)
                away = isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout))
            if answer is not None and answer.status_code not in AWAY + ASKED_AGAIN:
                self._good = self._free = time.monotonic()
                if self._refuses(tier, line.url, answer):
                    continue
                return _read(answer)
            if away:
                self._wait_longer(answer, why)
            elif failures == self._retries:
                if answer is not None:
                    return _read(answer)
                raise NoAnswerError(
                    f"The request failed {failures + 1} times; the last error was: {why}."
                )
            failures += not away
            self.waiting += away
            try:
                await asyncio.sleep(_delay_s(answer, delay_s, self._patience_s))
            finally:
                self.waiting -= away
            if away and self.started is not None:
                self.started(number)
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)

    def _wait_longer(self, answer: httpx.Response | None, why: str) -> None:
        """Raise NobodyAnswersError if the server has been away for too long.

        One that says that it is busy is there; one that wants to be paid first is not.
        """
        if (
            answer is not None
            and answer.status_code == 429
            and b"insufficient" not in answer.content
        ):
            self._good = time.monotonic()
            if self._good - self._free > self._patience_s:
                self._free = self._good
                self.say(
                    f"{self.url} has taken no request for {self._patience_s:g} s ({why}); waiting "
                    "on."
                )
            return
        if time.monotonic() - self._good > self._patience_s:
            raise NobodyAnswersError(
                f"{self.url} has answered nothing for {self._patience_s:g} s ({why}); results so "
                "far are kept. Run the same command again to continue."
            )

    def _tier(self, url: str) -> str | None:
        """The first tier that the server has not refused at this endpoint."""
        refused = self._refused.get(url, ())
        return next((tier for tier in self._tiers if tier not in refused), None)

    def _refuses(self, tier: str | None, url: str, answer: httpx.Response) -> bool:
        """Whether the server refuses a tier that nobody has asked for; it is not sent again."""
        if tier is None or self._own_tier or answer.status_code not in TIER_REFUSED:
            return False
        if b"service_tier" not in answer.content:
            return False
        refused = self._refused.setdefault(url, set())
        if tier not in refused:
            refused.add(tier)
            then = self._tier(url)
            self.say(
                f"{self.url}{url} does not take service_tier {tier} ({_said(answer)}); lines go "
                + ("without one." if then is None else f"with {then}.")
            )
        return True


def _with_tier(line: BatchLine, tier: str | None) -> bytes:
    """The body of a line, with the tier if it names no class itself."""
    if tier is None:
        return bytes(line.body)
    fields = msgspec.json.decode(line.body, type=dict[str, Raw])
    if "priority" not in fields:  # another name for the same
        fields.setdefault("service_tier", Raw(msgspec.json.encode(tier)))
    return msgspec.json.encode(fields)


def _read(answer: httpx.Response) -> LineAnswer:
    """The JSON body of an answer; anything else becomes an error that quotes it."""
    status, body = answer.status_code, answer.content
    request_id = answer.headers.get("x-request-id") or new_request_id()
    try:
        orjson.loads(body)
    except ValueError:
        message = f"The server answered {status}, but not with JSON: {_said(answer)}"
        error = {"message": message, "type": "server_error", "param": None, "code": "no_json"}
        return LineAnswer(
            status if status >= 400 else 502, request_id, orjson.dumps({"error": error})
        )
    if status < 400 and status != 200:
        status = 502
    return LineAnswer(status, request_id, body)


def _delay_s(answer: httpx.Response | None, delay_s: float, most_s: float) -> float:
    """The delay before a retry: the server's, or the usual one with jitter."""
    wished = None if answer is None else _retry_after_s(answer.headers.get("retry-after", ""))
    if wished is None:
        return delay_s * random.uniform(0.5, 1.5)
    return min(wished, most_s) + random.uniform(0, 0.1 * FIRST_DELAY_S)


def _retry_after_s(value: str) -> float | None:
    """Seconds from the header, which has seconds or a date; None without a sensible one."""
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        if value.strip().isdecimal():
            return float(value)
        date = parsedate_to_datetime(value)
        return max(0.0, (date - datetime.now(UTC)).total_seconds())
    return None


def _said(answer: httpx.Response) -> str:
    """The message of an error, or the beginning of the body."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(orjson.loads(answer.content)["error"]["message"])[:_SHOWN_CHARS]
    return answer.text[:_SHOWN_CHARS] or answer.reason_phrase


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__
