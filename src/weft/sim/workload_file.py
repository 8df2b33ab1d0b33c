"""The workload catalogue: lengths, turns and targets of a ``config.json``, drawn as conversations.

The catalogue is kubernetes-sigs/inference-perf's (``workloads/``, Apache-2.0). A conversation
begins with the workload's system prompt, which all share, and an input of its own; each later turn
has all that was said before, answers included, and a further input. Its client waits before it.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.core.errors import ParameterError
from weft.sim.jobs import SimulatedRequest, TokenSegment, answer_text, own_text, shared_text
from weft.workload.trace import read_text

Draw = Callable[[random.Random], float]
METRICS = ("ttft", "itl", "tpot", "e2e")
_TARGET = re.compile(r"(ttft|itl|tpot|e2e)_p([0-9.]+)_ms")


@dataclass(frozen=True, slots=True)
class Target:
    """A bound that a percentile of a metric must keep."""

    metric: str
    percentile: float
    bound_ms: float


@dataclass(frozen=True, slots=True)
class Workload:
    """One entry of the catalogue; times in seconds, lengths in tokens."""

    name: str
    input: Draw
    output: Draw
    turns: Draw
    pause_s: Draw
    system_tokens: Draw
    input_per_turn: Draw
    targets: tuple[Target, ...]

    def bound_ms(self, *metrics: str) -> float | None:
        """The bound of the first of these metrics that has one."""
        found = (t.bound_ms for name in metrics for t in self.targets if t.metric == name)
        return next(found, None)


def is_workload(path: str) -> bool:
    """Whether a path is meant to be an entry of the catalogue: its folder or its config.json."""
    return Path(path).is_dir() or Path(path).name == "config.json"


def read_workload(path: str, param: str = "trace") -> Workload:
    """Read an entry of the catalogue.

    Raises:
        ParameterError: no such file, or a field is missing or wrong; it says which.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        read = json.loads(read_text(str(file), param))
    except ValueError as error:
        raise ParameterError(f"{file}: {error}.", param=param) from None

    def draw(field: str) -> Draw:
        try:
            return distribution(read[field])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"missing {error}" if isinstance(error, KeyError) else str(error)
            raise ParameterError(f"{file}: {field}: {what}.", param=param) from None

    targets = []
    for key, bound in (read.get("metadata") or {}).get("slos", {}).items():
        if (match := _TARGET.fullmatch(key)) is not None:
            targets.append(Target(match[1], float(match[2]), float(bound)))
    return Workload(
        file.resolve().parent.name,
        draw("input_sequence_length"),
        draw("output_sequence_length"),
        draw("number_of_turns"),
        draw("time_between_turns"),
        draw("system_prompt"),
        draw("input_sequence_length_per_turn"),
        tuple(targets),
    )


def distribution(given: Mapping[str, Any]) -> Draw:
    """A sampler from ``min``, ``max``, ``mean``, ``standard_deviation`` and a type.

    What is drawn beyond the bounds becomes the bound. A bimodal one has its lower mode at ``min``
    and the upper one where mean and deviation come out as they should.

    Raises:
        KeyError, TypeError, ValueError: something is missing, of the wrong type, or unknown.
    """
    low, high, mean, deviation = (
        float(given[key]) for key in ("min", "max", "mean", "standard_deviation")
    )
    kind = given["distribution_type"]
    if not (math.isfinite(low + high + mean + deviation) and low <= mean <= high):
        raise ValueError("min, mean and max must rise")
    draw = _unbounded(kind, low, high, mean, max(deviation, 0.0))
    return lambda source: min(high, max(low, draw(source)))


def _unbounded(kind: str, low: float, high: float, mean: float, deviation: float) -> Draw:
    if deviation == 0 or low == high:
        return lambda _: mean
    if kind == "normal":
        return lambda source: source.gauss(mean, deviation)
    if kind == "uniform":
        return lambda source: source.uniform(low, high)
    if kind == "exponential":
        return lambda source: low + source.expovariate(1 / (mean - low))
    if kind == "log_normal":
        variance = math.log(1 + (deviation / mean) ** 2)
        mu, sigma = math.log(mean) - variance / 2, math.sqrt(variance)
        return lambda source: source.lognormvariate(mu, sigma)
    if kind == "bimodal":
        upper = mean + deviation**2 / (mean - low)
        share = (mean - low) / (upper - low)
        return lambda source: upper if source.random() < share else low
    raise ValueError(f"unknown distribution '{kind}'")


def conversations(
    workload: Workload, times: Iterator[float], texts: range, service_class: str, seed: int
) -> Iterator[SimulatedRequest]:
    """First turns of conversations at the given times; they bring the others along.

    Args:
        texts: a number for each conversation; its own text differs from that of all others.
    """
    for index in texts:
        talk = _Conversation(workload, service_class, random.Random(f"talk {seed} {index}"), index)
        yield talk.turn(next(times), ())


class _Conversation:
    """The turns of one client. Memory: the segments of all that was said."""

    def __init__(
        self, workload: Workload, service_class: str, draw: random.Random, index: int
    ) -> None:
        self._workload = workload
        self._class = service_class
        self._draw = draw
        self._text = own_text(index, 0)
        self._left = max(1, round(workload.turns(draw)))

    def turn(self, at_s: float, said: tuple[TokenSegment, ...]) -> SimulatedRequest:
        """The next turn, after what was said."""
        workload, draw = self._workload, self._draw
        if not said and (system := round(workload.system_tokens(draw))) > 0:
            said = (shared_text(0, system),)
            given = workload.input(draw)
        else:
            given = workload.input_per_turn(draw) if said else workload.input(draw)
        new = TokenSegment(self._text.first, max(1, round(given)))
        self._text = TokenSegment(new.first + new.length, 0)
        self._left -= 1
        prompt = (*said, new)
        asked = max(1, round(workload.output(draw)))

        def follow(number: int, now: float) -> SimulatedRequest:
            answered = (*prompt, answer_text(number, asked))
            return self.turn(now + workload.pause_s(draw), answered)

        return SimulatedRequest(
            at_s, prompt, asked, self._class, follow if self._left > 0 else None
        )
