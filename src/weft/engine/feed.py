"""Hands requests to an engine as it has room for them, and yields what becomes of them."""

from __future__ import annotations

import itertools
import queue
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq

from weft.core.errors import EngineBusyError, ParameterError
from weft.core.plan import Update
from weft.core.ports import EngineClient
from weft.core.sinks import Sink
from weft.core.types import Request

SUBMITTED_AT_ONCE = 256  # requests that are handed over together


def updates_of(client: EngineClient, requests: Seq[Request]) -> Iterator[Update]:
    """Submit requests and yield their updates until all have ended; cancel on the way out.

    Those that find no room are submitted when others have ended.

    Raises:
        EngineBusyError: there is no room, and none of these requests will make any.
        ParameterError: a request is too large for the engine's client.
    """
    news: queue.SimpleQueue[Seq[Update]] = queue.SimpleQueue()
    waiting = deque(requests)
    open_ids: set[int] = set()
    ended = True
    try:
        while waiting or open_ids:
            if waiting and ended:
                _submit_some(client, waiting, open_ids, news.put)
                ended = False
            for update in news.get():
                if update.finish is not None:
                    open_ids.discard(update.sequence_id)
                    ended = True
                yield update
    finally:
        for sequence_id in open_ids:
            client.cancel(sequence_id)


def _submit_some(
    client: EngineClient, waiting: deque[Request], open_ids: set[int], sink: Sink
) -> None:
    """Hand over as many of the waiting requests as there is room for. Raises as ``updates_of``."""
    size = SUBMITTED_AT_ONCE
    while waiting:
        some = list(itertools.islice(waiting, size))
        try:
            client.submit(some, sink)
        except (EngineBusyError, ParameterError) as error:
            if size > 1:
                size = 1
                continue
            if not open_ids or isinstance(error, ParameterError):
                raise
            return
        open_ids.update(waiting.popleft().id for _ in some)
