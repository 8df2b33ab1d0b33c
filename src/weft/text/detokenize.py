"""Incremental detokenisation: returns text as soon as it is final, never half a character."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

from tokenizers.decoders import DecodeStream

from weft.text.decoding import DecodeTable
from weft.text.tokenizer import Tokenizer

_Decode = Callable[[Sequence[int]], str]
CONTEXT_TOKENS = 8  # of what a text continues


class Detokenizer:
    """The text of one growing sequence.

    For any ids and any way of cutting them into pushes, the deltas joined, with `flush` at the end,
    are ``tokenizer.decode(ids)``. Byte-level and byte-fallback decoders go through a table; any
    other through `tokenizers.decoders.DecodeStream`, where the promise holds unless that decoder
    rewrites text that it already gave (then the rest comes with `flush`).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
        after: Sequence[int] = (),
    ) -> None:
        """Start an empty text, to which special tokens add nothing if ``skip_special_tokens``.

        Args:
            shown: special tokens that are part of the text nevertheless.
            after: ids that the text continues. A decoder that strips the space at the start of a
                text then keeps it, since the text has started already.
        """
        hidden = tokenizer.special_ids - shown if skip_special_tokens else frozenset[int]()
        self._impl = _choose(tokenizer, hidden, after[-CONTEXT_TOKENS:])

    def push(self, token_ids: Sequence[int]) -> str:
        """Append tokens; return the text that is certain now and was not returned before."""
        return self._impl.push(token_ids)

    def tail(self) -> str:
        """Return what `flush` would give now if that ends in whole characters, else an empty
        string.

        A byte-fallback run is certain only once it has ended, but may spell a stop string before.
        """
        return self._impl.tail()

    def flush(self) -> str:
        """Return the rest of the text, U+FFFD for an incomplete character; ends the sequence."""
        return self._impl.flush()


class _Incremental(Protocol):
    def push(self, token_ids: Sequence[int]) -> str: ...
    def tail(self) -> str: ...
    def flush(self) -> str: ...


def _choose(tokenizer: Tokenizer, hidden: frozenset[int], after: Sequence[int]) -> _Incremental:
    table = tokenizer.decode_table
    if table is None:
        return _Streamed(tokenizer, hidden, after)
    if table.kind == "byte_level":
        return _ByteLevel(tokenizer.shown_pieces(hidden))
    started = any(token_id not in hidden for token_id in after)
    return _ByteFallback(table, hidden, started)


class _ByteLevel:
    """All bytes in a row are UTF-8; Python's incremental decoder replaces as the reference does."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._size = len(pieces)
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_ids: Sequence[int]) -> str:
        pieces, size = self._pieces, self._size
        return self._decode(b"".join([pieces[i] for i in token_ids if i < size]))

    def tail(self) -> str:
        return ""

    def flush(self) -> str:
        return self._decode(b"", True)


class _ByteFallback:
    """Text tokens, and runs of byte tokens that are judged as a whole when they end."""

    def __init__(self, table: DecodeTable, skipped: frozenset[int], started: bool) -> None:
        self._table = table
        self._skipped = skipped
        self._run = bytearray()
        self._strip = 0 if started else table.strip_left

    def push(self, token_ids: Sequence[int]) -> str:
        pieces, byte_ids = self._table.pieces, self._table.byte_ids
        out = []
        for token_id in token_ids:
            piece = pieces[token_id] if token_id < len(pieces) else None
            if piece is None or token_id in self._skipped:
                continue
            if token_id in byte_ids:
                self._run += piece
                continue
            if self._run:
                out.append(self._end_run())
            out.append(piece.decode())
        return self._stripped("".join(out), keep=False)

    def tail(self) -> str:
        try:
            return self._stripped(self._run.decode(), keep=True)
        except UnicodeDecodeError:
            return ""

    def flush(self) -> str:
        return self._stripped(self._end_run(), keep=False)

    def _end_run(self) -> str:
        run, self._run = self._run, bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _stripped(self, text: str, *, keep: bool) -> str:
        """Drop the spaces that the decoder strips from the start; ``keep`` changes no state."""
        if not self._strip or not text:
            return text
        spaces = len(text) - len(text.lstrip(" "))
        dropped = min(spaces, self._strip)
        if not keep:
            self._strip = self._strip - dropped if dropped == len(text) else 0
        return text[dropped:]


class _Streamed:
    """Any other decoder, through the stream of the `tokenizers` library."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int], after: Sequence[int]) -> None:
        self._reference = tokenizer.reference
        self._hidden = hidden
        self._decode: _Decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
        self._stream: DecodeStream | None = DecodeStream(skip_special_tokens=False)
        self._ids: list[int] = []
        self._emitted = ""
        self.push(after)

    def push(self, token_ids: Sequence[int]) -> str:
        token_ids = [token_id for token_id in token_ids if token_id not in self._hidden]
        self._ids.extend(token_ids)
        text = "".join([self._step(token_id) for token_id in token_ids])
        self._emitted += text
        return text

    def _step(self, token_id: int) -> str:
        if self._stream is None:
            return ""
        try:
            return self._stream.step(self._reference, token_id) or ""
        except Exception:  # the library raises bare exceptions when the decoder rewrote its text
            self._stream = None
            return ""

    def tail(self) -> str:
        return ""

    def flush(self) -> str:
        whole = self._decode(self._ids)
        return whole[len(self._emitted) :] if whole.startswith(self._emitted) else ""
