"""Reads the token usage from answers of any endpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Struct


class _Details(Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _Tokens(Struct):
    prompt_tokens: int | None = None
    input_tokens: int | None = None
    completion_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None  # Anthropic's; they are no input tokens there
    cache_creation_input_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _AnswerBody(Struct):
    usage: _Tokens | None = None


_bodies = msgspec.json.Decoder(_AnswerBody)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens read and written.

    Attributes:
        cached_tokens: of the tokens read, those that the prefix cache had.
        reasoning_tokens: of the tokens written, those of reasoning.
    """

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            self.cached_tokens + other.cached_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
        )

    def to_object(self) -> dict[str, Any]:
        """The usage of a batch in OpenAI's form."""
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.input_tokens + self.output_tokens,
        }


def usage_of(body: bytes | msgspec.Raw) -> Usage:
    """The usage of an answer, by either name of its fields; zeros where it does not say."""
    try:
        tokens = _bodies.decode(body).usage
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        tokens = None
    if tokens is None:
        return Usage()
    read = tokens.prompt_tokens_details or tokens.input_tokens_details or _Details()
    written = tokens.completion_tokens_details or tokens.output_tokens_details or _Details()
    cached = tokens.cache_read_input_tokens or 0
    beside = cached + (tokens.cache_creation_input_tokens or 0)
    return Usage(
        (tokens.prompt_tokens or tokens.input_tokens or 0) + beside,
        tokens.completion_tokens or tokens.output_tokens or 0,
        read.cached_tokens or cached,
        written.reasoning_tokens or 0,
    )
