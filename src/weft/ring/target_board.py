"""Targets that are set while a server runs, in memory that its engine and request planes share.

    proposal: JSON      (a request plane writes)
    verdicts: 2 x JSON  (the engine writes them in turn)

The engine looks at the proposal now and then, and answers each by a verdict of the same number. A
verdict also holds the change that is in force, for the engine's successor. Of verdicts one may be
amid being written; the other one counts then. One request plane at a time proposes, under a lock
that the kernel takes away from who dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import time
from collections.abc import Iterator

from msgspec import Struct, json

from weft.core import errors
from weft.core.errors import EngineBusyError, EngineDeadError, ParameterError, WeftError
from weft.ring.checked_texts import HEAD_BYTES, CheckedTexts

PLACE_BYTES, PLACES = 16 * 1024, 3
ANSWER_S = 5.0  # that an engine may take for its verdict
LOOK_S = 0.02


class TargetChange(Struct, frozen=True):
    """Targets instead of those that the server was started with.

    Attributes:
        classes: ``ttft_s`` and ``tpot_s`` by class.
        interactivity: None for that of the settings.
    """

    classes: dict[str, dict[str, float]] = {}
    interactivity: float | None = None


class Proposal(Struct, frozen=True):
    """A change that an engine is to try.

    Attributes:
        until_ns: on the monotonic clock; later it is void.
    """

    number: int
    until_ns: int
    change: TargetChange


class _Refusal(Struct, frozen=True):
    kind: str
    message: str
    param: str | None


class _Verdict(Struct, frozen=True):
    """What the engine has made of a proposal, and the change that is in force."""

    number: int
    kept: TargetChange
    error: _Refusal | None = None


class TargetBoard:
    """The view of an engine or a request plane.

    Args:
        memory: of ``create_target_board``; it may be closed afterwards.

    Raises:
        OSError: the memory cannot be opened.
    """

    def __init__(self, memory: int) -> None:
        # Opened anew, as a lock on an inherited descriptor would be its parent's and siblings' too.
        self._fd = os.open(f"/proc/self/fd/{memory}", os.O_RDWR | os.O_CLOEXEC)
        self._map = mmap.mmap(memory, PLACES * PLACE_BYTES)
        self._texts = CheckedTexts(self._map, 0, PLACE_BYTES)

    # -- the request plane --------------------------------------------------------------------

    @contextlib.contextmanager
    def proposing(self) -> Iterator[None]:
        """Be the only one who proposes. Raises EngineBusyError if somebody else is."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EngineBusyError("Targets are being changed by another request.") from None
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def propose(self, change: TargetChange) -> Proposal:
        """Let the engine try a change; `outcome` says what has become of it.

        Raises:
            ParameterError: it is too long.
        """
        number = 1 + max(self._texts.number(0), self._verdict().number)
        proposal = Proposal(number, time.monotonic_ns() + int(ANSWER_S * 1e9), change)
        text = json.encode(proposal)
        if HEAD_BYTES + len(text) > PLACE_BYTES // 2:  # a verdict has it, too
            raise ParameterError("The targets of so many classes cannot be changed at once.")
        self._texts.write(0, number, text)
        return proposal

    def outcome(self, proposal: Proposal) -> bool:
        """Whether the engine keeps the proposed targets now; it may not have looked yet.

        Raises:
            WeftError: it refuses them, with the error that it had.
            EngineDeadError: it has said nothing in time, and will not look at them any more.
        """
        verdict = self._verdict()
        if verdict.number == proposal.number:
            if verdict.error is None:
                return True
            kind = getattr(errors, verdict.error.kind, WeftError)
            raise kind(verdict.error.message, param=verdict.error.param)
        if time.monotonic_ns() > proposal.until_ns + int(1e9 * ANSWER_S / 10):
            raise EngineDeadError("The engine does not answer; the targets are as before.")
        return False

    # -- the engine ---------------------------------------------------------------------------

    def kept(self) -> TargetChange:
        """The change that was in force when the last verdict was written."""
        return self._verdict().kept

    def proposal(self) -> Proposal | None:
        """A proposal that has no verdict yet and is not void."""
        if self._texts.number(0) <= self._verdict().number:
            return None
        text = self._texts.read(0)
        found = None if text is None else json.decode(text, type=Proposal)
        return None if found is None or time.monotonic_ns() > found.until_ns else found

    def answer(self, proposal: Proposal, kept: TargetChange, error: WeftError | None) -> None:
        """Give the verdict.

        Args:
            kept: the change that is in force now.
            error: why it is another one.
        """
        problem = error and _Refusal(type(error).__name__, error.message, error.param)
        text = json.encode(_Verdict(proposal.number, kept, problem or None))
        self._texts.write(1 + proposal.number % 2, proposal.number, text)

    # -----------------------------------------------------------------------------------------

    def _verdict(self) -> _Verdict:
        """The last one."""
        texts = [text for text in map(self._texts.read, (1, 2)) if text is not None]
        found = [json.decode(text, type=_Verdict) for text in texts]
        none_yet = _Verdict(0, TargetChange())
        return max(found, key=lambda verdict: verdict.number, default=none_yet)

    def close(self) -> None:
        """Let the memory go."""
        self._map.close()
        os.close(self._fd)


def create_target_board() -> int:
    """A descriptor of the memory."""
    memory = os.memfd_create("weft-targets", os.MFD_CLOEXEC)
    os.ftruncate(memory, PLACES * PLACE_BYTES)
    return memory
