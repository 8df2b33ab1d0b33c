"""Tables from token id to bytes, for the two decoders that nearly every model uses."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class DecodeTable:
    """The bytes of each id in the text.

    Attributes:
        kind: "byte_level": the bytes of all tokens, joined, are UTF-8. "byte_fallback": tokens are
            text, but a run of tokens in ``byte_ids`` is UTF-8 of its own: if the run as a whole is
            invalid, every byte of it becomes U+FFFD.
        pieces: bytes of each id, None where there is no such id.
        byte_ids: ids spelled ``<0xNN>`` (byte_fallback only).
        strip_left: this many spaces at the very start are not part of the text.
    """

    kind: str
    pieces: list[bytes | None]
    byte_ids: frozenset[int] = frozenset()
    strip_left: int = 0


def build_table(
    decoder: Mapping[str, Any] | None, tokens: Sequence[str | None]
) -> DecodeTable | None:
    """Return the table for the ``decoder`` of a tokenizer.json, None if it has another shape.

    Args:
        tokens: of each id, None where there is no such id.
    """
    steps = _steps(decoder)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        table = _byte_level_table()
        pieces = [None if token is None else _byte_level(token, table) for token in tokens]
        return DecodeTable("byte_level", pieces)
    if kinds[:3] != ["Replace", "ByteFallback", "Fuse"] or not _replaces_underline(steps[0]):
        return None
    strip = steps[3:]
    if len(strip) > 1 or any(
        s["type"] != "Strip" or s["stop"] or s["content"] != " " for s in strip
    ):
        return None
    pieces, byte_ids = _byte_fallback(tokens)
    return DecodeTable("byte_fallback", pieces, byte_ids, sum(s["start"] for s in strip))


def _steps(decoder: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return list(decoder["decoders"])
    return [decoder]


def _replaces_underline(step: Mapping[str, Any]) -> bool:
    return bool(step["pattern"] == {"String": "▁"} and step["content"] == " ")


def _byte_level_table() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte, as the Latin-1 character of that byte.

    Other Latin-1 characters stand for no byte and become one that Latin-1 cannot encode.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    foreign = dict.fromkeys(others, "\uffff")
    return foreign | {256 + n: chr(byte) for n, byte in enumerate(others)}


def _byte_level(token: str, table: dict[int, str]) -> bytes:
    """A token with a character outside the alphabet (an added token) stands for itself."""
    if token.isascii():  # which is what ASCII stands for in the alphabet
        return token.encode()
    try:
        return token.translate(table).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def _byte_fallback(tokens: Sequence[str | None]) -> tuple[list[bytes | None], frozenset[int]]:
    pieces: list[bytes | None] = []
    byte_ids = set()
    for token_id, token in enumerate(tokens):
        match = _BYTE_TOKEN.fullmatch(token) if token is not None else None
        if match is not None:
            byte_ids.add(token_id)
            pieces.append(bytes([int(match[1], 16)]))
        else:
            pieces.append(None if token is None else token.replace("▁", " ").encode())
    return pieces, frozenset(byte_ids)
