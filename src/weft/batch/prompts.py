"""Prompts of lines without a tokeniser: four bytes count as a token."""

from __future__ import annotations

import msgspec
import numpy as np

from weft.batch.demand import BODIES, BYTES_PER_TOKEN, POOLED, TOKEN_IDS, PromptFields
from weft.batch.order import Prompt
from weft.batch.ports import BatchLine


def guess_prompt(line: BatchLine) -> Prompt | None:
    """The prompt of a line by its bytes; None for vectors and scores, which have no output.

    Prompts that begin alike do so in their JSON, too, so prefixes are found; lengths are estimates.

    Raises:
        ParameterError: the body is not what its endpoint takes.
    """
    if line.url.endswith(POOLED):
        return None
    try:
        body = BODIES.decode(line.body)
    except msgspec.ValidationError:
        return None
    return Prompt(_tokens(body), body.longest(line.url), body.choices)


def _tokens(body: PromptFields) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    try:
        return np.array(TOKEN_IDS.decode(body.prompt), np.uint32)
    except (msgspec.DecodeError, ValueError, OverflowError):
        text = body.text
        text += b" " * (-len(text) % BYTES_PER_TOKEN)
        return np.frombuffer(text, ">u4").astype(np.uint32)
