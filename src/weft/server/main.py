"""The main function of the request plane: serves until a stop signal, then drains."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from types import FrameType
from typing import Protocol

import uvicorn
from starlette.applications import Starlette

from weft.api import ModelCard
from weft.core.errors import WeftError
from weft.core.ports import EngineClient
from weft.core.process import SAME_SIGNAL_S, beat_s
from weft.ring.target_board import TargetBoard
from weft.server.accept import Acceptor
from weft.server.app import create_app
from weft.server.counts import Board
from weft.server.errors import ShuttingDownError
from weft.server.exchange import REQUESTS
from weft.server.keys import LOOK_EVERY_S, KeyRing
from weft.server.listen import address_of, listen, tls_context
from weft.server.options import ServerOptions
from weft.server.probe import EngineProbe
from weft.server.protocol import BoundedProtocol, bounded_protocol
from weft.server.quota_board import QuotaBoard
from weft.text import ChatTemplate, Tokenizer

SIGNALS = (signal.SIGTERM, signal.SIGINT)
DRAIN_TICK_S = 0.1
LOOK_S = 0.5  # between two looks at other processes, with connections
UNREAD_S = 0.3  # for answers of aborted requests to reach their clients
GRACE_S = 1  # for requests that are not even read


def run_server(
    client: EngineClient,
    tokenizer: Tokenizer,
    chat_template: ChatTemplate | None,
    card: ModelCard,
    options: ServerOptions,
    *,
    probe: EngineProbe | None = None,
    sockets: Seq[socket.socket] | None = None,
    on_listening: Callable[[str], None] | None = None,
    board: Board | None = None,
    quotas: QuotaBoard | None = None,
    targets: TargetBoard | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT (unless ignored), then finish what is open and return.

    At the first signal ``/ready`` says no and new requests get 503; open ones have
    ``drain_timeout_s`` to finish, then end with an error. A second signal ends the wait.

    Args:
        sockets: listening sockets, which are closed at the end; by default one is made from
            ``options``, and a Unix socket's path removed at the end.
        on_listening: called with the address once requests are answered.
        board: where all request planes of one server show what they have counted.
        quotas: where they share what API keys use.
        targets: where the engine looks for changes of targets.

    Raises:
        ConfigError: the address is in use.
    """
    own = None if sockets else listen(options)
    listeners = [own] if own is not None else list(sockets or ())
    app = create_app(
        client, tokenizer, chat_template, card, options, probe=probe, quotas=quotas, targets=targets
    )
    if board is not None:
        app.state.service.metrics.share(board)
    server = DrainingServer(app, options, on_listening)
    try:
        server.run(listeners)
    finally:
        if own is not None and options.uds is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(options.uds)


class Drained(Protocol):
    """The service of one model, or those of several, as the server sees them."""

    draining: bool

    @property
    def num_open(self) -> int:
        """What is being answered."""

    def look(self) -> None:
        """Keep what is known of other processes up to date; called twice a second."""

    def abort_all(self, error: WeftError) -> None:
        """End everything with an error."""


class DrainingServer(uvicorn.Server):
    """Uvicorn, but a signal lets open requests finish while the port still answers.

    Call ``drain`` to stop it from the event loop's thread without a signal.
    """

    def __init__(
        self,
        app: Starlette,
        options: ServerOptions,
        on_listening: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(_uvicorn_config(app, options))
        if options.access_log or options.log_requests:
            REQUESTS.setLevel(logging.INFO)
        self._service: Drained = app.state.service
        self._keys: KeyRing = app.state.keys
        self._timeout_s = options.drain_timeout_s
        self._deadline: float | None = None
        self._signalled = 0.0
        self._on_listening = on_listening
        self._max_connections = options.max_connections
        self._acceptor: Acceptor | None = None
        self._stirred = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._rest_s = beat_s(options.watchdog_s)
        self._resting = False

    @property
    def num_connections(self) -> int:
        """Connections that are open, with unfinished TLS handshakes."""
        return 0 if self._acceptor is None else self._acceptor.num_open

    def drain(self) -> None:
        """Take no more requests, and stop when the open ones have ended."""
        self._service.draining = True
        if self._deadline is None:
            self._deadline = time.monotonic() + self._timeout_s
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._stirred.set)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """First signal: drain. A later one: end the wait.

        Signals that come together count as one: a service manager sends them to every process of
        a group, and the supervisor passes its own on.
        """
        now = time.monotonic()
        if self._deadline is not None and now - self._signalled > SAME_SIGNAL_S:
            self._deadline = 0.0
        self._signalled = now if self._deadline is None else self._signalled
        self.drain()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle the signals that the process does not ignore, and swallow them: exit code 0."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        wanted = [s for s in SIGNALS if signal.getsignal(s) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self.handle_exit) for number in wanted}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Uvicorn's, but we accept the connections."""
        self._loop = asyncio.get_running_loop()
        await super().startup([])
        self._acceptor = Acceptor(self._new_protocol, self._max_connections, self.config.ssl)
        self._acceptor.listen(sockets or ())
        if self._on_listening is not None and sockets:
            self._on_listening(address_of(sockets[0], "https" if self.config.ssl else "http"))

    def _new_protocol(self) -> BoundedProtocol:
        protocol = self.config.http_protocol_class
        assert issubclass(protocol, BoundedProtocol)
        if self._resting:
            self._stirred.set()
        return protocol(self.config, self.server_state, self.lifespan.state)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Uvicorn's, but a client that does not read its answer is not waited for."""
        if self._acceptor is not None:
            self._acceptor.close()
        asyncio.get_running_loop().call_later(UNREAD_S, self._cut_off)
        await super().shutdown(sockets)

    def _cut_off(self) -> None:
        for connection in list(self.server_state.connections):
            if isinstance(connection, BoundedProtocol):
                connection.abort_if_unread()

    async def main_loop(self) -> None:
        """Uvicorn's, but without connections it ticks seldom."""
        while not await self.on_tick(0):
            self._stirred.clear()
            self._resting = not (self._draining or self.num_connections or self._service.num_open)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stirred.wait(), self._pause_s())
            self._resting = False

    @property
    def _draining(self) -> bool:
        return self._deadline is not None

    def _pause_s(self) -> float:
        """Seconds until the next tick, unless something happens at rest."""
        if self._draining:
            return DRAIN_TICK_S
        if not self._resting:
            return LOOK_S
        return min(self._rest_s, LOOK_EVERY_S) if self._keys.from_file else self._rest_s

    async def on_tick(self, counter: int) -> bool:
        self._service.look()
        self._keys.refresh()
        if self._deadline is not None:
            late = time.monotonic() >= self._deadline
            if late:
                error = ShuttingDownError(
                    "The server was shut down before the answer was complete."
                )
                self._service.abort_all(error)
                await asyncio.sleep(0)
            self.should_exit = late or not self._service.num_open
        return await super().on_tick(counter)


def _uvicorn_config(app: Starlette, options: ServerOptions) -> uvicorn.Config:
    context = tls_context(options)
    return uvicorn.Config(
        app,
        ssl_context_factory=None if context is None else lambda *_: context,
        loop="uvloop",
        http=bounded_protocol(options),
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="warning",
        access_log=False,
        root_path=options.root_path,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=options.keep_alive_s,
        timeout_graceful_shutdown=GRACE_S,
    )
