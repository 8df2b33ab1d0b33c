"""Files and batches as they are kept, and as OpenAI's API shows them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

import orjson

from weft.batch.demand import Demand
from weft.batch.usage import Usage
from weft.core.states import BatchStatus

UNFINISHED: tuple[BatchStatus, ...] = ("validating", "in_progress", "finalizing", "cancelling")
UPLOADED = ("batch", "assistants", "fine-tune", "vision", "user_data", "evals")
OUTPUT = "batch_output"
MESSAGES_IN, MESSAGES_OUT = "message_batch_input", "message_batch_output"
HIDDEN = (MESSAGES_IN, MESSAGES_OUT)  # from whoever asks for files: Anthropic's API shows batches
BATCH_PREFIX, MESSAGES_PREFIX = "batch_", "msgbatch_"  # of ids, by the API that they belong to
PURPOSES = (*UPLOADED, OUTPUT, "assistants_output", "fine-tune-results")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file whose bytes are on the disk, synchronised.

    Attributes:
        owner: digest of the key whose it is; nobody else finds it.
        expires_at: Unix time; None for never.
    """

    id: str
    owner: bytes
    purpose: str
    filename: str
    bytes: int
    created_at: int
    expires_at: int | None

    def to_object(self) -> dict[str, Any]:
        """OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A batch.

    Attributes:
        owner: as of a file.
        served: what the model is; only servers of the same answer its lines.
        service_class: in which its lines are asked at present.
        window: as it was given, such as "24h".
        predicted_at: when it will be complete, as far as is known.
        predicted_from: ``rates`` at which batches were answered lately, or its own ``progress``.
        promotable: classes that its lines may go on in if it is late, in rising order.
        promotions: JSON of the steps that were taken.
        account: under what a limit on queued tokens counts it.
        queued_limit: queued tokens that the account may have; None for any number.
        demand_lines, demand_input, demand_output: an estimate of its work, see `Demand`; of a
            sample until it is validated.
        ending: why lines without an answer are given up, once that has begun.
        failed: lines that have an error; ``given_up`` of them were never answered.
        metadata, errors: JSON.
        payer: name of the owner's key when it was made, for what the key uses; "" without keys.
    """

    id: str
    owner: bytes
    endpoint: str
    model: str
    served: str
    input_file_id: str
    window: str
    status: BatchStatus
    created_at: int
    expires_at: int
    metadata: bytes = b"null"
    output_expires_s: int | None = None
    service_class: str = "batch"
    predicted_at: int | None = None
    predicted_from: str | None = None
    promotable: str = "flex"
    promotions: bytes = b"[]"
    account: bytes = b""
    queued_limit: int | None = None
    demand_lines: int = 0
    demand_input: int = 0
    demand_output: int = 0
    ending: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    errors: bytes = b"null"
    given_up: int = 0
    payer: str = ""

    @property
    def of_messages(self) -> bool:
        """Whether it was made by Anthropic's API: its requests came with it, and none is refused
        before it is its turn."""
        return self.id.startswith(MESSAGES_PREFIX)

    @property
    def ended_at(self) -> int | None:
        """When it ended, however it did."""
        ends = (self.completed_at, self.failed_at, self.expired_at, self.cancelled_at)
        return next((end for end in ends if end is not None), None)

    @property
    def output_name(self) -> str:
        """The id that the file of its answers has, or will have."""
        return derived_id(self.id, "output")

    @property
    def errors_name(self) -> str:
        """The same of the file of lines without an answer."""
        return derived_id(self.id, "errors")

    @property
    def usage(self) -> Usage:
        return Usage(
            self.input_tokens, self.output_tokens, self.cached_tokens, self.reasoning_tokens
        )

    def to_object(self) -> dict[str, Any]:
        """OpenAI's batch object, and under ``weft`` what only weft says."""
        errors = orjson.loads(self.errors)
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": None if errors is None else {"object": "list", "data": errors},
            "input_file_id": self.input_file_id,
            "completion_window": self.window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "in_progress_at": self.in_progress_at,
            "expires_at": self.expires_at,
            "finalizing_at": self.finalizing_at,
            "completed_at": self.completed_at,
            "failed_at": self.failed_at,
            "expired_at": self.expired_at,
            "cancelling_at": self.cancelling_at,
            "cancelled_at": self.cancelled_at,
            "request_counts": {
                "total": self.total,
                "completed": self.completed,
                "failed": self.failed,
            },
            "usage": self.usage.to_object(),
            "metadata": orjson.loads(self.metadata),
            "weft": {
                "service_class": self.service_class,
                "promotions": orjson.loads(self.promotions),
                "predicted_end_at": self.predicted_at,
                "predicted_from": self.predicted_from,
                "warning": self.warning,
                "queued_tokens": self.queued_tokens,
            },
        }

    @property
    def queued_tokens(self) -> int:
        """What counts against the limit of its account until it ends."""
        return self.demand_input + self.demand_output

    @property
    def demand(self) -> Demand:
        """How much work all its lines are."""
        return Demand(self.demand_lines, self.demand_input, self.demand_output)

    @property
    def demand_left(self) -> Demand:
        """The same of its lines that are not done."""
        done = self.completed + self.failed
        left = max(0.0, 1 - done / self.demand_lines) if self.demand_lines else 0.0
        return self.demand * left

    @property
    def warning(self) -> str | None:
        """What its owner should know of its window."""
        if self.predicted_at is None or self.predicted_at <= self.expires_at:
            return None
        if self.status not in UNFINISHED:
            return None
        return (
            f"This batch is predicted to end at {time_of_day(self.predicted_at)}, after its window "
            f"of {self.window}, which ends at {time_of_day(self.expires_at)}."
        )


def time_of_day(at: float) -> str:
    """A Unix time for a person to read."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def derived_id(batch_id: str, kind: str) -> str:
    """The id of a file that a batch makes: the same however often it is made."""
    return f"file-{sha256(f'{batch_id} {kind}'.encode()).hexdigest()[:32]}"


FILE_COLUMNS = tuple(column.name for column in fields(FileRecord))
BATCH_COLUMNS = tuple(column.name for column in fields(BatchRecord))
