"""The layout that Python shares with ``ring.hpp``: states, reasons, the info page and the log.

Every number comes from the compiled header through the binding; nothing is typed twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import astuple, dataclass, fields
from enum import IntEnum
from typing import NamedTuple

from weft.core.types import FinishReason
from weft.ring import _native


def _numbered(names: tuple[str, ...]) -> dict[str, int]:
    return {name: value for value, name in enumerate(names)}


State = IntEnum("State", _numbered(_native.STATES))  # type: ignore[misc]
Side = IntEnum("Side", _numbered(_native.SIDES))  # type: ignore[misc]
Reason = IntEnum("Reason", _numbered(_native.REASONS))  # type: ignore[misc]
Bell = IntEnum("Bell", _numbered(_native.BELLS))  # type: ignore[misc]
Refusal = IntEnum("Refusal", _numbered(_native.REFUSALS))  # type: ignore[misc]

SIZES: Mapping[str, int] = _native.SIZES
SET: Mapping[str, int] = _native.SET

REASON_OF: Mapping[FinishReason, int] = {
    reason: int(Reason[reason.name]) for reason in FinishReason
}
FINISH_OF: Mapping[int, FinishReason] = {value: reason for reason, value in REASON_OF.items()}


INFO_CLASSES = 4  # whose targets the info page has
COUNTED_CLASSES = SIZES["log_classes"]  # that the info page and the log of steps count apart
OTHER_CLASSES = "(others)"


def counted_classes(names: Seq[str]) -> list[str]:
    """The names under which classes are counted, in the order of the page and of the log."""
    ordered = sorted(names)
    if len(ordered) <= COUNTED_CLASSES:
        return ordered
    return [*ordered[: COUNTED_CLASSES - 1], OTHER_CLASSES]


def places_of_classes(names: Seq[str]) -> dict[str, int]:
    """The place of each class in ``counted_classes``."""
    return {name: min(at, COUNTED_CLASSES - 1) for at, name in enumerate(sorted(names))}


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The info page: the engine's state. All numbers; 0 where there is none.

    Attributes:
        ready: 1 once requests are served; the limits are valid from then on.
        pid: the engine's process.
        started_ns, updated_ns: on the monotonic clock.
        blocks, free_blocks: of the device's KV, ``block_size`` tokens each, of the group of layers
            that has the least left.
        host_blocks, free_host_blocks: the same of the host tier.
        waiting, running, paused: requests at present, over all rings.
        queued_prompt_tokens: prompt tokens of the waiting ones.
        requests, finished, failed, cancelled: since the start.
        steps, prompt_tokens, output_tokens, cached_tokens, preemptions: since the start.
        blocks_to_host, blocks_to_device: of all groups, moved between the tiers since the start.
        host_tokens: output tokens whose attention the host has computed.
        host_queue: attention of a row in a layer that the host has not begun.
        host_calls, host_jobs, host_busy_us, host_round_trip_us, host_restarts: of the host worker:
            calls of attention, rows in them, time in them, time from the submission of each row to
            its result, and processes that have followed a dead one. Since the start.
        host_slower_permille, host_surplus_us: what the scheduler has measured of steps that carry
            rows of the host: their time for each 1000 predicted, and what it is beyond that of
            steps without; 0 of a scheduler that has none.
        disk_bytes: of the folder of prefixes; disk_saved, disk_lost: blocks that were saved there,
            and that were to be and are not; disk_tokens: prompt tokens that came from there;
            disk_missing: blocks that were not there whole. All but the first since the start.
        drafted_tokens, accepted_tokens: of speculation, since the start.
        refused, demoted: requests that would have missed the target of their class.
        hidden_size: of the model, the length of an embedding.
        policy: index in ``POLICIES`` of the policy that plans.
        ttft_us_0, tpot_us_0, ...: targets in microseconds of the first ``INFO_CLASSES`` classes in
            the order of their names; 0 for none.
        lost_sequences: that were computed again because the place with their KV was gone.
        place_up_0, place_blocks_0, place_free_blocks_0, place_jobs_0, place_round_trip_us_0,
            place_sent_bytes_0, place_sessions_0, ...: of each remote place, ``MOST_PLACES`` of
            them: 1 while it is connected, its blocks of the group that has the least left, rows
            attended to there, time from the submission of each to its result, bytes sent to it and
            connections. The last four since the start.
        resident_steps: of all steps, those that the resident loop computed; since the start.
        split_steps: of all steps, those in two halves that overlap on a GPU; since the start.
        died_ns: when the engine died, as long as it has no successor; the keeper says so.
        waiting_0, running_0, ...: the waiting and running ones of each class, in the order of
            ``counted_classes``.
    """

    ready: int = 0
    pid: int = 0
    started_ns: int = 0
    updated_ns: int = 0
    max_model_len: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    vocab_size: int = 0
    block_size: int = 0
    blocks: int = 0
    free_blocks: int = 0
    host_blocks: int = 0
    free_host_blocks: int = 0
    waiting: int = 0
    running: int = 0
    paused: int = 0
    queued_prompt_tokens: int = 0
    requests: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    blocks_to_host: int = 0
    blocks_to_device: int = 0
    host_tokens: int = 0
    host_queue: int = 0
    host_calls: int = 0
    host_jobs: int = 0
    host_busy_us: int = 0
    host_round_trip_us: int = 0
    host_restarts: int = 0
    host_slower_permille: int = 0
    host_surplus_us: int = 0
    disk_bytes: int = 0
    disk_saved: int = 0
    disk_lost: int = 0
    disk_tokens: int = 0
    disk_missing: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    refused: int = 0
    demoted: int = 0
    hidden_size: int = 0
    policy: int = 0
    ttft_us_0: int = 0
    tpot_us_0: int = 0
    ttft_us_1: int = 0
    tpot_us_1: int = 0
    ttft_us_2: int = 0
    tpot_us_2: int = 0
    ttft_us_3: int = 0
    tpot_us_3: int = 0
    lost_sequences: int = 0
    place_up_0: int = 0
    place_blocks_0: int = 0
    place_free_blocks_0: int = 0
    place_jobs_0: int = 0
    place_round_trip_us_0: int = 0
    place_sent_bytes_0: int = 0
    place_sessions_0: int = 0
    place_up_1: int = 0
    place_blocks_1: int = 0
    place_free_blocks_1: int = 0
    place_jobs_1: int = 0
    place_round_trip_us_1: int = 0
    place_sent_bytes_1: int = 0
    place_sessions_1: int = 0
    place_up_2: int = 0
    place_blocks_2: int = 0
    place_free_blocks_2: int = 0
    place_jobs_2: int = 0
    place_round_trip_us_2: int = 0
    place_sent_bytes_2: int = 0
    place_sessions_2: int = 0
    place_up_3: int = 0
    place_blocks_3: int = 0
    place_free_blocks_3: int = 0
    place_jobs_3: int = 0
    place_round_trip_us_3: int = 0
    place_sent_bytes_3: int = 0
    place_sessions_3: int = 0
    resident_steps: int = 0
    split_steps: int = 0
    died_ns: int = 0
    waiting_0: int = 0
    waiting_1: int = 0
    waiting_2: int = 0
    waiting_3: int = 0
    waiting_4: int = 0
    waiting_5: int = 0
    waiting_6: int = 0
    waiting_7: int = 0
    running_0: int = 0
    running_1: int = 0
    running_2: int = 0
    running_3: int = 0
    running_4: int = 0
    running_5: int = 0
    running_6: int = 0
    running_7: int = 0

    @property
    def targets(self) -> tuple[tuple[float | None, float | None], ...]:
        """Seconds to the first token and between tokens of the first classes; None for none."""
        given = (
            (self.ttft_us_0, self.tpot_us_0),
            (self.ttft_us_1, self.tpot_us_1),
            (self.ttft_us_2, self.tpot_us_2),
            (self.ttft_us_3, self.tpot_us_3),
        )
        return tuple((ttft / 1e6 or None, tpot / 1e6 or None) for ttft, tpot in given)

    @property
    def queues(self) -> tuple[tuple[int, int], ...]:
        """Waiting and running sequences of each counted class."""
        values = self.values()
        waiting, running = values[-2 * COUNTED_CLASSES :], values[-COUNTED_CLASSES:]
        return tuple(zip(waiting, running, strict=False))

    def values(self) -> list[int]:
        """The fields in the order of the page."""
        return list(astuple(self))


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """A step in the log; times on the monotonic clock.

    Attributes:
        number: of the entry; goes on over all engines of a ring.
        engine: its number: 1 for the first, one more for each that took over.
        step: its number since the start of that engine.
        predicted_ns: how long one of the ``steps`` was expected to take; 0 where nobody says.
        steps: this one and those that followed it under its lease, which had the same rows.
        split: 1 if it was computed in two halves.
        drafts: tokens that were guessed and checked.
        host_tokens: output tokens that came in with it whose attention the host has computed.
        prefill: prompt tokens of each class, in the order of ``counted_classes``.
        decode: rows of each class that decode.
    """

    number: int
    engine: int
    step: int
    began_ns: int
    ended_ns: int
    predicted_ns: int
    steps: int
    split: int
    drafts: int
    host_tokens: int
    prefill: tuple[int, ...]
    decode: tuple[int, ...]

    @classmethod
    def read(cls, number: int, values: Seq[int], ahead_ns: int = 0) -> LoggedStep:
        """Make one of the values of an entry, on a clock that is behind the engine's."""
        engine, step, began_ns, ended_ns, predicted_ns, steps, split, drafts, host_tokens = values[
            : -2 * COUNTED_CLASSES
        ]
        return cls(
            number,
            engine,
            step,
            began_ns - ahead_ns,
            ended_ns - ahead_ns,
            predicted_ns,
            steps,
            split,
            drafts,
            host_tokens,
            prefill=tuple(values[-2 * COUNTED_CLASSES : -COUNTED_CLASSES]),
            decode=tuple(values[-COUNTED_CLASSES:]),
        )


class LoggedRecovery(NamedTuple):
    """An engine that took over from another one; times on the monotonic clock.

    Attributes:
        engine: its number, as in `LoggedStep`.
        next_step: the entry of its first step.
        died_ns: when the one before it died; where nobody saw that, when it last said something.
        back_ns: when the new one took over.
    """

    engine: int
    next_step: int
    died_ns: int
    back_ns: int


_BY_CLASS = tuple(f"{kind}_{at}" for kind in ("prefill", "decode") for at in range(COUNTED_CLASSES))
if (
    tuple(field.name for field in fields(EngineInfo)) != _native.INFO_FIELDS
    or (*LoggedStep.__slots__[1:-2], *_BY_CLASS) != _native.STEP_FIELDS
    or LoggedRecovery._fields != _native.RECOVERY_FIELDS
):
    raise ImportError("weft.ring._native was built from another version; build it again")
