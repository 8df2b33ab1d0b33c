"""Where an agent keeps the facts of the model, and tells them to request planes that ask."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from weft.core.errors import ConfigError, RingLinkError, RingRefusedError
from weft.core.sealed import SealedSocket
from weft.ring.facts import EngineFacts, describe_facts, send_files
from weft.ring.link import LinkFrame, pack_json

STILL_HERE_S = 1.0
MOST_ASKING = 64  # at once


class FactsDesk:
    """The facts of the model that the present engine serves; for any thread.

    Args:
        on_move: called when they have become those of another model.
    """

    def __init__(self, on_move: Callable[[], None]) -> None:
        self._on_move = on_move
        self._facts: EngineFacts | ConfigError | None = None
        self._known = threading.Event()
        self._asking = threading.Semaphore(MOST_ASKING)

    @property
    def digest(self) -> str:
        """Tells the model and its text files from others; empty if they cannot be told."""
        return self._facts.digest if isinstance(self._facts, EngineFacts) else ""

    def tell(self, card: str, files: Mapping[str, Path]) -> None:
        """Set the facts. Raises OSError, and ValueError if the card is none."""
        self._set(describe_facts(card, files))

    def refuse(self, error: ConfigError) -> None:
        """From now on whoever asks for the facts is refused with this error."""
        self._set(error)

    def wait_until_known(self) -> None:
        """Wait for a moment. Raises RingLinkError if the facts are not known then."""
        if not self._known.wait(STILL_HERE_S):
            raise RingLinkError("its model is still being loaded.")

    def serve(self, link: SealedSocket) -> None:
        """Send the card once it is known, and then files, until the other side has enough.

        Raises:
            RingRefusedError: the facts cannot be told.
            RingLinkError: the link has ended, or too many others ask.
        """
        if not self._asking.acquire(blocking=False):
            raise RingLinkError(f"{MOST_ASKING} others ask it for its model at present.")
        try:
            self._serve(link)
        finally:
            self._asking.release()

    def _serve(self, link: SealedSocket) -> None:
        link.send_frame(LinkFrame.WELCOME, pack_json({}))
        while not self._known.wait(STILL_HERE_S):
            link.send_frame(LinkFrame.WELCOME, pack_json({}))
        facts = self._facts
        if isinstance(facts, EngineFacts):
            link.send_frame(LinkFrame.WELCOME, pack_json(facts.told))
            send_files(link, facts.contents)
        elif facts is not None:
            raise RingRefusedError(facts.message)

    def _set(self, facts: EngineFacts | ConfigError) -> None:
        known, before = self._known.is_set(), self.digest
        self._facts = facts
        self._known.set()
        if known and before != self.digest:
            self._on_move()
