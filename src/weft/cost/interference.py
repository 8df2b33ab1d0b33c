"""How decode attention and dense layers slow each other down that share a GPU, as was measured.

NanoFlow (Zhu et al. 2025, section 5) calls it interference, and BlendServe's gain rests on it. A
step in halves takes, with dense layers D, prefill attention P and decode attention M of each,

    T = both(D0 + P1, M1) + both(D1 + P0, M0) + outside + second_s

where ``both`` is what two of them take that begin together: until the first ends each has a part
of its speed, and what is left of the other runs alone (``side_by_side``).
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from weft.core.errors import ProfileError
from weft.cost.curves import Curve
from weft.cost.model import CostModel
from weft.cost.work import Work

LEAST_GAIN = 1.03  # times as long as its halves that a step must take by prediction to be split


class Speeds(NamedTuple):
    """Speeds at a limit of decode attention, as shares of the speed alone and without a limit.

    Attributes:
        programs: of decode attention at the most; 0 for no limit.
        dense: dense layers beside attention.
        attention: attention beside dense layers.
        alone: attention so limited beside nothing.
        second_s: seconds that halves take beyond their parts.
        gain: of a step that was measured, how many times as long it takes whole as in halves; the
            largest one.
        saved: share of the time of such steps that is saved if those are split that gain by it, on
            average.
    """

    programs: int
    dense: float
    attention: float
    alone: float = 1.0
    second_s: float = 0.0
    gain: float = 1.0
    saved: float = 0.0

    def both_s(self, compute_s: float, memory_s: float) -> float:
        """Seconds of arithmetic and of reads that begin together; nothing takes less than none."""
        compute_s, memory_s = max(compute_s, 0.0), max(memory_s, 0.0)
        if not memory_s:
            return compute_s
        return float(side_by_side(compute_s, memory_s, self.dense, self.attention, self.alone))

    def halves_s(self, cost: CostModel, works: Seq[Work]) -> float:
        """Seconds of a step in two halves."""
        first, second = (cost.terms(work) for work in works)
        outside = cost.terms(works[0].joined(works[1])).outside
        beside_second = first.linear + second.prefill_attention
        beside_first = second.linear + first.prefill_attention
        layers = self.both_s(beside_second, second.decode_attention) + self.both_s(
            beside_first, first.decode_attention
        )
        return layers + outside + self.second_s


def side_by_side(
    compute_s: Any, memory_s: Any, dense: Any, attention: Any, alone: Any = 1.0
) -> Any:
    """Seconds of arithmetic and of reads that begin together, each at a part of its speed.

    Args:
        dense, attention: those parts, above 0.
        alone: the speed of the reads once the arithmetic has ended.
    """
    both = np.minimum(compute_s / dense, memory_s / attention)
    rest = np.maximum(compute_s - both * dense, 0.0)
    return both + rest + np.maximum(memory_s - both * attention, 0.0) / alone


@dataclass(frozen=True)
class Interference:
    """What was measured at each limit of decode attention.

    Raises:
        ProfileError: there is none, or a speed is no share.
    """

    at: tuple[Speeds, ...]

    def __post_init__(self) -> None:
        if not self.at:
            raise ProfileError("interference needs a limit at least")
        for speeds in self.at:
            if not all(0 < share <= 2 for share in speeds[1:4]):
                raise ProfileError(f"speeds of {speeds} must be shares above 0")

    @property
    def chosen(self) -> Speeds:
        """The limit to serve with, at which steps save most time on average."""
        return max(self.at, key=lambda speeds: (speeds.saved, speeds.gain))

    def to_json(self) -> list[dict[str, float]]:
        return [speeds._asdict() for speeds in self.at]

    @classmethod
    def from_json(cls, read: Seq[Mapping[str, float]]) -> Interference:
        """Read what ``to_json`` gives. Raises what its parts do for anything else."""
        return cls(
            tuple(
                Speeds(int(row["programs"]), *(float(row[name]) for name in Speeds._fields[1:]))
                for row in read
            )
        )


def ridge_of(cost: CostModel, most: int) -> int | None:
    """``ridge_tokens`` of a cost model, by steps of up to ``most`` tokens, at least 4."""
    tokens = 1, max(2, most // 2), max(4, most)
    return ridge_tokens(Curve(tokens, tuple(cost.terms(Work(tokens=n)).dense for n in tokens)))


def ridge_tokens(dense: Curve) -> int | None:
    """Tokens from which on dense layers are bound by arithmetic, not by reading the weights.

    Where what a token adds at the end of the curve has grown to what a step of one token takes.
    None if tokens add nothing at the end of it: all of it is below the ridge.
    """
    last = dense.tokens[-1]
    half = max(last // 2, dense.tokens[0])
    slope = (dense.at(last) - dense.at(half)) / (last - half)
    return ceil(dense.at(1) / slope) if slope > 0 else None
