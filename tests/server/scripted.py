"""An engine client that tests script; needs no torch."""

from __future__ import annotations

import queue
from collections.abc import Sequence as Seq
from typing import Any

from weft.core.plan import Update
from weft.core.types import FinishReason, Request


class ScriptedClient:
    """An engine client that does what a test says, on the test's thread or on the caller's.

    With ``answer`` set, each request gets these tokens at once, from the event loop's own thread.
    """

    def __init__(self, answer: list[int] | None = None, finish: str = "stop") -> None:
        self.submitted: queue.Queue[Request] = queue.Queue()
        self.cancelled: queue.Queue[tuple[int, FinishReason]] = queue.Queue()
        self.sinks: dict[int, Any] = {}
        self.answer = answer
        self.finish = FinishReason(finish)

    def submit(self, requests: Seq[Request], sink: Any) -> None:
        for request in requests:
            self.sinks[request.id] = sink
            self.submitted.put(request)
            if self.answer is not None:
                for token in self.answer:
                    sink([Update(request.id, token)])
                sink([Update(request.id, None, finish=self.finish)])

    def cancel(self, sequence_id: int, reason: FinishReason = FinishReason.CANCELLED) -> None:
        self.cancelled.put((sequence_id, reason))

    def embed(self, request: Request, embedding: bytes) -> None:
        """Publish the end of an embedding request."""
        end = Update(request.id, None, finish=FinishReason.STOP, embedding=embedding)
        self.sinks[request.id]([end])

    def send(self, request: Request, *tokens: int, finish: str | None = None) -> None:
        """Publish tokens, and perhaps the end, in one call."""
        updates = [Update(request.id, token) for token in tokens]
        if finish is not None:
            updates.append(Update(request.id, None, finish=FinishReason(finish)))
        self.sinks[request.id](updates)
