"""Prompts of lines without a tokeniser: four bytes count as a token."""

from __future__ import annotations

import msgspec
import numpy as np
from msgspec import Raw, Struct

from weft.batch.order import Prompt
from weft.batch.ports import BatchLine

BYTES_PER_TOKEN = 4  # of English text, as OpenAI's help pages say
COMPLETION_TOKENS = 16  # that a completion has by default


class _PromptFields(Struct):
    instructions: Raw = Raw(b"")
    system: Raw = Raw(b"")
    prompt: Raw = Raw(b"")
    messages: Raw = Raw(b"")
    input: Raw = Raw(b"")
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    n: int | None = None


_bodies = msgspec.json.Decoder(_PromptFields)
_ids = msgspec.json.Decoder(list[int])


def guess_prompt(line: BatchLine) -> Prompt | None:
    """The prompt of a line by its bytes; None for embeddings, which have no output to plan with.

    Prompts that begin alike do so in their JSON, too, so prefixes are found; lengths are estimates.

    Raises:
        ParameterError: the body is not what its endpoint takes.
    """
    if line.url.endswith("/embeddings"):
        return None
    try:
        body = _bodies.decode(line.body)
    except msgspec.ValidationError:
        return None
    bounds = (body.max_output_tokens, body.max_completion_tokens, body.max_tokens)
    longest = next((bound for bound in bounds if bound is not None), None)
    if longest is None and line.url.endswith("/v1/completions"):
        longest = COMPLETION_TOKENS
    return Prompt(_tokens(body), None if longest is None else max(1, longest), max(1, body.n or 1))


def _tokens(body: _PromptFields) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    try:
        return np.array(_ids.decode(body.prompt), np.uint32)
    except (msgspec.DecodeError, ValueError, OverflowError):
        parts = (body.instructions, body.system, body.prompt, body.messages, body.input)
        text = b"".join(bytes(raw) for raw in parts)
        text += b" " * (-len(text) % BYTES_PER_TOKEN)
        return np.frombuffer(text, ">u4").astype(np.uint32)
