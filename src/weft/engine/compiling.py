"""Holds requests back until their grammars are compiled, while the engine serves others."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from typing import Any, Protocol

from weft.core.plan import StepOutputs, Update
from weft.core.ports import Inbox, Lease
from weft.core.types import FinishReason, Request


class PokedInbox(Inbox, Protocol):
    """An inbox whose ``wait`` other threads can end."""

    def poke(self) -> None: ...


class CompilingInbox:
    """An inbox that gives requests with grammars when ``compile`` has finished, well or not."""

    def __init__(self, inbox: PokedInbox, compile: Callable[[str], Future[Any]]) -> None:
        self._inbox = inbox
        self._compile = compile
        self._held: dict[int, tuple[Request, Future[Any]]] = {}

    def receive(self) -> tuple[Seq[Request], Seq[tuple[int, FinishReason]]]:
        requests, cancels = self._inbox.receive()
        if not self._held and all(request.sampling.grammar is None for request in requests):
            return requests, cancels
        ready = [request for request, future in self._held.values() if future.done()]
        for request in ready:
            del self._held[request.id]
        ready += [request for request in requests if not self._hold(request)]
        return ready, [(i, reason) for i, reason in cancels if not self._end(i, reason)]

    def computing(self, sequence_ids: Seq[int]) -> None:
        self._inbox.computing(sequence_ids)

    def publish(self, outputs: StepOutputs) -> None:
        self._inbox.publish(outputs)

    def lend(self, lease: Lease) -> None:
        self._inbox.lend(lease)

    def wait(self) -> None:
        self._inbox.wait()

    def _hold(self, request: Request) -> bool:
        """Hold a request back if its grammar takes time."""
        if request.sampling.grammar is None:
            return False
        self._inbox.computing([request.id])  # if it is this grammar that kills the engine
        future = self._compile(request.sampling.grammar)
        if future.done():
            return False
        self._held[request.id] = request, future
        future.add_done_callback(lambda _: self._inbox.poke())
        return True

    def _end(self, sequence_id: int, reason: FinishReason) -> bool:
        """End a request that is held back, if it is."""
        held = self._held.pop(sequence_id, None)
        if held is not None:
            self.publish(StepOutputs([], [Update(sequence_id, None, finish=reason)]))
        return held is not None
