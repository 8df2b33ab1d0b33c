"""Commit points of files and batches, by name: where tests end a process."""

from __future__ import annotations

POINTS = (
    "upload begun",  # a temporary file is there
    "upload written",  # it has all bytes
    "upload synchronised",  # they are on the disk
    "upload renamed",  # under the file's own name
    "upload committed",  # the row is there
    "batch created",
    "batch validated",  # before its row says so
    "batch started",
    "line answered",  # before it is appended
    "line appended",
    "batch cancelling",  # the row says so, the batch process has not seen it
    "end recorded",  # the row says why no more lines are answered
    "lines cancelled",  # each has its line in the file of errors
    "lines expired",
    "batch finalizing",
    "results synchronised",
    "batch finished",  # the row names the files of results
    "webhook confirmed",  # the outbox does not know yet
    "batch forgotten",  # the same of a batch and its results
    "file forgotten",  # its row is gone, its bytes are not
    "files expired",  # the same of all whose time is over
)


def reached(point: str) -> None:
    """A process has come to a commit point. Does nothing."""
    assert point in POINTS
