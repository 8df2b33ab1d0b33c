"""Admission of batches: whether one has room in the queue, and when it will end."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import Any

from weft.batch.demand import Demand, sample_demand
from weft.batch.errors import FileNotThereError
from weft.batch.forecast import predict_end
from weft.batch.records import BatchRecord, time_of_day
from weft.batch.store import BatchStore
from weft.core.errors import WeftError
from weft.core.states import BatchStatus

VALIDATING: tuple[BatchStatus, ...] = ("validating",)


class QueuedTokensError(WeftError):
    """An account has as many tokens in unfinished batches as it may.

    A batch of OpenAI's API fails with it when it is validated, as there; one of Anthropic's, which
    cannot fail, is refused.
    """

    http_status = 429
    code = "token_limit_exceeded"


class WindowError(WeftError):
    """A batch is predicted to end after its window, and the server takes none that do."""

    http_status = 422
    code = "window_unattainable"


def begin_batch(store: BatchStore, record: BatchRecord, lines: int, demand: Demand) -> bool:
    """Let a validated batch begin; False if it is not waiting for that any more.

    Raises:
        QueuedTokensError: its account has no room for its tokens at present.
    """
    tokens = round(demand.input_tokens) + round(demand.output_tokens)
    return store.update(
        record.id,
        before=VALIDATING,
        check=lambda: None if record.of_messages else _check_queue(store, record, tokens),
        status="in_progress",
        in_progress_at=int(time.time()),
        total=lines,
        **_columns(demand),
    )


def _check_queue(store: BatchStore, record: BatchRecord, tokens: int) -> None:
    """Raise QueuedTokensError if more tokens than the limit would be queued."""
    limit = record.queued_limit
    if limit is None:
        return
    queued = sum(
        other.queued_tokens
        for other in store.unfinished()
        if other.account == record.account
        and other.id != record.id
        and (other.in_progress_at is not None or other.of_messages)
    )
    if queued + tokens <= limit:
        return
    counted = (
        f"Enqueued token limit reached: this batch counts as {tokens:,} tokens, its prompts and "
        "the most that its outputs may have"
    )
    if tokens > limit:
        raise QueuedTokensError(
            f"{counted}. Limit: {limit:,} enqueued tokens. Split the file, or lower max_tokens."
        )
    raise QueuedTokensError(
        f"{counted}, and {queued:,} are queued. Limit: {limit:,} enqueued tokens. Please try again "
        "once some in_progress batches have been completed."
    )


def _columns(demand: Demand) -> dict[str, Any]:
    return {
        "demand_lines": round(demand.lines),
        "demand_input": round(demand.input_tokens),
        "demand_output": round(demand.output_tokens),
    }


def file_demand(store: BatchStore, owner: bytes, file_id: str) -> Demand:
    """What the lines of an upload ask for, by a sample; nothing if it is not there."""
    with contextlib.suppress(FileNotThereError, FileNotFoundError):  # which others tell
        store.file(owner, file_id)
        return sample_demand(store.files_folder.path(file_id))
    return Demand()


class Forecaster:
    """Predicts the end of a batch that comes.

    Args:
        demand: of its lines.
        strict: refuse a batch that would end after its window.
    """

    def __init__(self, store: BatchStore, demand: Demand, strict: bool) -> None:
        self._store = store
        self._demand = demand
        self._strict = strict

    def judge(self, record: BatchRecord) -> BatchRecord:
        """The record with its demand, and its predicted end where that can be told.

        Raises:
            WindowError: it would end after its window.
            QueuedTokensError: it is of Anthropic's API, and its account has no room for it.
        """
        record = replace(record, **_columns(self._demand))
        if record.of_messages:
            _check_queue(self._store, record, record.queued_tokens)
        pace = self._store.paces.pace(record.served)
        if pace is None:
            return record
        end = predict_end(pace, record, self._store.unfinished(), record.created_at)
        if end is None:
            return record
        record = replace(record, predicted_at=round(end), predicted_from="rates")
        if self._strict and record.warning is not None:
            raise WindowError(
                f"The batch is refused: it is predicted to end at {time_of_day(end)}, after its "
                f"window of {record.window}, which ends at {time_of_day(record.expires_at)}. Ask "
                "for a longer completion_window, or for fewer or shorter lines.",
                param="completion_window",
            )
        return record
