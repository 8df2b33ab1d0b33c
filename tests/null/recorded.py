"""Records the plans of schedulers, and compares them with earlier ones.

``recorded_plans.json`` beside this file holds, for each scenario of ``scenarios.py`` and each
scheduler that it is for, digests of all plans and commits. So a change of the schedulers that is
meant to leave their plans alone can be checked, step for step:

    python tests/null/recorded.py --dump FOLDER   # every plan as text; diff -r the folders
                                                  # of two commits
    python tests/null/recorded.py --write         # plans were meant to change: record them anew

Both take names of scenarios to do only those, and ``--data FOLDER`` where the traces lie elsewhere.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import scenarios
from scenarios import HOST_ONLY, Scenario

import shareddata
from weft.core.plan import PromptLogprobs, StepOutputs, StepPlan, StepResult, Update
from weft.core.ports import Lease
from weft.core.types import FinishReason, Request, SamplingParams, TokenLogprob
from weft.engine.loop import EngineLoop
from weft.kv.tiers import TieredCache
from weft.sched.batch import Totals
from weft.sched.registry import load_aware, make_scheduler
from weft.sched.resources import Resources
from weft.sim.clock import VirtualClock
from weft.sim.executor import ModelledExecutor, ModelledTicket
from weft.sim.piggyback import Piggyback

FILE = Path(__file__).with_name("recorded_plans.json")
STEPS = 25  # between two digests of plans
MOST_ROUNDS = 100_000
DEFAULTS = SamplingParams()


def make(name: str, given: Scenario):
    """The scheduler of this name for a scenario."""
    if name == HOST_ONLY:
        cache = TieredCache(given.groups, given.host_blocks, prefix_caching=given.prefix_caching)
        scheduler = load_aware(cache, given.limits, given.cost, given.classes, host_only=True)
    else:
        resources = Resources(
            given.groups,
            given.limits,
            given.classes,
            given.prefix_caching,
            given.host_blocks,
            given.cost,
            given.policy,
        )
        scheduler = make_scheduler(name, resources)
    if given.watermark_tokens is not None:
        scheduler.memory.watermark_tokens = given.watermark_tokens
    return scheduler


# -- what is recorded, field by field -----------------------------------------------------------


def text_of(plan: StepPlan) -> str:
    """Everything that a plan says, in lines that do not depend on how its fields are called."""
    lines = [f"step {plan.step_id}"]
    for batch in plan.batches:
        samples = "".join("01"[sample] for sample in batch.samples)
        lines += [
            f" rows {_row(batch.rows)} tiers {_row(batch.tiers)}",
            f"  starts {_row(batch.starts)} counts {_row(batch.counts)} samples {samples}",
        ]
        lines += [f"  draft {row}: {_row(draft)}" for row, draft in sorted(batch.drafts.items())]
    if plan.drop:
        lines.append(f" drop {_row(plan.drop)}")
    for add in plan.add:
        lines += [
            f" add {add.row}: sequence {add.sequence_id} prompt {add.num_prompt} tier {add.tier}"
            f" embed {int(add.embed)} stop {_row(sorted(add.stop_ids))}",
            f"  tokens {_row(add.tokens)}",
            f"  tables {_rows(add.tables)}",
            f"  sampling {_sampling(add.sampling)}",
        ]
    lines += [f" extend {e.row} group {e.group}: {_row(e.blocks)}" for e in plan.extend]
    for move in plan.moves:
        lines += [
            f" move {move.row} to {move.to} after layer {int(move.after_layer)}",
            f"  {_rows(move.source)} -> {_rows(move.target)}",
        ]
    lines += [f" spill group {g}: {a} -> {b}" for g, a, b in plan.spills]
    lines += [f" fill group {g}: {a} -> {b}" for g, a, b in plan.fills]
    if plan.zero or plan.zero_host:
        lines.append(f" zero {_rows(plan.zero)} host {_rows(plan.zero_host)}")
    if plan.piggybacked or plan.piggyback_limits:
        lines.append(f" riders {_row(plan.piggybacked)} caps {_row(plan.piggyback_limits)}")
    if plan.abort:
        lines.append(f" abort {_row(plan.abort)}")
    return "\n".join(lines) + "\n"


def _row(values: Any) -> str:
    return ",".join(map(str, values)) or "-"


def _rows(rows: Any) -> str:
    return " ".join(map(_row, rows)) or "-"


def _sampling(params: SamplingParams) -> str:
    """Parameters that are not the default."""
    values = {row.name: getattr(params, row.name) for row in fields(params)}
    return _row(
        f"{name}={value!r}"
        for name, value in sorted(values.items())
        if value != getattr(DEFAULTS, name)
    )


def said(update: Update) -> str:
    """Everything that an update says of its sequence; of an error not the wording."""
    parts = [
        f"token {update.token} cached {update.cached_tokens}",
        f"scheduled {update.scheduled_ns} prefilled {update.prefilled_ns}",
    ]
    if update.finish is not None:
        parts.append(f"end {update.finish}")
    if (error := update.error) is not None:
        parts.append(f"error {error.code} {error.param} {error.retry_after_s}")
    if update.logprob is not None:
        parts.append(f"logprob {update.logprob.token} {update.logprob.logprob}")
    if (scores := update.prompt_logprobs) is not None:
        parts.append(f"scores {scores.start}: {_row(entry.token for entry in scores.entries)}")
    if update.embedding is not None:
        parts.append(f"vector {update.embedding.hex()}")
    return " ".join(parts)


def counts_of(totals: Totals) -> dict[str, int]:
    """The counts of a scheduler."""
    return {
        "requests": totals.requests,
        "finished": totals.finished,
        "failed": totals.failed,
        "cancelled": totals.cancelled,
        "prompt tokens": totals.prompt_tokens,
        "output tokens": totals.output_tokens,
        "cached tokens": totals.cached_tokens,
        "preemptions": totals.preemptions,
        "drafted tokens": totals.drafted_tokens,
        "accepted tokens": totals.accepted_tokens,
        "refused": totals.refused,
        "demoted": totals.demoted,
    }


# -- a run ----------------------------------------------------------------------------------------


@dataclass
class Recording:
    """Digests of plans after every ``STEPS`` steps, each of all plans until there."""

    keep: Callable[[str], None] | None = None  # hears every plan
    steps: int = 0
    plans: list[str] = field(default_factory=list)
    _digest: Any = field(default_factory=lambda: blake2b(digest_size=8))

    def note(self, plan: StepPlan) -> None:
        text = text_of(plan)
        if self.keep is not None:
            self.keep(text)
        self._digest.update(text.encode())
        self.steps += 1
        if self.steps % STEPS == 0:
            self.plans.append(self._digest.hexdigest())

    def close(self) -> None:
        if self.steps % STEPS:
            self.plans.append(self._digest.hexdigest())


class Inbox:
    """Delivers requests by the clock and cancellations by round; keeps what is published."""

    def __init__(self, given: Scenario, clock: VirtualClock) -> None:
        self._clock = clock
        self._arrivals = sorted(given.arrivals, key=lambda pair: pair[0], reverse=True)
        self._cancels = given.cancels
        self.round = 0
        self.said: dict[int, list[str]] = {}

    def receive(self) -> tuple[list[Request], list[tuple[int, FinishReason]]]:
        requests = []
        while self._arrivals and self._arrivals[-1][0] <= self._clock.now():
            requests.append(self._arrivals.pop()[1])
        self.round += 1
        cancelled = self._cancels.get(self.round, ())
        return requests, [(number, FinishReason.CANCELLED) for number in cancelled]

    def computing(self, sequence_ids) -> None:
        """Nothing here outlives an engine."""

    def lend(self, lease: Lease) -> None:
        lease.grant(None)

    def publish(self, outputs: StepOutputs) -> None:
        for number, token in outputs.tokens:
            self.said.setdefault(number, []).append(f"round {self.round} token {token}")
        for update in outputs.updates:
            line = f"round {self.round} {said(update)}"
            self.said.setdefault(update.sequence_id, []).append(line)

    def wait(self) -> bool:
        """Go on to the next arrival; False if there is none."""
        if self._arrivals:
            self._clock.reach(self._arrivals[-1][0])
        return bool(self._arrivals)

    def digest(self) -> str:
        digest = blake2b(digest_size=8)
        for number, lines in sorted(self.said.items()):
            digest.update(f"sequence {number}\n".encode() + "\n".join(lines).encode())
        return digest.hexdigest()


class Device(ModelledExecutor):
    """Takes time for its steps, not quite what is predicted, and gives log probabilities."""

    def __init__(self, given: Scenario, clock: VirtualClock, recording: Recording) -> None:
        layers = given.cost.layers
        super().__init__(
            given.groups,
            given.vocab,
            depth=given.depth,
            faulty=lambda number, length: (number, length) in given.faults,
            host_blocks=given.host_blocks,
            piggyback=Piggyback(layers, lambda context: context * given.host_token_steps),
        )
        self._given, self._clock, self._recording = given, clock, recording
        self._added: dict[int, tuple[int, SamplingParams]] = {}  # row -> sequence, parameters

    def launch(self, plan: StepPlan) -> ModelledTicket:
        self._recording.note(plan)
        return super().launch(plan)

    def collect(self, ticket: ModelledTicket) -> StepResult:
        plan = ticket.plan
        self._clock.advance(self._seconds(plan))
        self._added.update({add.row: (add.sequence_id, add.sampling) for add in plan.add})
        result = super().collect(ticket)
        wants = {number for number, params in self._added.values() if params.logprobs is not None}
        scores = self._prompt_scores(plan)
        if not wants and not scores:
            return result
        pairs = zip(result.sequence_ids, result.tokens, strict=True)
        accepted = {
            number: tuple((token, score(token) if number in wants else None) for token, _ in more)
            for number, more in result.accepted.items()
        }
        return replace(
            result,
            logprobs={number: score(token) for number, token in pairs if number in wants},
            prompt_logprobs=scores,
            accepted=accepted,
        )

    def _attend(self, row, length: int) -> int:
        phrase, modelled = self._given.phrase, super()._attend(row, length)
        return length % phrase + (length % 23 == 0) if phrase else modelled

    def _seconds(self, plan: StepPlan) -> float:
        cost = self._given.cost
        moved = sum(len(blocks) for move in plan.moves for blocks in move.source)
        noise = 1.0 + (plan.step_id * 7 % 13 - 4) / 32 + 4.0 * (plan.step_id % 61 == 0)
        return noise * (cost.step_s + cost.token_s * plan.num_tokens) + moved * cost.move_s

    def _prompt_scores(self, plan: StepPlan) -> dict[int, PromptLogprobs]:
        found = {}
        for batch in plan.batches:
            for row, start, count in zip(batch.rows, batch.starts, batch.counts, strict=True):
                number, params = self._added[row]
                if params.prompt_logprobs is not None:
                    known = self._rows[row].tokens[start : start + count]
                    found[number] = PromptLogprobs(start, tuple(map(score, known)))
        return found


def score(token: int) -> TokenLogprob:
    return TokenLogprob(token, -1.0, 1)


def record(name: str, given: Scenario, keep: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Run a scenario with a scheduler and return what ``recorded_plans.json`` holds of it.

    Args:
        keep: called with the text of every plan.
    """
    clock, recording = VirtualClock(), Recording(keep)
    inbox, scheduler = Inbox(given, clock), make(name, given)
    device = Device(given, clock, recording)
    loop = EngineLoop(scheduler, device, inbox, clock)
    while loop.step() or inbox.wait():
        if inbox.round % 16 == 0:
            scheduler.check()
        assert inbox.round < MOST_ROUNDS, "the scheduler does not come to an end"
    assert scheduler.idle, "the scheduler stopped with unanswered requests"
    scheduler.check()
    device.close()
    recording.close()
    return {
        "steps": recording.steps,
        "plans": " ".join(recording.plans),
        "commits": inbox.digest(),
        "totals": {what: count for what, count in counts_of(scheduler.totals).items() if count},
    }


def differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """What differs between two recordings, in words."""
    complaints = []
    before, after = expected["plans"].split(), found["plans"].split()
    pairs = zip(before, after, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(before), len(after)))
    if before != after:
        first, last = same * STEPS + 1, (same + 1) * STEPS
        complaints.append(f"plans first differ between steps {first} and {last}")
    if expected["steps"] != found["steps"]:
        complaints.append(f"{found['steps']} steps, {expected['steps']} before")
    if expected["commits"] != found["commits"]:
        complaints.append("commits differ")
    for what in sorted({*expected["totals"], *found["totals"]}):
        a, b = (each["totals"].get(what, 0) for each in (expected, found))
        if a != b:
            complaints.append(f"{what}: {b}, {a} before")
    return complaints


# -- the command line -----------------------------------------------------------------------------


def read() -> dict[str, dict[str, Any]]:
    """By scenario and scheduler."""
    found: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def write(recordings: dict[str, dict[str, Any]]) -> None:
    """One line for each scheduler of each scenario, so that a change shows where it is."""
    blocks = []
    for scenario, rows in sorted(recordings.items()):
        lines = [f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(rows.items())]
        blocks.append(f" {json.dumps(scenario)}: {{\n" + ",\n".join(lines) + "\n }")
    FILE.write_text("{\n" + ",\n".join(blocks) + "\n}\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("scenarios", nargs="*", help="all, if none is named")
    parser.add_argument("--dump", type=Path, metavar="FOLDER", help="write every plan as text")
    parser.add_argument("--write", action="store_true", help=f"rewrite {FILE.name}")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="where the traces lie")
    args = parser.parse_args()
    if args.data is not None:
        shareddata.SHARED = args.data
    wanted = args.scenarios or list(scenarios.ALL)
    recordings = read() if args.write and args.scenarios else {}
    for scenario in wanted:
        given = scenarios.ALL[scenario]()
        rows = recordings[scenario] = {}
        for name in given.schedulers:
            texts: list[str] = []
            rows[name] = record(name, given, texts.append if args.dump else None)
            print(f"{scenario:20} {name:12} {rows[name]['steps']:6} steps {rows[name]['totals']}")
            if args.dump:
                args.dump.mkdir(parents=True, exist_ok=True)
                file = args.dump / f"{scenario}.{name}.txt"
                file.write_text("".join(texts), encoding="utf-8")
    if args.write:
        write(recordings)


if __name__ == "__main__":
    main()
