"""The engine's side of one or several rings.

inbox = RingInbox([RingFds.parse(text)], vocab_size=spec.vocab_size)
inbox.write_info(EngineInfo(ready=1, pid=os.getpid(), max_model_len=...))
loop = EngineLoop(scheduler, executor, inbox, clock)
while not inbox.closed:
    if not loop.step():
        inbox.wait()
inbox.close()
"""

from __future__ import annotations

import errno
import os
import select
import threading
from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from weft.core.errors import EngineDeadError, InvariantError, ParameterError, WeftError
from weft.core.plan import StepOutputs, Update
from weft.core.ports import Lease
from weft.core.process import BEAT_S
from weft.core.types import DEFAULT_CLASSES, FinishReason, Request
from weft.ring import _native
from weft.ring.codec import SAMPLING, pack_logprob, unpack_request
from weft.ring.layout import FINISH_OF, REASON_OF, Bell, EngineInfo
from weft.ring.recover import Quarantine
from weft.ring.segment import RingFds, attached
from weft.ring.step_log import StepWriter

DEFAULT_NAMES = tuple(row.name for row in DEFAULT_CLASSES)
_NO_PROCESS = (errno.ESRCH, errno.EINVAL)  # it has ended, or its number is corrupt


class RingInbox:
    """Implements ``weft.core.ports.Inbox``; sequence ids are chosen here, unique per engine.

    The engine that held these rings before must be dead: what it had in flight is pending again,
    and comes as requests with the output that has been given out already.
    ``stop`` and ``poke`` may be called on any thread; everything else on the engine's own.

    Args:
        vocab_size: prompts with ids beyond it are refused.
        classes: names of the service classes, which the log of steps counts apart.
        max_crashes: engines that may die of one request that alone is to blame.
        spin_s: how long ``wait`` looks before it sleeps.

    Raises:
        ParameterError: a descriptor is no ring, or one of another version.
    """

    def __init__(
        self,
        rings: Seq[RingFds],
        *,
        vocab_size: int | None = None,
        classes: Seq[str] = DEFAULT_NAMES,
        max_crashes: int = 3,
        spin_s: float = 50e-6,
    ) -> None:
        with attached():
            self._engine = _native.Engine([(fds.memory, fds.wake) for fds in rings], SAMPLING)
        self._outlet = self._engine.outlet()
        self._log = StepWriter(self._engine, classes)
        self.closed = False
        self._vocab_size = vocab_size
        self._quarantine = Quarantine(self._engine, max_crashes)
        self._spin_ns = int(spin_s * 1e9)
        self._watch = _DeathWatch(self._engine)

    # -- the loop's port ----------------------------------------------------------------------

    def receive(self) -> tuple[Seq[Request], Seq[tuple[int, FinishReason]]]:
        """New requests in the order of their arrival, and sequences that are to end."""
        claims, cancels = self._engine.receive()
        if not claims and not cancels and self._quarantine.idle:
            return (), ()
        self._watch.look()
        claimed = [request for claim in claims if (request := self._admit(claim)) is not None]
        ends = []
        for sequence_id, number in cancels:
            reason = FINISH_OF.get(number, FinishReason.CANCELLED)
            if self._quarantine.remove(sequence_id):
                self._finish(Update(sequence_id, None, finish=reason))
            else:
                ends.append((sequence_id, reason))
        requests = self._quarantine.admit(claimed)
        self._engine.flush(Bell["CONTROL"])
        return requests, ends

    def _admit(self, claim: tuple[Any, ...]) -> Request | None:
        """The request of a claim, or None if it has found its end here."""
        sequence_id = claim[0]
        try:
            request = unpack_request(claim, self._vocab_size)
            self._quarantine.check(request)
            return request
        except WeftError as error:
            self._finish(Update(sequence_id, None, finish=FinishReason.ERROR, error=error))
            return None

    def computing(self, sequence_ids: Seq[int]) -> None:
        """Record the sequences of the steps in flight, to be charged if the engine dies."""
        self._quarantine.computing(sequence_ids)

    def blame(self) -> None:
        """Record that the engine fails by itself, which charges all sequences it claimed.

        Other than one that is killed it may fail before a sequence is computed, or amid planning.
        """
        if not self._engine.superseded:
            held = self._quarantine.held
            self.computing([i for i in self._engine.open_ids() if i not in held])

    def publish(self, outputs: StepOutputs) -> None:
        """Write tokens and ends where the request planes find them, and wake those who sleep.

        Then write the step into the log. What a slot can no longer take, because its words are
        corrupt, is lost with that slot alone.

        Raises:
            InvariantError: another engine holds the rings now; this one must end.
        """
        held = self._engine.publish(outputs.tokens)
        for update in outputs.updates:
            held &= self._say(update)
        self._engine.flush(Bell["OUTPUT"])
        if not held and self._engine.superseded:
            raise InvariantError("Another engine has taken over the ring.")
        if outputs.step is not None:
            self._log.write(outputs.step)

    def _say(self, update: Update) -> bool:
        sequence_id, held = update.sequence_id, True
        scores = update.prompt_logprobs
        if scores is not None:
            entries = [pack_logprob(entry) for entry in scores.entries]
            held = self._engine.publish_prompt(sequence_id, scores.start, entries)
        if update.embedding is not None:
            words = array("I", update.embedding)
            held &= self._engine.publish([(sequence_id, word) for word in words])
        if update.finish is not None:
            return self._finish(update) and held
        if update.logprob is not None:
            scored = pack_logprob(update.logprob)
            return self._engine.publish_scored(sequence_id, scored, update.cached_tokens) and held
        if update.token is not None:
            return self._engine.publish([(sequence_id, update.token)]) and held
        return held

    def _finish(self, update: Update) -> bool:
        assert update.finish is not None
        error = update.error
        last = update.token if update.logprob is None else pack_logprob(update.logprob)
        return self._engine.finish(
            update.sequence_id,
            REASON_OF[update.finish],
            last,
            update.cached_tokens,
            0 if error is None else error.http_status,
            "" if error is None else error.code,
            "" if error is None else error.param or "",
            "" if error is None else error.message,
            0 if error is None else error.retry_after_s or 0,
            update.scheduled_ns,
            update.prefilled_ns,
        )

    def lend(self, lease: Lease) -> None:
        """Grant a lease, which publishes here and ends as soon as there is something to receive.

        Not while requests wait to be tried: each trial is over after a few tokens.
        """
        self._watch.look()
        if self._quarantine.idle:
            lease.grant(self._outlet)
        else:
            lease.recall()

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until there may be something to receive, ``stop`` was called, or time is up.

        May return early, and does so after ``BEAT_S``: a signal that comes between looking and
        sleeping is seen then at the latest.
        """
        self._watch.look()
        self._log.forget()
        if not self.closed:
            sleep_s = BEAT_S if timeout_s is None else min(timeout_s, BEAT_S)
            self._engine.wait(self._spin_ns, int(sleep_s * 1e9))

    # -- life ---------------------------------------------------------------------------------

    def stop(self) -> None:
        """Make ``closed`` true and end a ``wait``. For other threads and signal handlers."""
        self.closed = True
        self.poke()

    def poke(self) -> None:
        """End a ``wait``. For other threads."""
        self._engine.poke()

    def fail(self, error: WeftError) -> None:
        """End every open request with ``error``."""
        self.receive()  # what has just come in gets an answer, too
        for _ in range(2):  # a second end does not wait for room, as a first one may
            for sequence_id in self._engine.open_ids():
                self._finish(Update(sequence_id, None, finish=FinishReason.ERROR, error=error))
        self._engine.flush(Bell["CONTROL"])

    def close(self) -> None:
        """End what is open and stop watching. May be called twice."""
        if self._watch.closed:
            return
        self.closed = True
        self.fail(EngineDeadError("The engine was closed."))
        self._watch.close()

    # -- looking ------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Sequences that have not ended."""
        return len(self._engine.open_ids())

    def write_info(self, info: EngineInfo) -> None:
        """Publish limits, load and progress to the request planes."""
        self._engine.write_info(info.values())


@dataclass
class _Watched:
    ring: int
    epoch: int


class _DeathWatch:
    """A thread that sleeps on the pidfds of the request planes."""

    def __init__(self, engine: _native.Engine) -> None:
        self.closed = False
        self._engine = engine
        self._known: dict[int, int] = {}  # ring -> epoch of the request plane being watched
        self._watched: dict[int, _Watched] = {}  # by pidfd
        self._dropped: list[int] = []  # pidfds that the thread closes
        self._lock = threading.Lock()
        self._changed = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="weft-ring-watch", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Watch request planes that have attached since the last call."""
        for ring, (epoch, pid) in enumerate(self._engine.clients()):
            if epoch % 2 == 0 or self._known.get(ring) == epoch or pid == os.getpid():
                continue
            try:
                self._add(ring, os.pidfd_open(pid))
            except (OSError, OverflowError) as error:
                if isinstance(error, OSError) and error.errno not in _NO_PROCESS:
                    raise ParameterError(
                        f"The request plane of ring {ring} (process {pid}) cannot be watched: "
                        f"{error}"
                    ) from None
                self._known[ring] = epoch
                self._engine.client_died(ring, epoch)

    def _add(self, ring: int, pidfd: int) -> None:
        epoch = self._engine.clients()[ring][0]
        self._known[ring] = epoch
        with self._lock:
            for old in [fd for fd, watched in self._watched.items() if watched.ring == ring]:
                del self._watched[old]  # its process may live on, and has left the ring
                self._dropped.append(old)
            self._watched[pidfd] = _Watched(ring, epoch)
        os.eventfd_write(self._changed, 1)

    def _run(self) -> None:
        while True:
            poller = select.poll()
            poller.register(self._changed, select.POLLIN)
            with self._lock:
                while self._dropped:
                    os.close(self._dropped.pop())
                for pidfd in self._watched:
                    poller.register(pidfd, select.POLLIN)
            for fd, _ in poller.poll():
                if fd != self._changed:
                    self._bury(fd)
                elif self.closed:
                    return
                else:
                    os.eventfd_read(fd)

    def _bury(self, pidfd: int) -> None:
        with self._lock:
            if (dead := self._watched.pop(pidfd, None)) is None:
                return  # another request plane has the ring now
        os.close(pidfd)
        self._engine.client_died(dead.ring, dead.epoch)

    def close(self) -> None:
        self.closed = True
        os.eventfd_write(self._changed, 1)
        self._thread.join()
        os.close(self._changed)
        for pidfd in (*self._watched, *self._dropped):
            os.close(pidfd)
        self._watched.clear()
        self._dropped.clear()
