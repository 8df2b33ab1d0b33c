"""Commit points of files and batches, by name: where tests end a process."""

from __future__ import annotations

POINTS = (
    "upload written",  # all bytes are in a temporary file
    "upload renamed",  # and synchronised, under the file's own name
    "upload committed",  # the row is there
    "batch created",
    "batch validated",  # before its row says so
    "batch started",
    "line answered",  # before it is appended
    "line appended",
    "lines cancelled",  # each has its line in the file of errors
    "lines expired",
    "batch finalizing",
    "results synchronised",
    "batch finished",  # the row names the files of results
    "webhook confirmed",  # the outbox does not know yet
    "batch forgotten",  # the same of a batch and its results
    "file forgotten",  # its row is gone, its bytes are not
)


def reached(point: str) -> None:
    """A process has come to a commit point. Does nothing."""
    assert point in POINTS
