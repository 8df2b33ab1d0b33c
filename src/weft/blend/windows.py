"""Time windows: selects the waiting requests to blend next, so that each meets its deadline.

Blending across all that waits may put off a request until the very end of its pool, so a pool is
only as large as can end before the deadline of its oldest request (BlendServe section 7). A request
that is late in any case sets no limit: small pools would make all others late, too.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from weft.core.errors import ParameterError

DEADLINE_S = 24 * 3600.0  # the window of batch APIs (BlendServe section 1)


class _Waiting(NamedTuple):
    request: int
    due_s: float
    work_s: float


class Windows:
    """Requests in the order in which they came, taken in pools.

    Args:
        deadline_s: seconds after its arrival by which a request must have ended.
        least_s: work that a pool has at least if there is so much, whatever is due: pools of a few
            requests leave the engine empty, and so make all that follow late.
    """

    def __init__(self, deadline_s: float = DEADLINE_S, least_s: float = 0.0) -> None:
        if deadline_s <= 0:
            raise ParameterError("A deadline must lie ahead.", param="deadline_s")
        self._deadline_s, self._least_s = deadline_s, least_s
        self._waiting: deque[_Waiting] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: int, arrival_s: float, work_s: float) -> None:
        """A request came; ``work_s`` is its part of the engine's time.

        Raises:
            ParameterError: it came before the one added last, or its work is negative.
        """
        due = arrival_s + self._deadline_s
        if self._waiting and due < self._waiting[-1].due_s:
            raise ParameterError(f"Request {request} comes out of order.", param="arrival_s")
        if work_s < 0:
            raise ParameterError(f"Request {request} has negative work.", param="work_s")
        self._waiting.append(_Waiting(request, due, work_s))

    def take(self, now_s: float) -> list[int]:
        """The next pool: as many requests, oldest first, as end before the first one is due.

        The first one of those that can still be in time; if none can, all that wait.
        """
        due, end = math.inf, now_s
        pool: list[int] = []
        while self._waiting and (
            end < now_s + self._least_s or end + self._waiting[0].work_s <= due
        ):
            taken = self._waiting.popleft()
            end += taken.work_s
            pool.append(taken.request)
            if end <= taken.due_s:
                due = min(due, taken.due_s)
        return pool

    def late(self, now_s: float) -> list[int]:
        """Requests that cannot end in time even if all that wait run in order from now."""
        end, found = now_s, []
        for waiting in self._waiting:
            end += waiting.work_s
            if end > waiting.due_s:
                found.append(waiting.request)
        return found
