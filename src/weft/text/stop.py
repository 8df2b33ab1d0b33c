"""Exact matching of stop strings, also across tokens."""

from __future__ import annotations

from collections.abc import Sequence

from weft.core.errors import ParameterError


class StopMatcher:
    """Ends a growing text at the first stop string, however the text is cut into pieces.

    The rule is that of a naive scan of the growing text: after each character, look whether the
    text now ends with a stop string. So the stop that is *completed* first wins, as generation
    would have ended there; of several completed by the same character, the longest wins. Pushing a
    text whole or character by character gives the same result.

    Cost per push is linear in the text plus, per stop string, at most its length squared; the
    caller bounds the number and length of stop strings.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        """Watch for ``stops``; ``include_stop`` keeps the stop string in the text.

        Raises:
            ParameterError: a stop string is empty.
        """
        if "" in stops:
            raise ParameterError("A stop string must not be empty.", param="stop")
        self.stopped_by: str | None = None
        self._stops = tuple(dict.fromkeys(stops))
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Append ``text``; return the text that is now safe to show, and the stop string if one was
        met.

        Held back is only the longest suffix that may still become a stop string. After a stop
        nothing more comes: further pushes return ``("", stop)``.
        """
        if self.stopped_by is not None:
            return "", self.stopped_by
        buffer = self._held + text
        found = self._first_stop(buffer)
        if found is not None:
            start, self.stopped_by = found
            self._held = ""
            end = start + len(self.stopped_by) if self._include_stop else start
            return buffer[:end], self.stopped_by
        keep = max((overlap(buffer, stop) for stop in self._stops), default=0)
        split = len(buffer) - keep
        self._held = buffer[split:]
        return buffer[:split], None

    def would_stop(self, text: str) -> bool:
        """Return whether pushing ``text`` would complete a stop string; changes nothing."""
        return self.stopped_by is None and self._first_stop(self._held + text) is not None

    def flush(self) -> str:
        """Return the text held back; call it when the sequence has ended otherwise."""
        held, self._held = self._held, ""
        return held

    def _first_stop(self, buffer: str) -> tuple[int, str] | None:
        """Return (start, stop) of the stop completed first, the longest of those, or None."""
        matches = [(buffer.find(stop), stop) for stop in self._stops]
        hits = [(start + len(stop), start, stop) for start, stop in matches if start >= 0]
        if not hits:
            return None
        _, start, stop = min(hits)
        return start, stop


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    tail = text[-(len(stop) - 1) :] if len(stop) > 1 else ""
    start = tail.find(stop[0])
    while start >= 0:
        if stop.startswith(tail[start:]):
            return len(tail) - start
        start = tail.find(stop[0], start + 1)
    return 0
