"""The request plane's side of the ring.

fds = create_ring()                              # by a parent of both processes
subprocess.Popen(..., pass_fds=fds.pass_fds)     # str(fds) among the arguments
client = RingClient(parse_ring(text))

client.attach(asyncio_loop)                      # or client.run_in_thread()
client.watch_engine(pidfd)
client.submit(requests, sink)
"""

from __future__ import annotations

import asyncio
import os
import select
import threading
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

from weft.core.errors import (
    EngineBusyError,
    EngineDeadError,
    ModelChangedError,
    ParameterError,
    RingLinkError,
    WeftError,
)
from weft.core.images import pack_images
from weft.core.plan import Update
from weft.core.sinks import Sink, deliver
from weft.core.types import FinishReason, Request
from weft.ring.codec import pack_sampling, pack_token_lists, unpack_news
from weft.ring.layout import (
    REASON_OF,
    SIZES,
    EngineInfo,
    LoggedRecovery,
    LoggedStep,
    Refusal,
)
from weft.ring.link import RingAccess
from weft.ring.port import open_port
from weft.ring.segment import RingFds

CLOCK_FIELDS = ("started_ns", "updated_ns")  # of the info page, on the engine's monotonic clock


class RingClient:
    """Implements ``weft.core.ports.EngineClient`` on a ring, of which it is the one request plane.

    Sinks are called from ``poll``: on the event loop, or on the client's own thread. They must not
    block. ``submit`` and ``cancel`` may be called on any thread.

    Attributes:
        on_model_change: called once ``model_change`` is set and what was open has ended.

    Raises:
        ParameterError: the memory is no ring, or one of another version.
        RingLinkError: the agent of a ring elsewhere cannot be reached, or refuses.
    """

    def __init__(self, ring: RingFds | RingAccess) -> None:
        self._port = open_port(ring)
        self._ring = self._port.ring
        self._sinks: dict[int, Sink] = {}
        self._vectors: dict[int, array[int]] = {}  # words of embeddings so far
        self._lock = threading.Lock()
        self._failure: WeftError | None = None
        self._unreachable: WeftError | None = None  # the port's failure, as it was seen last
        self._info = EngineInfo()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._engine = -1
        self._on_death: Callable[[], None] | None = None
        self._thread: threading.Thread | None = None
        self._changed = -1
        self._closed = False
        self.on_model_change: Callable[[], None] | None = None

    @property
    def model_change(self) -> ModelChangedError | None:
        """Why this client can serve nobody any more: its engine has another model now."""
        failure = self._port.failure
        return failure if isinstance(failure, ModelChangedError) else None

    # -- requests -----------------------------------------------------------------------------

    def submit(self, requests: Seq[Request], sink: Sink) -> None:
        """Submit all of these requests, or none of them.

        Tokens that a request already has in ``output`` are not published again.

        Raises:
            EngineBusyError: slots or memory are full (429).
            EngineDeadError: the engine has ended, or is not ready yet (503).
            ParameterError: an id is in use, or the requests are too large for this ring, even if it
                were empty.
        """
        slots: list[int] = []
        with self._lock:
            if (failure := self._failure or self._port.refusal) is not None:
                raise failure
            try:
                for request in requests:
                    slots.append(self._prepare(request))
                self._check_ids(requests)
            except WeftError as error:
                self._ring.abandon(slots)
                self._port.push()
                if isinstance(error, EngineBusyError) and self._never_fit(requests):
                    raise ParameterError(
                        f"The request's {len(requests)} sequences do not fit into the memory "
                        "shared with the engine at once; lower n, or raise ring_slots and "
                        "ring_memory.",
                        param="n",
                    ) from None
                raise
            for request in requests:
                self._sinks[request.id] = sink
                if request.embed:
                    self._vectors[request.id] = array("I")
            self._ring.submit(slots)
            self._port.push()

    def _never_fit(self, requests: Seq[Request]) -> bool:
        """Whether requests that found no room would find none in an empty ring either."""
        ring = self._ring
        return len(requests) > ring.slots or ring.free_slots == ring.slots

    def _check_ids(self, requests: Seq[Request]) -> None:
        ids = [request.id for request in requests]
        if len(set(ids)) < len(ids) or any(i in self._sinks for i in ids):
            raise ParameterError("A request id is in use already.", param="id")

    def _prepare(self, request: Request) -> int:
        sampling = request.sampling
        slot = self._ring.prepare(
            request.id,
            request.prompt,
            pack_sampling(request),
            list(sampling.logit_bias.items()),
            sampling.stop_token_ids,
            request.eos_token_ids,
            request.service_class.encode(),
            request.cache_salt,
            (sampling.grammar or "").encode(),
            pack_token_lists(sampling),
            pack_images(request.images),
            request.output,
            self._most_tokens(request),
        )
        if slot >= 0:
            return slot
        if -slot == Refusal["TOO_LARGE"]:
            raise ParameterError(
                "The request is larger than the memory shared with the engine; lower max_tokens or "
                "the number of log probabilities, or raise ring_memory.",
                param="max_tokens",
            )
        raise EngineBusyError("The server is at its limit of requests in flight; try again later.")

    def _most_tokens(self, request: Request) -> int:
        """How many tokens the engine can publish; the output may grow so far."""
        if not 0 < len(request.prompt) <= SIZES["max_records"]:
            raise ParameterError("The prompt is empty or far too long.", param="prompt")
        info = self.info()
        if request.embed:
            return len(request.sampling.logprob_token_ids) or max(1, info.hidden_size)
        wanted = request.sampling.max_tokens
        if info.max_model_len:
            # The engine refuses an over-long prompt with its own message.
            left = max(1, info.max_model_len - len(request.prompt))
            return left if wanted is None else min(wanted, left)
        if wanted is None:
            raise EngineDeadError("The engine is not ready yet; try again later.")
        return wanted

    def cancel(self, sequence_id: int, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """Ask for the end of a request; its last update still comes. Unknown ids are ignored."""
        with self._lock:
            self._ring.cancel(sequence_id, REASON_OF[reason])
            self._port.push()

    def poke(self) -> None:
        """Have an engine that sleeps look around: at targets, and at its info page."""
        with self._lock:
            if not self._closed:
                self._ring.ring()
                self._port.push()

    def info(self) -> EngineInfo:
        """The engine's latest info page."""
        values = self._ring.info()
        if values:  # empty while an engine that died amid writing has no successor
            for name in CLOCK_FIELDS:
                values[name] -= self._port.ahead_ns
            self._info = EngineInfo(**values)
        if self._port.failure is not None:
            return replace(self._info, ready=0)
        return self._info

    def steps(self, since: int) -> tuple[int, list[LoggedStep]]:
        """How many steps were logged so far, and those from number ``since`` on that are there."""
        written, entries = self._ring.steps(since)
        ahead_ns = self._port.ahead_ns
        return written, [LoggedStep.read(number, values, ahead_ns) for number, values in entries]

    def recoveries(self) -> list[LoggedRecovery]:
        """The latest engines that took over from another one, the oldest first."""
        ahead_ns = self._port.ahead_ns
        _, entries = self._ring.recoveries()
        return [
            LoggedRecovery(engine, step, died_ns - ahead_ns, back_ns - ahead_ns)
            for _, (engine, step, died_ns, back_ns) in entries
        ]

    @property
    def engines(self) -> int:
        """Number of engines that have served the ring so far, including the present one."""
        return self._ring.engines()

    @property
    def memory_kills(self) -> int:
        """Engines that were killed because memory ran out."""
        return self._ring.memory_kills()

    @property
    def out_of_memory(self) -> bool:
        """Whether the last engine has no successor yet, for want of memory."""
        return self._ring.out_of_memory()

    @property
    def killed_for_memory(self) -> bool:
        """Whether the last engine, or one that was to succeed it, was killed for want of memory."""
        return self._ring.killed_for_memory()

    @property
    def in_flight(self) -> int:
        """Requests that have not ended."""
        return len(self._sinks)

    # -- news ---------------------------------------------------------------------------------

    def fileno(self) -> int:
        """A descriptor that is readable when ``poll`` may have something, if ``arm`` said so."""
        return self._port.fileno()

    def poll(self) -> bool:
        """Pass new updates to every sink; return whether there were any."""
        batches: dict[Sink, list[Update]] = {}
        with self._lock:
            if self._closed:
                return False
            ahead_ns = self._port.ahead_ns
            for news in self._ring.poll():
                updates = unpack_news(news, ahead_ns)
                if news[0] in self._vectors:
                    updates = self._gather(news[0], updates)
                sink = self._sinks.get(news[0])
                if sink is None:
                    continue
                batches.setdefault(sink, []).extend(updates)
                if news[-1] is not None:
                    del self._sinks[news[0]]
            self._port.push()
        deliver(batches, self._sinks, self.cancel)
        return bool(batches)

    def _gather(self, request_id: int, updates: list[Update]) -> list[Update]:
        """Keep the words of an embedding until its end, which then brings them."""
        words = self._vectors[request_id]
        words.extend(update.token for update in updates if update.token is not None)
        if not updates or updates[-1].finish is None:
            return []
        del self._vectors[request_id]
        whole = updates[-1].finish is FinishReason.STOP
        return [updates[-1]._replace(token=None, embedding=words.tobytes() if whole else None)]

    def arm(self) -> bool:
        """Ask to be woken through ``fileno``; False if there is news already."""
        with self._lock:
            return self._closed or self._ring.sleep()

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have an event loop drive this client. Call it on the loop's thread."""
        self._loop = loop
        loop.add_reader(self._port.fileno(), self._on_wake)
        if self._engine >= 0:
            loop.add_reader(self._engine, self._on_engine_death)
        loop.call_soon(self._on_wake)

    def _on_wake(self) -> None:
        self._drain_wake()
        self.poll()
        if self._loop is not None and not self.arm():
            # News already: let the others run first, then go on.
            self._loop.call_soon(self._on_wake)

    def _drain_wake(self) -> None:
        with self._lock:
            self._port.drain()
            port = self._port
            moved = port.ring is not self._ring or port.failure is not self._unreachable
        if moved:
            self._move()

    def _move(self) -> None:
        """The link to the ring is lost for good, or there is another ring now."""
        port, self._unreachable = self._port, self._port.failure
        self.fail_all(port.failure or RingLinkError("The engine was lost; try again."))
        with self._lock:
            self._ring, self._failure = port.ring, port.failure
        if self.model_change is not None and self.on_model_change is not None:
            self.on_model_change()

    def run_in_thread(self) -> None:
        """Drive this client by its own thread until it is closed."""
        self._changed = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="weft-ring", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closed:
            self.poll()
            if not self.arm():
                continue
            poller = select.poll()
            for fd in (self._port.fileno(), self._changed, self._engine):
                if fd >= 0:
                    poller.register(fd, select.POLLIN)
            ready = {fd for fd, _ in poller.poll()}
            if self._changed in ready:
                os.eventfd_read(self._changed)
            self._drain_wake()
            if self._engine in ready:
                self._on_engine_death()

    # -- death --------------------------------------------------------------------------------

    def watch_engine(self, pidfd: int, on_death: Callable[[], None] | None = None) -> None:
        """Notice the death of the engine process at once. Call it again for its successor.

        Args:
            pidfd: of the engine; the client closes it.
            on_death: called instead of ending every request with EngineDeadError.
        """
        self._unwatch()
        self._engine, self._on_death, self._failure = pidfd, on_death, None
        if self._loop is not None:
            self._loop.add_reader(pidfd, self._on_engine_death)
        if self._thread is not None:
            os.eventfd_write(self._changed, 1)

    def _unwatch(self) -> None:
        engine, self._engine = self._engine, -1
        if engine < 0:
            return
        if self._loop is not None:
            self._loop.remove_reader(engine)
        os.close(engine)

    def _on_engine_death(self) -> None:
        self._unwatch()
        self.poll()  # what it said before it died still counts
        if self._on_death is not None:
            self._on_death()
        else:
            self.fail_all(EngineDeadError("The engine has stopped; try again later."))

    def fail_all(self, error: WeftError) -> None:
        """End every open request with ``error``; submissions raise it until ``watch_engine``."""
        batches: dict[Sink, list[Update]] = {}
        with self._lock:
            self._failure = error
            self._ring.disown(list(self._sinks))
            self._port.push()
            for request_id, sink in self._sinks.items():
                end = Update(request_id, None, finish=FinishReason.ERROR, error=error)
                batches.setdefault(sink, []).append(end)
            self._sinks.clear()
            self._vectors.clear()
        deliver(batches, self._sinks, self.cancel)

    def leave(self) -> None:
        """Give the ring up as this process ends; nobody is told of what is open."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._failure = EngineDeadError("The connection to the engine was closed.")
                self._ring.detach()
                self._port.close()

    def close(self) -> None:
        """End what is open and give the ring up. May be called twice."""
        if self._closed:
            return
        self.fail_all(EngineDeadError("The connection to the engine was closed."))
        with self._lock:
            self._closed = True
            self._ring.detach()
        if self._loop is not None:
            self._loop.remove_reader(self._port.fileno())
        if self._thread is not None:
            os.eventfd_write(self._changed, 1)
            if self._thread is not threading.current_thread():
                self._thread.join()
            os.close(self._changed)
        self._port.close()
        self._unwatch()
        self._loop = None
