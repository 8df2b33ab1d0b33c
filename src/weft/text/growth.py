"""Bounds the growth of text by the normaliser or decoder of a tokenizer.json, without running it.

Four times ``x -> x * 1000`` makes 10^12 characters of one, inside native code that nothing stops.
So a bound is worked out from the steps: each gives at most so many characters for one that it takes
away, and a step adds to the growth of those before it whose characters it can take.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_LONGEST_OF_UNICODE = 64  # bytes; NFKC makes 33 of U+FDFA


@dataclass(frozen=True)
class _Step:
    """Characters that it takes and gives (None: any), and how many it gives for one at most."""

    takes: frozenset[str] | None
    gives: frozenset[str] | None
    factor: int

    def takes_from(self, other: _Step) -> bool:
        """Whether this step may take what the other one gave."""
        if self.takes is None or other.gives is None:
            return True
        return not self.takes.isdisjoint(other.gives)


def growth(section: Any) -> int:
    """The factor by which a ``normalizer`` or ``decoder`` section can lengthen a text, at most.

    What Unicode and bytes can grow by is left out: they do so once, by little.
    """
    known: list[tuple[_Step, int]] = []  # each with the growth of what it gives
    for step in map(_step, _flat(section)):
        before = max((grown for other, grown in known if step.takes_from(other)), default=1)
        known.append((step, before * step.factor))
    return max((grown for _, grown in known), default=1)


def _flat(section: Any) -> Iterator[Mapping[str, Any]]:
    """The steps of a section in their order, those of sequences too."""
    if not isinstance(section, dict):
        return
    if section.get("type") != "Sequence":
        yield section
        return
    for key in ("normalizers", "decoders"):
        steps = section.get(key)
        for step in steps if isinstance(steps, list) else ():
            yield from _flat(step)


def _step(step: Mapping[str, Any]) -> _Step:
    kind, pattern = step.get("type"), step.get("pattern")
    if kind == "Replace" and isinstance(pattern, dict):
        given = str(step.get("content", ""))
        sought = pattern.get("String")
        if isinstance(sought, str) and sought:
            return _Step(frozenset(sought), frozenset(given), max(1, -(-len(given) // len(sought))))
        return _Step(None, frozenset(given), 1 + len(given))  # it may match between characters
    if kind == "Prepend":
        given = str(step.get("prepend", ""))
        return _Step(frozenset(), frozenset(given), 1 + len(given))
    if kind == "Precompiled":
        longest = _longest_replacement(str(step.get("precompiled_charsmap")))
        return _Step(None, None, 1 if longest <= _LONGEST_OF_UNICODE else 1 + longest)
    return _Step(None, None, 1)


def _longest_replacement(charsmap: str) -> int:
    """Bytes of the longest text in a map of SentencePiece: a trie, then texts that end in zeros."""
    try:
        data = base64.b64decode(charsmap)
    except (binascii.Error, ValueError):
        return 0  # the library refuses it
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    return max(map(len, texts.split(b"\0")))
