"""Log probabilities in the two formats of OpenAI's API."""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from weft.core.types import TokenLogprob
from weft.text import Tokenizer
from weft.text.detokenize import Detokenizer

LOWEST = -9999.0  # stands for "very unlikely", as JSON has no infinity


class TokenTexts:
    """The texts of single tokens. One per tokeniser; safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int] | None]] = {}

    def of(self, token: int) -> tuple[str, list[int] | None]:
        """Return text and bytes of a token.

        Bytes that are no whole characters are written as ``bytes:\\xe2\\x82``. There are no bytes
        where the tokeniser does not tell them.
        """
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._spell(token)
        return known

    def _spell(self, token: int) -> tuple[str, list[int] | None]:
        pieces = self._tokenizer.id_to_bytes
        if pieces is None:
            text = self._tokenizer.decode([token], skip_special_tokens=False)
            return text, None if "\ufffd" in text else list(text.encode())
        piece = (pieces[token] if token < len(pieces) else None) or b""
        try:
            return piece.decode(), list(piece)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece), list(piece)


class TokenNumbers(TokenTexts):
    """Single tokens as ``token_id:5``, which names them even where their texts are the same."""

    def _spell(self, token: int) -> tuple[str, list[int] | None]:
        return f"token_id:{token}", super()._spell(token)[1]


def prompt_logprobs(
    ids: Seq[int], entries: Seq[TokenLogprob | None], most: int, texts: TokenTexts
) -> list[dict[str, Any] | None]:
    """The ``prompt_logprobs`` of an answer, as vLLM has them: of each token by id.

    Args:
        entries: one for each of ``ids``; None for the first.
        most: alternatives of each token, at the most.
    """
    return [
        None if entry is None else {str(token): told for token, told in _told(entry, most, texts)}
        for _, entry in zip(ids, entries, strict=False)
    ]


def _told(
    entry: TokenLogprob, most: int, texts: TokenTexts
) -> Iterator[tuple[int, dict[str, Any]]]:
    """A token itself and its alternatives, with what is said of each."""
    yield entry.token, _described(entry.token, entry.logprob, entry.rank, texts)
    for rank, (token, logprob) in enumerate(entry.top[:most], 1):
        if token != entry.token:
            yield token, _described(token, logprob, rank, texts)


def _described(token: int, logprob: float, rank: int, texts: TokenTexts) -> dict[str, Any]:
    return {"logprob": _finite(logprob), "rank": rank, "decoded_token": texts.of(token)[0]}


def chat_logprobs(entries: Seq[TokenLogprob], texts: TokenTexts) -> dict[str, Any]:
    """The ``logprobs`` of a chat choice."""
    return {"content": [_chat_entry(entry, texts) for entry in entries], "refusal": None}


def _chat_entry(entry: TokenLogprob, texts: TokenTexts) -> dict[str, Any]:
    top = [_alternative(token, logprob, texts) for token, logprob in entry.top]
    return {**_alternative(entry.token, entry.logprob, texts), "top_logprobs": top}


def _alternative(token: int, logprob: float, texts: TokenTexts) -> dict[str, Any]:
    text, data = texts.of(token)
    return {"token": text, "logprob": _finite(logprob), "bytes": data}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST


class CompletionLogprobs:
    """Builds the ``logprobs`` of a completion choice, whole or in pieces.

    ``text_offset`` counts characters from the start of the choice's text; a token that only
    continues a character has the offset of what comes after it.
    """

    def __init__(self, tokenizer: Tokenizer, texts: TokenTexts, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._texts = texts
        self._skip_special = skip_special_tokens
        self._offset = 0
        self._detokenizer = self._fresh()

    def _fresh(self) -> Detokenizer:
        return Detokenizer(self._tokenizer, skip_special_tokens=self._skip_special)

    def prompt(
        self, ids: Seq[int], entries: Seq[TokenLogprob | None], echoed: str, most: int
    ) -> list[tuple[int, int, TokenLogprob | None]]:
        """Return (token, offset, log probability) of the echoed prompt.

        Args:
            most: alternatives of each token, at the most.
        """
        rows = self._rows(
            ids, [entry and replace(entry, top=entry.top[:most]) for entry in entries]
        )
        self._offset = len(echoed)
        self._detokenizer = self._fresh()
        return rows

    def output(
        self, ids: Seq[int], entries: Seq[TokenLogprob]
    ) -> list[tuple[int, int, TokenLogprob | None]]:
        """Return the same of output tokens."""
        return self._rows(ids, entries)

    def _rows(
        self, ids: Seq[int], entries: Seq[TokenLogprob | None]
    ) -> list[tuple[int, int, TokenLogprob | None]]:
        rows = []
        for token, entry in zip(ids, entries, strict=False):
            rows.append((token, self._offset, entry))
            self._offset += len(self._detokenizer.push([token]))
        return rows

    def build(self, rows: Seq[tuple[int, int, TokenLogprob | None]]) -> dict[str, Any]:
        """Lay rows out as OpenAI's API has them; a prompt's first token has no probability."""
        return {
            "text_offset": [offset for _, offset, _ in rows],
            "token_logprobs": [entry and _finite(entry.logprob) for _, _, entry in rows],
            "tokens": [self._texts.of(token)[0] for token, _, _ in rows],
            "top_logprobs": [entry and self._top(entry) for _, _, entry in rows],
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens and the chosen one; of tokens with one spelling the likeliest."""
        found: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token, entry.logprob)):
            found.setdefault(self._texts.of(token)[0], _finite(logprob))
        return found
