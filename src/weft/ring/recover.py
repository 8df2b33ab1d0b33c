"""Recovers the requests of a dead engine: completes, resumes, or fails those that crash engines.

The slot counts the engines that died computing its sequence. After a first crash everything goes on
at once. A request in a second crash without progress in between is a suspect: until it has
advanced by a few tokens, only suspects that have done so run beside it. A crash then counts as its
own, and after ``max_crashes`` of these it fails alone. A kill from outside does not count as a
crash, up to 8 times without progress in between.

Kills because memory ran out are counted separately, and not as crashes: a request in two of them is
computed with less beside it, and finally fails for lack of memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq

from weft.core.errors import RequestCrashedError, RequestOutOfMemoryError
from weft.core.types import Request
from weft.ring import _native
from weft.ring.layout import SIZES

SHARED, SOLE = 1, 2  # Blame in ring.hpp
SUSPECTED = SIZES["suspected"]  # crashes that make a request a suspect


class Quarantine:
    """Decides what may be computed together.

    Args:
        max_crashes: of a sequence that alone is to blame, until it is given up; as often may memory
            run out while nothing but it is new.
    """

    def __init__(self, engine: _native.Engine, max_crashes: int) -> None:
        self._engine = engine
        self._max_crashes = max_crashes
        self._trial: int | None = None
        self._suspects: deque[Request] = deque()
        self._others: list[Request] = []

    def check(self, request: Request) -> None:
        """Raise if the request is to be given up.

        Raises:
            RequestCrashedError: it is to blame for crashes.
            RequestOutOfMemoryError: memory has run out again and again.
        """
        most = SUSPECTED + self._max_crashes
        if request.memory_kills >= most:
            raise RequestOutOfMemoryError(
                f"Memory ran out {request.memory_kills} times while the engine computed this "
                "request, which is therefore not tried again; the server needs more memory, or "
                "settings that take less."
            )
        if request.crashes >= most:
            raise RequestCrashedError(
                f"The engine has stopped {request.crashes} times while it computed this request, "
                "which is therefore not tried again."
            )

    def admit(self, requests: Seq[Request]) -> list[Request]:
        """Take these in, and return what may be computed from now on."""
        for request in requests:
            (self._suspects if _suspected(request) else self._others).append(request)
        if self._trial is not None and not self._engine.cleared(self._trial):
            return []
        self._trial = None
        if self._suspects:
            request = self._suspects.popleft()
            self._trial = request.id
            return [request]
        admitted, self._others = self._others, []
        return admitted

    def computing(self, sequence_ids: Seq[int]) -> None:
        """These are computed from now on, and charged if the engine dies."""
        shared = [sequence_id for sequence_id in sequence_ids if sequence_id != self._trial]
        self._engine.set_blame(shared, SHARED)
        if self._trial is not None and len(shared) < len(sequence_ids):
            self._engine.set_blame([self._trial], SOLE)

    def remove(self, sequence_id: int) -> bool:
        """Forget a request that is not admitted yet; False if it is not one of these."""
        for held in (self._suspects, self._others):
            for request in held:
                if request.id == sequence_id:
                    held.remove(request)
                    return True
        return False

    @property
    def held(self) -> set[int]:
        """Requests that wait for admission."""
        return {request.id for request in (*self._suspects, *self._others)}

    @property
    def idle(self) -> bool:
        """Whether no request waits for admission."""
        return not (self._suspects or self._others)


def _suspected(request: Request) -> bool:
    return max(request.crashes, request.memory_kills) >= SUSPECTED
