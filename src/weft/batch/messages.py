"""Batches as Anthropic's API shows them: message batches, and the lines of their results."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import orjson
from msgspec import Raw, Struct

from weft.api.message_answers import error_of
from weft.api.message_lists import moment
from weft.batch.journal import GIVEN_UP
from weft.batch.records import UNFINISHED, BatchRecord

RESULTS_KEPT_S = 29 * 86400
REFUSED_STATUS = 400  # of a request that was none
CANCELED, EXPIRED = GIVEN_UP


def message_batch(record: BatchRecord, results_url: str) -> dict[str, Any]:
    """Anthropic's message batch, and under ``weft`` what only weft says.

    Args:
        results_url: where its results are, once it has ended.
    """
    ended_at, over = record.ended_at, record.status not in UNFINISHED
    archived_at = None
    if ended_at is not None and record.output_expires_s is not None:
        archived_at = ended_at + record.output_expires_s
    gone = archived_at is not None and archived_at <= time.time()
    status = "canceling" if record.status == "cancelling" else "in_progress"
    return {
        "id": record.id,
        "type": "message_batch",
        "processing_status": "ended" if over else status,
        "request_counts": _counts(record, over),
        "ended_at": _moment(ended_at),
        "created_at": _moment(record.created_at),
        "expires_at": _moment(record.expires_at),
        "archived_at": _moment(archived_at) if gone else None,
        "cancel_initiated_at": _moment(record.cancelling_at),
        "results_url": results_url if over and not gone else None,
        "weft": {
            "service_class": record.service_class,
            "predicted_end_at": _moment(record.predicted_at),
            "done": record.completed + record.failed,
        },
    }


def _counts(record: BatchRecord, over: bool) -> dict[str, int]:
    """As long as the batch goes on, all of its requests count as processing there."""
    given_up = record.given_up if over else 0
    succeeded = record.completed if over else 0
    return {
        "processing": 0 if over else record.total,
        "succeeded": succeeded,
        "errored": record.total - succeeded - given_up if over else 0,
        "canceled": given_up if record.status == "cancelled" else 0,
        "expired": given_up if record.status != "cancelled" else 0,
    }


def _moment(seconds: int | None) -> str | None:
    return None if seconds is None else moment(seconds)


class _AnswerPart(Struct):
    status_code: int
    request_id: str
    body: Raw


class _Line(Struct):
    custom_id: str | None
    response: _AnswerPart | None
    error: dict[str, Any] | None


_lines = msgspec.json.Decoder(_Line)


def result_line(data: bytes) -> bytes:
    """A line of a batch's file of results or errors in Anthropic's form."""
    line = _lines.decode(data)
    result: dict[str, Any]
    if line.error is None:
        assert line.response is not None, "a line has an answer or an error"
        message = orjson.Fragment(bytes(line.response.body))
        result = {"type": "succeeded", "message": message}
    elif line.error.get("code") == CANCELED:
        result = {"type": "canceled"}
    elif line.error.get("code") == EXPIRED:
        result = {"type": "expired"}
    else:
        status = REFUSED_STATUS if line.response is None else line.response.status_code
        number = None if line.response is None else line.response.request_id
        error = {"type": "error", "error": error_of(status, {"error": line.error})}
        result = {"type": "errored", "error": {**error, "request_id": number}}
    found = {"custom_id": line.custom_id, "result": result}
    return orjson.dumps(found, option=orjson.OPT_APPEND_NEWLINE)
