"""Webhooks: tells addresses of events, signed as OpenAI signs them, until they confirm.

The signature is that of Standard Webhooks. An event is told at least once, each time with the same
``webhook-id``; what was not confirmed is tried again for 72 hours, less and less often.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import logging
import random
import time
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Seq
from hashlib import sha256
from typing import Protocol, TypeVar
from urllib.parse import urlsplit

from weft import __version__
from weft.batch import points
from weft.batch.outbox import KEPT_S, Delivery
from weft.batch.outward import TIMEOUT_S, OutwardClient
from weft.batch.store import BatchStore
from weft.batch.webhook_settings import WebhookSettings, read_secrets
from weft.core.errors import WeftError

LOOK_S = 0.5
FIRST_DELAY_S, LONGEST_DELAY_S = 5.0, 3600.0
MOST_OPEN = 16  # deliveries at once

logger = logging.getLogger("weft.batch")

Returned = TypeVar("Returned")


class StoreCall(Protocol):
    """Has some work done on the store."""

    def __call__(self, work: Callable[[BatchStore], Returned]) -> Awaitable[Returned]: ...


class WebhookSender:
    """Delivers what is in the outbox.

    Args:
        client: posts; by default one that keeps to the settings.

    Attributes:
        next_due: Unix time of the next delivery, as far as is known; None if there is none.
    """

    def __init__(
        self, call: StoreCall, settings: WebhookSettings, client: OutwardClient | None = None
    ) -> None:
        self.next_due: float | None = None
        self._call = call
        self._settings = settings
        self._client = client or OutwardClient(settings.allow_private)
        self._swept = False
        self._failing: set[str] = set()  # addresses of which the log knows that they fail
        self._open: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Deliver until cancelled."""
        try:
            while True:
                try:
                    await self._look()
                except WeftError as error:
                    logger.warning("Webhooks wait: %s", error.message)
                except Exception as error:
                    logger.error("Webhooks wait: %s", error, exc_info=error)
                await asyncio.sleep(LOOK_S)
        finally:
            for task in self._open.values():
                task.cancel()
            await asyncio.gather(*self._open.values(), return_exceptions=True)
            await self._client.aclose()

    async def _look(self) -> None:
        self._forget_ended()
        room = MOST_OPEN - len(self._open)
        now = time.time()
        if not self._swept:
            await self._call(lambda store: store.outbox.sweep(now))
            self._swept = True
        found = await self._call(lambda store: store.outbox.due(now, MOST_OPEN))
        for delivery in found[:room]:
            if delivery.id not in self._open:
                self._open[delivery.id] = asyncio.create_task(self._deliver(delivery))
        self.next_due = await self._call(lambda store: store.outbox.next_due())

    def _forget_ended(self) -> None:
        for name, task in list(self._open.items()):
            if task.done():
                del self._open[name]
                error = task.exception()
                if isinstance(error, WeftError):
                    logger.warning("A webhook waits: %s", error.message)
                elif error is not None:
                    logger.error("A webhook: %s", error, exc_info=error)

    async def _deliver(self, delivery: Delivery) -> None:
        now = time.time()
        where, age_s = _shown(delivery.url), now - delivery.created_at
        if age_s > KEPT_S:
            await self._call(lambda store: store.outbox.remove(delivery))
            logger.error(
                "%s has not confirmed the event %s in %d tries; it is given up.",
                *(where, delivery.id, delivery.tries),
            )
            return
        due_at = now + TIMEOUT_S + delay_s(delivery.tries)
        if not await self._call(lambda store: store.outbox.claim(delivery, due_at)):
            return  # another server of this folder tells it
        try:
            secrets = await asyncio.to_thread(read_secrets, self._settings.secret_file)
            headers = signed_headers(delivery, int(now), secrets)
            await self._client.post(delivery.url, headers, delivery.body)
        except WeftError as error:
            level = logging.DEBUG if delivery.url in self._failing else logging.WARNING
            self._failing.add(delivery.url)
            text = "%s was not told of an event (%s); it is tried again for 72 hours."
            logger.log(level, text, where, error.message)
            return
        self._failing.discard(delivery.url)
        points.reached("webhook confirmed")
        await self._call(lambda store: store.outbox.remove(delivery))


def delay_s(tries: int) -> float:
    """Seconds before the next try, after so many have failed and one more may."""
    longest = min(FIRST_DELAY_S * 2.0 ** min(tries, 32), LONGEST_DELAY_S)
    return longest * random.uniform(0.5, 1.0)


def signed_headers(delivery: Delivery, now: int, secrets: Seq[bytes]) -> dict[str, str]:
    """The headers of a try; a signature for each secret."""
    signed = b"%b.%d.%b" % (delivery.id.encode(), now, delivery.body)
    signatures = [
        "v1," + base64.b64encode(hmac.new(secret, signed, sha256).digest()).decode()
        for secret in secrets
    ]
    return {
        "host": urlsplit(delivery.url).netloc,
        "user-agent": f"weft/{__version__}",
        "content-type": "application/json",
        "content-length": str(len(delivery.body)),
        "connection": "close",
        "webhook-id": delivery.id,
        "webhook-timestamp": str(now),
        "webhook-signature": " ".join(signatures),
    }


def _shown(url: str) -> str:
    """An address for logs, without what may be secret in it."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"
