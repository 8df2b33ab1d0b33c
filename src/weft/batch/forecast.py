"""When a batch will be complete: by its own lines that have ended lately, or before it begins."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from weft.batch.pace import TokenPace
from weft.batch.records import BatchRecord

WINDOW_S = 60.0  # of the past that counts
OBSERVED_S = 10.0  # less says nothing
LATEST_S = 10 * 365 * 86400.0  # from now; what takes longer is said to end then


class EndForecast:
    """Predicts the end of one batch; ``look`` at it now and then.

    Attributes:
        still_s: seconds since a line has ended, or since the first look.
        stalled: whether that is so long that the end is told by it.
    """

    def __init__(self) -> None:
        self.still_s = 0.0
        self.stalled = False
        self._moved_at = 0.0
        self._seen: deque[tuple[float, int]] = deque()  # (time, lines done), oldest first

    def look(self, now: float, done: int, total: int, at_once: int = 1) -> float | None:
        """The time at which all lines will be done.

        If none has ended for a while, those that run are taken to need as long again, and so does
        whatever comes after them.

        Args:
            now: seconds on a clock that does not go back.
            at_once: lines that run.

        Returns:
            None if it is too early to say.
        """
        if not self._seen or done != self._seen[-1][1]:
            self._moved_at = now
        self.still_s = now - self._moved_at
        self._seen.append((now, done))
        while len(self._seen) > 2 and now - self._seen[1][0] >= WINDOW_S:
            self._seen.popleft()
        began, before = self._seen[0]
        self.stalled = before == done < total and now - began >= WINDOW_S
        if done >= total:
            return now
        if done == before:
            rounds = math.ceil((total - done) / max(1, at_once))
            return now + rounds * self.still_s if self.stalled else None
        if now - began < OBSERVED_S:
            return None
        return now + (total - done) * (now - began) / (done - before)


def predict_end(
    pace: TokenPace, record: BatchRecord, others: Iterable[BatchRecord], now: float
) -> float | None:
    """The time at which a batch will be complete if batches go on at a pace and no others come.

    Keys share tokens equally until one has nothing left, so another key's batches cost as much as
    this key has before the end of the batch, at most. Of one key what is due first goes first.

    Args:
        others: batches that have not ended; those for other models do not count.

    Returns:
        None if nothing like the work was seen before, or nothing is known of the batch.
    """
    work_s = pace.seconds(record.demand_left) if record.demand_lines else None
    of_keys: dict[bytes, float] = {}
    for other in others:
        if other.id == record.id or other.served != record.served:
            continue
        if other.owner == record.owner and other.expires_at > record.expires_at:
            continue
        left_s = pace.seconds(other.demand_left)
        if left_s is None:
            return None
        of_keys[other.owner] = of_keys.get(other.owner, 0.0) + left_s
    if work_s is None:
        return None
    work_s += of_keys.pop(record.owner, 0.0)
    work_s += sum(min(work_s, left_s) for left_s in of_keys.values())
    return now + min(work_s, LATEST_S)
