"""Holds requests back until their images and grammars are ready, while the engine serves others."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from typing import Any, Protocol

from weft.core.errors import OutOfMemoryError, ParameterError, WeftError
from weft.core.plan import StepOutputs, Update
from weft.core.ports import Inbox, Lease
from weft.core.types import FinishReason, Request


class PokedInbox(Inbox, Protocol):
    """An inbox whose ``wait`` other threads can end."""

    def poke(self) -> None: ...


class CompilingInbox:
    """An inbox that gives requests when nothing of them has to be prepared any more.

    Args:
        compile: compiles a grammar; its request follows when that has ended, well or not.
        encode: gives a request with its images encoded; None: there is nothing to encode with.
    """

    def __init__(
        self,
        inbox: PokedInbox,
        compile: Callable[[str], Future[Any]],
        encode: Callable[[Request], Future[Request]] | None = None,
    ) -> None:
        self._inbox = inbox
        self._compile = compile
        self._encode = encode
        self._held: dict[int, tuple[Request, Future[Any]]] = {}
        self._seeing: dict[int, Future[Request]] = {}

    def receive(self) -> tuple[Seq[Request], Seq[tuple[int, FinishReason]]]:
        requests, cancels = self._inbox.receive()
        held = self._held or self._seeing
        if not held and all(
            request.sampling.grammar is None and not request.images for request in requests
        ):
            return requests, cancels
        ready = [request for request, future in self._held.values() if future.done()]
        for request in ready:
            del self._held[request.id]
        seen = self._encoded()
        seen += [request for request in requests if not self._begin_images(request)]
        ready += [request for request in seen if not self._hold(request)]
        return ready, [(i, reason) for i, reason in cancels if not self._end(i, reason)]

    def computing(self, sequence_ids: Seq[int]) -> None:
        self._inbox.computing(sequence_ids)

    def publish(self, outputs: StepOutputs) -> None:
        self._inbox.publish(outputs)

    def lend(self, lease: Lease) -> None:
        self._inbox.lend(lease)

    def wait(self) -> None:
        self._inbox.wait()

    def _begin_images(self, request: Request) -> bool:
        """Have the images of a request encoded, if it has any."""
        if not request.images:
            return False
        if self._encode is None:
            self._fail(request.id, ParameterError("This engine reads no images."))
            return True
        self._inbox.computing([request.id])  # if it is an image that kills the engine
        future = self._seeing[request.id] = self._encode(request)
        future.add_done_callback(lambda _: self._inbox.poke())
        return True

    def _encoded(self) -> list[Request]:
        """The requests whose images are ready; those whose images are unsound end."""
        found = []
        for number, future in list(self._seeing.items()):
            if not future.done():
                continue
            del self._seeing[number]
            error = future.exception()
            if error is None:
                found.append(future.result())
            elif isinstance(error, WeftError):
                self._fail(number, error)
            elif isinstance(error, MemoryError):
                self._fail(number, OutOfMemoryError("There is no memory to encode an image."))
            else:
                raise error
        return found

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
        held: object = self._held.pop(sequence_id, None)
        if held is None and (future := self._seeing.pop(sequence_id, None)) is not None:
            future.cancel()
            held = future
        if held is not None:
            self.publish(StepOutputs([], [Update(sequence_id, None, finish=reason)]))
        return held is not None

    def _fail(self, sequence_id: int, error: WeftError) -> None:
        end = Update(sequence_id, None, finish=FinishReason.ERROR, error=error)
        self.publish(StepOutputs([], [end]))
