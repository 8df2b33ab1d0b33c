"""An engine on a thread of the calling process, fed by a thread-safe inbox."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from typing import Any

from weft.core.config import EngineConfig
from weft.core.errors import (
    EngineDeadError,
    HostWorkerError,
    InvariantError,
    OutOfMemoryError,
    WeftError,
)
from weft.core.plan import StepOutputs, Update
from weft.core.ports import Executor, Inbox, Lease, SchedulerPort
from weft.core.sinks import Sink, deliver
from weft.core.types import FinishReason, Request
from weft.engine.build import build_engine
from weft.engine.compiling import CompilingInbox
from weft.engine.describe import describe_served
from weft.engine.loop import EngineLoop
from weft.engine.machine import WallClock
from weft.exec.grammar import Grammars

logger = logging.getLogger("weft")

LONGEST_S = 0.5  # of a wait


class LocalInbox:
    """Hands requests to the loop and updates back to the sink of each request.

    Sinks are called on the engine's thread and must not block.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._requests: list[Request] = []
        self._cancels: list[tuple[int, FinishReason]] = []
        self._sinks: dict[int, Sink] = {}
        self._failure: WeftError | None = None
        self._poked = False
        self._lease: Lease | None = None
        self.closed = False

    def submit(self, requests: Seq[Request], sink: Sink) -> None:
        """Queue requests whose updates go to ``sink``. Raises what stopped the engine, if any."""
        with self._changed:
            if self._failure is not None:
                raise type(self._failure)(self._failure.message)
            for request in requests:
                self._sinks[request.id] = sink
            self._requests.extend(requests)
            self._notify()

    def cancel(self, sequence_id: int, reason: FinishReason = FinishReason.CANCELLED) -> None:
        with self._changed:
            self._cancels.append((sequence_id, reason))
            self._notify()

    def close(self) -> None:
        """Ask the loop to end."""
        with self._changed:
            self.closed = True
            self._notify()

    def receive(self) -> tuple[Seq[Request], Seq[tuple[int, FinishReason]]]:
        if not self._requests and not self._cancels and not self._poked:
            return (), ()
        with self._changed:
            self._poked = False
            requests, self._requests = self._requests, []
            cancels, self._cancels = self._cancels, []
        return requests, cancels

    def computing(self, sequence_ids: Seq[int]) -> None:
        """Nobody here survives the engine."""

    def publish(self, outputs: StepOutputs) -> None:
        by_sink: dict[Sink, list[Update]] = {}
        for sequence_id, token in outputs.tokens:
            by_sink.setdefault(self._sinks[sequence_id], []).append(Update(sequence_id, token))
        for update in outputs.updates:
            by_sink.setdefault(self._sinks[update.sequence_id], []).append(update)
            if update.finish is not None:
                del self._sinks[update.sequence_id]
        deliver(by_sink, self._sinks, self.cancel)

    def wait(self) -> None:
        """Block until there is something to receive, ``poke`` was called, or it is closed.

        Returns early as well, for what depends on time.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._requests or self._cancels or self._poked or self.closed, LONGEST_S
            )
            self._poked = False

    def poke(self) -> None:
        """End a ``wait``."""
        with self._changed:
            self._poked = True
            self._notify()

    def _notify(self) -> None:
        self._changed.notify()
        if self._lease is not None:
            self._lease.recall()

    def lend(self, lease: Lease) -> None:
        with self._changed:
            self._lease = lease
            if self._requests or self._cancels or self._poked or self.closed:
                lease.recall()
        lease.grant(None)

    def fail(self, error: WeftError) -> None:
        """End every open request with ``error``; later submissions raise it."""
        with self._changed:
            self._failure = error
            self._requests.clear()
            open_ids = list(self._sinks)
        ends = [Update(i, None, finish=FinishReason.ERROR, error=error) for i in open_ids]
        self.publish(StepOutputs([], ends))


class EngineThread:
    """Runs an engine loop until it is closed."""

    def __init__(
        self,
        scheduler: SchedulerPort,
        executor: Executor,
        grammars: Grammars | None = None,
        encode: Callable[[Request], Future[Request]] | None = None,
    ) -> None:
        self.inbox = LocalInbox()
        self._executor = executor
        inbox: Inbox = self.inbox
        if grammars is not None:
            inbox = CompilingInbox(self.inbox, grammars.compile, encode)
        self._loop = EngineLoop(scheduler, executor, inbox, WallClock())
        self._thread = threading.Thread(target=self._run, name="weft-engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End open requests with an error and stop the thread. May be called twice."""
        self.inbox.close()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self.inbox.closed:
                if not self._loop.step():
                    self.inbox.wait()
            self._loop.scheduler.check()
            self._loop.drain()
            self.inbox.fail(WeftError("The engine was closed."))
        except (EngineDeadError, OutOfMemoryError, HostWorkerError) as error:  # not this engine's
            self._loop.abandon()
            self.inbox.fail(error)
        except Exception as error:
            self._loop.abandon()
            logger.exception("The engine stopped.")
            self.inbox.fail(InvariantError(f"The engine stopped: {type(error).__name__}: {error}"))
        finally:
            self._executor.close()


class LocalEngine:
    """An engine in this process, for debuggers, profilers and tests.

    Attributes:
        client: takes requests; its sinks are called on the engine's thread.
        served: facts of the model.
        built: scheduler and executor.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        config = EngineConfig.from_mapping(settings)
        self.built = build_engine(config)
        self.served = describe_served(config, self.built)
        built = self.built
        self._thread = EngineThread(built.scheduler, built.executor, built.grammars, built.encode)
        self.client = self._thread.inbox
        self.built.start_disk(self.client.poke)
        self.built.start_places()

    def close(self) -> None:
        """End the engine; open requests end with an error. May be called twice."""
        self._thread.close()
        self.built.save_prefixes()
