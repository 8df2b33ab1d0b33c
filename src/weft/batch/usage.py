"""Reads the token usage from answers of any endpoint."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from msgspec import Struct


class _Tokens(Struct):
    prompt_tokens: int | None = None
    input_tokens: int | None = None
    completion_tokens: int | None = None
    output_tokens: int | None = None


class _AnswerBody(Struct):
    usage: _Tokens | None = None


_bodies = msgspec.json.Decoder(_AnswerBody)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens read and written."""

    input_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.input_tokens + other.input_tokens, self.output_tokens + other.output_tokens
        )


def usage_of(body: bytes | msgspec.Raw) -> Usage:
    """The usage of an answer, by either name of its fields; zeros where it does not say."""
    try:
        tokens = _bodies.decode(body).usage
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        tokens = None
    if tokens is None:
        return Usage()
    return Usage(
        tokens.prompt_tokens or tokens.input_tokens or 0,
        tokens.completion_tokens or tokens.output_tokens or 0,
    )
