"""Statistics of a run: outcomes of requests, percentiles, rates and goodput."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from weft.workload.percentiles import percentiles_ms


@dataclass(slots=True)
class Outcome:
    """One request as its client saw it; times are seconds from the run's start.

    Attributes:
        due_s: when it was to be sent.
        sent_s: when its first byte was given to the socket.
        event_s: when each event that brought text came out of the socket.
        output_tokens: as the server counts them; its events with text where it does not.
        failure: why it failed, in few words, so that equal failures count together.
        detail: what the server said.
    """

    due_s: float
    asked_tokens: int
    sent_s: float = 0.0
    end_s: float = 0.0
    event_s: list[float] = field(default_factory=list)
    input_tokens: int = 0
    output_tokens: int = 0
    failure: str | None = None
    detail: str = ""

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.event_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time for each token after the first, None if there is but one."""
        if self.output_tokens < 2 or len(self.event_s) < 2:
            return None
        return (self.event_s[-1] - self.event_s[0]) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Time between events that brought text."""
        return [b - a for a, b in zip(self.event_s, self.event_s[1:], strict=False)]

    @property
    def e2e_s(self) -> float:
        """Time to the last token."""
        return self.event_s[-1] - self.sent_s


@dataclass(frozen=True, slots=True)
class Slo:
    """Bounds of a good request, in milliseconds; None does not bound."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def met_by(self, outcome: Outcome) -> bool:
        if outcome.failure is not None:
            return False
        pairs = (
            (self.ttft_ms, outcome.ttft_s),
            (self.tpot_ms, outcome.tpot_s or 0.0),
            (self.e2e_ms, outcome.e2e_s),
        )
        return all(bound is None or taken * 1e3 <= bound for bound, taken in pairs)


def summarise(outcomes: Seq[Outcome], slo: Slo | None = None) -> dict[str, Any]:
    """The figures of a run. Rates are over the time from the first sending to the last end."""
    good = [outcome for outcome in outcomes if outcome.failure is None]
    start = min((outcome.sent_s for outcome in outcomes), default=0.0)
    seconds = max((outcome.end_s for outcome in outcomes), default=0.0) - start
    seconds = max(seconds, 1e-9)
    output = sum(outcome.output_tokens for outcome in good)
    figures: dict[str, Any] = {
        "requests": len(outcomes),
        "completed": len(good),
        "failures": dict(Counter(o.failure for o in outcomes if o.failure is not None)),
        "failure_examples": {o.failure: o.detail for o in outcomes if o.failure is not None},
        "short_answers": sum(o.output_tokens < o.asked_tokens for o in good),
        "seconds": seconds,
        "requests_per_s": len(good) / seconds,
        "input_tokens_per_s": sum(outcome.input_tokens for outcome in good) / seconds,
        "output_tokens_per_s": output / seconds,
        "input_tokens": sum(outcome.input_tokens for outcome in good),
        "output_tokens": output,
        "ttft_ms": percentiles_ms([outcome.ttft_s for outcome in good]),
        "tpot_ms": percentiles_ms([o.tpot_s for o in good if o.tpot_s is not None]),
        "itl_ms": percentiles_ms([gap for outcome in good for gap in outcome.itl_s]),
        "e2e_ms": percentiles_ms([outcome.e2e_s for outcome in good]),
    }
    if slo is not None:
        met = sum(slo.met_by(outcome) for outcome in outcomes)
        figures["goodput_per_s"] = met / seconds
        figures["attainment"] = met / max(1, len(outcomes))
    return figures
