"""Traffic whose steps may be leased, what its requests ask for, and whether answers are alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from checkpoints import prompt
from tight_kv import DRAWN, GREEDY, Answer, Traffic

from weft.core.types import FinishReason, Request

# What is done to logits under every lease.
EDITED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "draw": {"top_p": 0.7, "top_k": 40, "min_p": 0.01, "temperature": 1.4},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": -0.2},
    "bias": {"logit_bias": {number: 3.0 - number % 7 for number in range(0, 60, 3)}},
    "minimum": {"min_tokens": 20, "stop_token_ids": tuple(range(0, 190, 11))},
}
NOT_LEASED = {"speculation": 3}


def traffic(seed: int, *more: dict[str, Any]) -> Traffic:
    """Two waves of requests, of which some end by a token, and some are cancelled.

    Args:
        more: what some ask for, beside draws and penalties.
    """
    rng = np.random.default_rng(seed)
    others: Sequence[dict[str, Any]] = (
        EDITED["nothing"],
        {"stop_token_ids": tuple(range(0, 190, 7))},
        EDITED["draw"],
        EDITED["penalties"],
        *more,
    )
    arrivals: dict[int, list[Request]] = {}
    for number in range(12):
        base = (GREEDY, DRAWN)[number % 2]
        wish = NOT_LEASED if number == 4 else others[rng.integers(len(others))]
        sampling = replace(base, max_tokens=int(rng.integers(1, 60)), seed=number, **wish)
        tokens = prompt(int(rng.integers(1, 40)), 100 * seed + number)
        arrivals.setdefault(40 * (number // 6), []).append(Request(number, tuple(tokens), sampling))
    return Traffic(arrivals, {12: [3], 50: [8]})


def assert_same_answers(found: dict[int, Answer], wanted: dict[int, Answer]) -> None:
    """The same ones, up to where a request was cancelled, which is at another token."""
    for number, answer in found.items():
        other = wanted[number]
        if FinishReason.CANCELLED in (answer.finish, other.finish):
            shorter = min(len(answer.tokens), len(other.tokens))
            assert answer.tokens[:shorter] == other.tokens[:shorter]
        else:
            assert answer == other
