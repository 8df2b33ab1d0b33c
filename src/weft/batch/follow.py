"""Follows a batch of a server to its end: a bar in a terminal, else lines now and then."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

from weft.batch.client import BatchClient, ServerAwayError
from weft.batch.forecast import EndForecast
from weft.batch.progress import SAY_EVERY_S
from weft.batch.records import time_of_day

ENDED = ("completed", "failed", "expired", "cancelled")
POLL_S = 1.0
PATIENCE_S = 300.0  # with a server that was there, and is away
DAY_S = 86400.0
FIRST_SAY_S = 10.0
RATE_S = 30.0  # of the past that rates of tokens are of


def follow(client: BatchClient, batch_id: str) -> dict[str, Any]:
    """Show how far a batch has come until it has ended; the batch as it is then.

    A server that goes away meanwhile is waited for.

    Raises:
        ServerAwayError: it does not answer at first, or stays away.
        RefusedError: there is no such batch.
    """
    batch = client.batch(batch_id)
    view = _FollowView()
    good, away = time.monotonic(), False
    try:
        view.show(batch)
        while batch["status"] not in ENDED:
            time.sleep(POLL_S)
            try:
                batch = client.batch(batch_id)
            except ServerAwayError as error:
                if time.monotonic() - good > PATIENCE_S:
                    raise
                if not away:
                    view.say(f"{error.message.partition(';')[0]} Waiting for the server.")
                away = True
                continue
            good = time.monotonic()
            if away:
                view.say("the server is back.")
            away = False
            view.show(batch)
    finally:
        view.close()
    return batch


class _FollowView:
    """What is shown of a batch."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None
        self._status = ""
        self._class = ""
        self._warned = False
        self._say_at = time.monotonic() + FIRST_SAY_S
        self._forecast = EndForecast()
        self._tokens: deque[tuple[float, int, int]] = deque()  # (time, read, written)

    def show(self, batch: Mapping[str, Any]) -> None:
        """Show a batch as it is now."""
        now = time.monotonic()
        counts, extra = batch.get("request_counts") or {}, batch.get("weft") or {}
        done, total = counts.get("completed", 0) + counts.get("failed", 0), counts.get("total", 0)
        if total and self._bar is None:
            terminal = sys.stderr.isatty() and sys.stdout.isatty()
            self._bar = tqdm(
                total=total, initial=done, unit="line", dynamic_ncols=True, disable=not terminal
            )
        if batch["status"] != self._status:
            self._status = batch["status"]
            due = batch.get("expires_at")
            window = "" if due is None else f"; its window ends at {time_of_day(due)}"
            if self._status not in ENDED:
                self.say(f"the batch is {self._status}{window}.")
        self._tell(extra)
        words = [self._rates(batch.get("usage") or {}, now), self._end(batch, now, done, total)]
        if counts.get("failed"):
            words.insert(0, f"{counts['failed']} with an error")
        text = ", ".join(word for word in words if word)
        if self._bar is not None and not self._bar.disable:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(done - self._bar.n)
            self._bar.refresh()
        elif total and now >= self._say_at and self._status not in ENDED:
            self._say_at = now + SAY_EVERY_S
            self.say(f"{done} of {total} lines done{', ' * bool(text)}{text}")

    def say(self, message: str) -> None:
        """Write a line to standard error, above the bar if there is one."""
        tqdm.write(f"weft: {message}", file=sys.stderr)
        sys.stderr.flush()

    def close(self) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.close()

    def _tell(self, extra: Mapping[str, Any]) -> None:
        """Say what has changed of the class and the window."""
        service_class = extra.get("service_class") or ""
        if self._class and service_class != self._class:
            self.say(f"the rest is asked in the class '{service_class}', to be in time.")
        self._class = service_class
        if extra.get("warning") and not self._warned:
            self.say(f"warning: {extra['warning']}")
        self._warned = bool(extra.get("warning"))

    def _rates(self, usage: Mapping[str, Any], now: float) -> str:
        """Tokens a second, lately."""
        read, written = usage.get("input_tokens", 0), usage.get("output_tokens", 0)
        self._tokens.append((now, read, written))
        while len(self._tokens) > 2 and now - self._tokens[1][0] >= RATE_S:
            self._tokens.popleft()
        began, read_before, written_before = self._tokens[0]
        if now - began < POLL_S or (read, written) == (read_before, written_before):
            return ""
        seconds = now - began
        return (
            f"tokens/s: {(read - read_before) / seconds:.0f} in, "
            f"{(written - written_before) / seconds:.0f} out"
        )

    def _end(self, batch: Mapping[str, Any], now: float, done: int, total: int) -> str:
        """The predicted end: what the server says, else by the lines that have ended."""
        own = self._forecast.look(now, done, total) if total else None
        end = (batch.get("weft") or {}).get("predicted_end_at")
        if end is None and own is not None and not self._forecast.stalled:
            end = time.time() + own - now
        if end is None or batch["status"] in ENDED:
            return ""
        due = batch.get("expires_at")
        late = ", after its window" if due is not None and end > due else ""
        today = end - time.time() < DAY_S
        return f"ends about {time_of_day(end)[11 * today :]}{late}"
