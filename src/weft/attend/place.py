"""A place: attends for the best-effort rows of an engine on another machine (``weft attend``).

OmniServe section 3.2: hosts other than the device's own keep KV and attend over it, each with its
CPUs and its memory. A place computes for one engine at a time. When the link breaks, everything
that it keeps for the engine is dropped; the engine computes those sequences again.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from weft.attend.channel import SocketTransport, accept
from weft.attend.frames import FrameKind, pack_refusal
from weft.attend.geometry import Geometry
from weft.attend.options import PlaceOptions
from weft.attend.session import EngineSession
from weft.core.addresses import format_address
from weft.core.errors import ConfigError, PlaceError, PlaceRefusedError, WeftError
from weft.core.gate import Gate
from weft.core.logs import log_level, notice, set_up_logs
from weft.core.memory import available_memory
from weft.core.process import set_process_title
from weft.core.sealed import close_socket, listen_with_key, read_key
from weft.core.settings import format_bytes
from weft.core.topology import this_machine
from weft.kernels.cpu import attention
from weft.kernels.cpu.isa import chosen_isa

logger = logging.getLogger("weft")

TAKEOVER_S = 30.0  # until the broken session of the same engine has ended


class Place:
    """Listens for engines, and serves one of them at a time."""

    def __init__(self, options: PlaceOptions) -> None:
        """Listen.

        Raises:
            ConfigError: the address or the key cannot be used, or there is too little memory.
            KernelUnavailable: there are no kernels for this CPU.
        """
        self._options, self._key = options, read_key(options.key_file)
        self._isa = chosen_isa()
        self._threads = options.threads or this_machine().usable
        if options.kv_memory > (free := available_memory()):
            raise ConfigError(
                f"kv_memory is {format_bytes(options.kv_memory)}, and {format_bytes(free)} are "
                "free.",
                param="kv_memory",
            )
        self._listener = listen_with_key(
            options.listen, self._key, callers="engines", param="listen", key_param="key_file"
        )
        self._gate = Gate(self._listener, self._welcome)
        self._serving = threading.Lock()
        self._current: tuple[str, SocketTransport] | None = None  # the engine that is served

    @property
    def address(self) -> str:
        """Where it listens."""
        return format_address(self._listener.getsockname())

    def describe(self) -> str:
        """What it offers, as one sentence."""
        threads = f"{self._threads} thread{'' if self._threads == 1 else 's'}"
        return (
            f"attending at {self.address} with {threads}, "
            f"kernels {self._isa} and {format_bytes(self._options.kv_memory)} for KV"
        )

    def serve(self) -> None:
        """Serve engines until ``close``."""
        self._gate.serve()

    def close(self) -> None:
        """Listen no more, and end the session that is served."""
        self._gate.close()
        if (current := self._current) is not None:
            current[1].close()

    def _welcome(self, link: socket.socket, peer: str, entered: Callable[[], None]) -> None:
        """Serve whoever has connected, if that is an engine and no other one is served."""
        transport = None
        try:
            try:
                transport = accept(link, self._key)
                opened = transport.receive()
                if opened.kind is not FrameKind.OPEN:
                    raise PlaceError(f"The first frame is {opened.kind.name} and not OPEN.")
                geometry = Geometry.decode(opened.body)
            finally:
                entered()
            self._serve(transport, geometry, peer)
        except WeftError as error:
            logger.warning("Engine %s: %s", peer, error.message)
            if transport is not None:
                final = isinstance(error, (PlaceRefusedError, ConfigError))
                with suppress(PlaceError):
                    transport.send(FrameKind.REFUSE, *pack_refusal(error.message, final=final))
        finally:
            close_socket(link)

    def _serve(self, transport: SocketTransport, geometry: Geometry, peer: str) -> None:
        if (current := self._current) is not None and current[0] == geometry.engine:
            current[1].close()  # it has given that link up
            free = self._serving.acquire(timeout=TAKEOVER_S)
        else:
            free = self._serving.acquire(blocking=False)
        if not free:
            raise PlaceError("It attends for another engine already.")
        try:
            self._current = geometry.engine, transport
            self._use_isa(geometry.isa)
            transport.set_timeout(geometry.timeout_s)
            session = EngineSession(transport, geometry, self._options.kv_memory, self._threads)
            logger.info("Attending for engine %s.", peer)
            session.run()
        finally:
            self._current = None
            self._serving.release()

    def _use_isa(self, isa: str) -> None:
        """Compute with the engine's instruction set, so that results have the same bits."""
        try:
            attention.use_isa(isa)
        except (ValueError, WeftError):
            raise PlaceRefusedError(
                f"The engine computes with kernels {isa}, the place has {self._isa} and none of "
                "those; set WEFT_ISA for the engine to a set that both have."
            ) from None


def run_place(options: PlaceOptions) -> int:
    """Run ``weft attend`` until it is interrupted; returns the exit status."""
    set_up_logs("attend", log_level(options.log_level), "text")
    set_process_title("weft-attend")
    place = Place(options)
    notice(place.describe())
    try:
        place.serve()
    finally:
        place.close()
    return 0
