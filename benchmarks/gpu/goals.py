"""What figures should reach: bounds by name, for the parts that measure and for the tables."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Goal:
    """A bound for all figures of a part whose name matches.

    Attributes:
        name: a pattern, as of ``fnmatch``.
        better: "more": at least ``bound``; "less": at most.
        gpu: part of the name of the GPU for which it is meant; empty: any.
    """

    part: str
    name: str
    bound: float
    better: str
    unit: str = ""
    gpu: str = ""

    def reached(self, value: float) -> bool:
        return value >= self.bound if self.better == "more" else value <= self.bound

    def __str__(self) -> str:
        word = "at least" if self.better == "more" else "at most"
        return f"{word} {self.bound:,g}{f' {self.unit}' if self.unit else ''}"


QWEN = "qwen2.5-7b fp8, batch"
# Decoding at steady state, with prompts of 16 tokens and 512 generated, as rvLLM measures.
GOALS = (
    Goal("decode", f"{QWEN} 128: decode", 25_000, "more", "tok/s", "H200"),
    Goal("decode", f"{QWEN} 1: share of the bandwidth bound", 0.85, "more"),
    Goal("decode", f"{QWEN} 512: decode", 55_000, "more", "tok/s", "H200"),
    Goal("decode", f"{QWEN} 256: decode", 40_000, "more", "tok/s", "H200"),
    Goal("decode", "qwen2.5-7b fp8, * KV, batch 512: decode", 55_000, "more", "tok/s", "H200"),
    Goal("decode", "qwen2.5-7b fp8, * KV, batch 256: decode", 40_000, "more", "tok/s", "H200"),
    Goal("decode", f"{QWEN} 128: TTFT, last", 50, "less", "ms", "H200"),
    Goal("decode", f"{QWEN} 128: GPU idle", 0.03, "less"),
    Goal("decode", "qwen2.5-7b: * captured graphs, ready", 20, "less", "s", "H200"),
    Goal(
        "sweep", "* decode attention, *, context 4096, batch *[0-9]", 0.80, "more", "of bandwidth"
    ),
    Goal(
        "sweep", "* decode attention, *, context 16384, batch *[0-9]", 0.80, "more", "of bandwidth"
    ),
    Goal("sweep", "* FP8 products of a layer, prefill, * rows", 0.60, "more", "of the matrix peak"),
)


def goal_of(name: str) -> Goal | None:
    """The first goal that a figure with this name has."""
    return next((goal for goal in GOALS if fnmatchcase(name, goal.name)), None)
