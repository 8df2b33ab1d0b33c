"""Errors of whoever asks for files and batches."""

from __future__ import annotations

from weft.core.errors import WeftError


class FileNotThereError(WeftError):
    """There is no such file, or it is another key's."""

    http_status = 404
    code = "file_not_found"


class BatchNotFoundError(WeftError):
    """There is no such batch, or it is another key's."""

    http_status = 404
    code = "batch_not_found"


class FileInUseError(WeftError):
    """A batch that is not finished reads the file."""

    http_status = 409
    code = "file_in_use"


class BatchNotOverError(WeftError):
    """The batch has not ended: it has no results yet, and cannot be deleted."""

    http_status = 409
    code = "batch_not_ended"


class BatchOverError(WeftError):
    """The batch has ended, or is about to: nothing is left to be cancelled."""

    http_status = 409
    code = "batch_not_cancellable"


def check_kind(batch_id: str, prefix: str) -> None:
    """Raise BatchNotFoundError for the id of a batch that belongs to another API."""
    if not batch_id.startswith(prefix):
        message = f"There is no batch with the id '{batch_id[:100]}'."
        raise BatchNotFoundError(message, param="batch_id")
