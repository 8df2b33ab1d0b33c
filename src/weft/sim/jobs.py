"""Requests of a simulation: prompts as segments of token ids, so that equal text has equal ids.

Prompts share exactly the tokens that their texts would share: blocks of a trace by their hash,
system prompts by name, and in conversations everything that was said before, answers included.
Token ids are numbers without a vocabulary; only their equality counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain, repeat
from typing import NamedTuple

from weft.workload.trace import BLOCK_TOKENS, Arrival

END_TOKEN = 0  # what ends every answer
_BLOCK, _SHARED, _OWN, _ANSWER = (kind << 58 for kind in (1, 2, 3, 4))
_ROOM = 24  # bits for the tokens of one text


class TokenSegment(NamedTuple):
    """``length`` token ids from ``first`` on: counting up, or all the same."""

    first: int
    length: int
    same: bool = False


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """A request that comes at ``at_s``.

    Attributes:
        output_tokens: length of its answer; the scheduler does not know it.
        follow: gives what its client asks next, from the request's number and the time at which it
            was answered; None if nothing.
    """

    at_s: float
    prompt: tuple[TokenSegment, ...]
    output_tokens: int
    service_class: str
    follow: Callable[[int, float], SimulatedRequest | None] | None = None

    @property
    def input_tokens(self) -> int:
        return sum(segment.length for segment in self.prompt)

    def tokens(self) -> tuple[int, ...]:
        """The token ids of the prompt."""
        return tuple(
            chain.from_iterable(
                repeat(first, length) if same else range(first, first + length)
                for first, length, same in self.prompt
            )
        )


def shared_text(index: int, count: int) -> TokenSegment:
    """Text number ``index`` that several prompts have, such as a system prompt."""
    return TokenSegment(_SHARED + (index << _ROOM), count)


def own_text(index: int, count: int) -> TokenSegment:
    """Unique text; ``index`` is below 2**34."""
    return TokenSegment(_OWN + (index << _ROOM), count)


def answer_token(number: int) -> int:
    """The token that the answer of request ``number`` repeats, up to its end."""
    return _ANSWER + number


def answer_text(number: int, count: int) -> TokenSegment:
    """The answer of request ``number`` without its end, as later prompts quote it."""
    return TokenSegment(_ANSWER + number, count - 1, same=True)


def prompt_of(arrival: Arrival, index: int) -> tuple[TokenSegment, ...]:
    """The prompt of request ``index`` of a trace: its blocks, then unique text."""
    segments, left = [], arrival.input_tokens
    for block in arrival.blocks:
        if left > 0:
            count = min(left, BLOCK_TOKENS)
            segments.append(TokenSegment(_BLOCK + block * BLOCK_TOKENS, count))
            left -= count
    if left > 0:
        segments.append(own_text(index, left))
    return tuple(segments)


def trace_jobs(
    arrivals: Seq[Arrival],
    service_class: str,
    times: Iterator[float] | None = None,
    speed: float = 1.0,
    first: int = 0,
) -> Iterator[SimulatedRequest]:
    """Jobs of a trace, one by one.

    Args:
        times: when they come, in place of the trace's own times.
        speed: how much faster than recorded.
        first: index of the first one's own text.
    """
    for index, arrival in enumerate(arrivals, first):
        at_s = arrival.at_s / speed if times is None else next(times)
        yield SimulatedRequest(
            at_s, prompt_of(arrival, index), arrival.output_tokens, service_class
        )
