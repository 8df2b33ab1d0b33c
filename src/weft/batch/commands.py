"""``weft batches``: submits, follows and fetches batches of a running server, and more."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.batch.client import BatchClient, RefusedError
from weft.batch.follow import ENDED, follow
from weft.batch.lines import parse_line
from weft.batch.options import errors_beside
from weft.batch.records import time_of_day
from weft.core.addresses import DEFAULT_URL
from weft.core.errors import ConfigError, ParameterError, WeftError
from weft.core.flags import add_server

FIRST_BYTES = 64 * 2**20  # in which the first line is looked for
SHOWN_ERRORS = 10
MOST_LISTED = 100  # as servers have it
LONG_UPLOAD_BYTES = 16 * 2**20
COLUMNS: tuple[str, ...] = ("ID", "STATUS", "LINES", "ERRORS", "WINDOW", "CREATED", "ENDS")


def add_arguments(batches: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    kinds = batches.add_subparsers(
        dest="kind", required=True, metavar="list|submit|follow|cancel|fetch"
    )
    for name, text, usage in (
        ("list", "show the newest batches", ""),
        ("submit", "upload a file of requests and create a batch of it", " FILE"),
        ("follow", "show the progress of a batch until it has ended", " ID"),
        ("cancel", "end a batch; what is answered is kept", " ID"),
        ("fetch", "write results and errors of a batch into files", " ID"),
    ):
        parser = kinds.add_parser(name, help=text, usage=f"weft batches {name}{usage} [settings]")
        parser.set_defaults(run=run_batches, parser=parser)
        if usage == " ID":
            parser.add_argument("id", help="id of the batch")
        add_server(parser)
        add = parser.add_argument
        if name == "list":
            add("--limit", type=int, default=20, metavar="N", help="batches at most (default 20)")
        elif name == "submit":
            add("file", help="JSON lines, each with custom_id, method, url and body")
            add("--window", default="24h", help="time until it has to be done (default 24h)")
            add("--endpoint", help="url of all lines; that of the first line by default")
            add("--follow", action="store_true", help="show its progress until it has ended")
        elif name == "fetch":
            add("-o", dest="output", metavar="FILE", help="file for the results; ID.jsonl without")
            add("--force", action="store_true", help="replace files that are there")


def run_batches(options: Mapping[str, Any]) -> int:
    """Run one of the commands; return the exit code.

    0: done. 3: some lines of the batch that was followed or fetched have no answer. 1: the batch
    has failed, or the one that was followed has expired or was cancelled.

    Raises:
        ConfigError: an argument or a file is wrong.
        WeftError: the server does not answer, or refuses.
    """
    client = BatchClient(options["url"], options["api_key"])
    with contextlib.closing(client):
        return _Commands(client, options).run(options["kind"])


class _Commands:
    """One method for each command."""

    def __init__(self, client: BatchClient, options: Mapping[str, Any]) -> None:
        self._client = client
        self._options = options
        self._to = "" if options["url"] == DEFAULT_URL else f" --url {options['url']}"

    def run(self, kind: str) -> int:
        found: int = getattr(self, f"_{kind}")()
        return found

    def _list(self) -> int:
        batches, more = self._client.batches(self._options["limit"])
        if not batches:
            print("There are no batches.")
            return 0
        rows = [COLUMNS, *map(_row, batches)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            print("  ".join(cells).rstrip())
        if more:
            wanted = min(2 * len(batches), MOST_LISTED)
            shows = f"; --limit {wanted} shows some of them" if wanted > len(batches) else ""
            print(f"There are more{shows}.")
        return 0

    def _submit(self) -> int:
        path = Path(self._options["file"])
        endpoint = self._options["endpoint"] or guess_endpoint(path)
        self._announce(path)
        file_id = self._client.upload(path)
        try:
            batch = self._client.create(file_id, endpoint, self._options["window"])
        except RefusedError:
            with contextlib.suppress(WeftError):  # the refusal is what matters
                self._client.delete_file(file_id)
            raise
        batch_id = batch["id"]
        extra = batch.get("weft") or {}
        _say(f"batch {batch_id} is created, with lines for {endpoint} and a window of "
             f"{batch['completion_window']}.")  # fmt: skip
        if extra.get("warning"):
            _say(f"warning: {extra['warning']}")
        elif extra.get("predicted_end_at"):
            _say(f"it is predicted to end at {time_of_day(extra['predicted_end_at'])}.")
        if self._options["follow"]:
            return self._watch(batch_id)
        print(batch_id)
        _say(f"follow it with: weft batches follow {batch_id}{self._to}")
        return 0

    def _announce(self, path: Path) -> None:
        """Say that an upload will take a while."""
        with contextlib.suppress(OSError):  # which the upload tells
            size = path.stat().st_size
            if size >= LONG_UPLOAD_BYTES:
                _say(f"uploading {size / 1e6:.0f} MB.")

    def _follow(self) -> int:
        return self._watch(self._options["id"])

    def _watch(self, batch_id: str) -> int:
        try:
            batch = follow(self._client, batch_id)
        except KeyboardInterrupt:
            _say(f"the batch goes on. See it again: weft batches follow {batch_id}{self._to}; "
                 f"end it: weft batches cancel {batch_id}{self._to}")  # fmt: skip
            raise
        print(_outcome(batch))
        if batch.get("output_file_id") or batch.get("error_file_id"):
            print(f"Fetch the results with: weft batches fetch {batch_id}{self._to}")
        return _exit_code(batch)

    def _cancel(self) -> int:
        batch_id = self._options["id"]
        batch = self._client.cancel(batch_id)
        if batch["status"] == "cancelled":
            print(f"The batch {batch_id} is cancelled.")
        else:
            print(
                f"The batch {batch_id} takes no more lines; what is answered is kept. See its end "
                f"with: weft batches follow {batch_id}{self._to}"
            )
        return 0

    def _fetch(self) -> int:
        batch = self._client.batch(self._options["id"])
        if batch["status"] not in ENDED:
            raise WeftError(
                f"The batch is {batch['status']} ({_count(batch)}) and has no results yet; wait "
                f"for its end with: weft batches follow {batch['id']}{self._to}"
            )
        output = Path(self._options["output"] or f"{batch['id']}.jsonl")
        files = {
            "Results": (batch.get("output_file_id"), output),
            "Errors": (batch.get("error_file_id"), errors_beside(output)),
        }
        wanted = {name: (file, path) for name, (file, path) in files.items() if file}
        for _, path in wanted.values():
            if path.exists() and not self._options["force"]:
                raise ConfigError(
                    f"'{path}' exists already; name another file with -o, or replace it with "
                    "--force.",
                    param="output",
                )
        print(_outcome(batch))
        for name, (file_id, path) in wanted.items():
            try:
                size = self._client.download(file_id, path)
            except RefusedError as error:
                if error.error_code != "file_not_found":
                    raise
                raise WeftError(
                    f"The server has the {name.lower()} of this batch no more: they have expired, "
                    "or were deleted."
                ) from None
            print(f"{name}: {path} ({size} bytes)")
        if batch["status"] == "failed":
            return 1
        return 3 if batch.get("error_file_id") else 0


def guess_endpoint(path: Path) -> str:
    """The url of the first line of a file.

    Raises:
        ConfigError: there is no such file, it has no lines, or the first one is no request.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(FIRST_BYTES), b""), 1):
                if line.strip():
                    return _url_of(line, f"{path}:{number}")
    except OSError as error:
        raise ConfigError(f"Cannot read '{path}': {error.strerror}.", param="input") from None
    raise ConfigError(f"'{path}' has no lines.", param="input")


def _url_of(line: bytes, place: str) -> str:
    try:
        return parse_line(line).url
    except ParameterError as error:
        raise ConfigError(f"{place}: {error.message}", param="input") from None


def _row(batch: Mapping[str, Any]) -> tuple[str, ...]:
    counts = batch.get("request_counts") or {}
    done = counts.get("completed", 0) + counts.get("failed", 0)
    extra = batch.get("weft") or {}
    end = ""
    for status in ("completed", "failed", "expired", "cancelled"):
        if batch.get(f"{status}_at"):
            end = time_of_day(batch[f"{status}_at"])
    if not end and extra.get("predicted_end_at"):
        end = f"{time_of_day(extra['predicted_end_at'])} (predicted)"
        end += ", late" if extra.get("warning") else ""
    total = counts.get("total", 0)
    return (
        batch["id"],
        batch["status"],
        f"{done}/{total}" if total else "-",
        str(counts.get("failed", 0)),
        batch["completion_window"],
        time_of_day(batch["created_at"]),
        end or "-",
    )


def _count(batch: Mapping[str, Any]) -> str:
    counts = batch.get("request_counts") or {}
    done = counts.get("completed", 0) + counts.get("failed", 0)
    total = counts.get("total", 0)
    return f"{done} of {total} line{'s' if total != 1 else ''} done"


def _outcome(batch: Mapping[str, Any]) -> str:
    """How a batch has ended, as a person wants to know it."""
    status, counts = batch["status"], batch.get("request_counts") or {}
    if status == "failed":
        found = (batch.get("errors") or {}).get("data") or []
        text = ["The batch has failed before any of its lines was asked:"]
        text += [_error(error) for error in found[:SHOWN_ERRORS]]
        if len(found) > SHOWN_ERRORS:
            text.append(f"  and {len(found) - SHOWN_ERRORS} more")
        return "\n".join(text)
    text = [f"The batch is {status}: {counts.get('completed', 0)} of {counts.get('total', 0)} "
            f"lines answered, {counts.get('failed', 0)} without an answer."]  # fmt: skip
    usage = batch.get("usage") or {}
    if usage.get("total_tokens"):
        text.append(f"Tokens: {usage['input_tokens']} in, {usage['output_tokens']} out.")
    return " ".join(text)


def _error(error: Mapping[str, Any]) -> str:
    line = error.get("line")
    place = "" if line is None else f"line {line}: "
    return f"  {place}{error.get('message')} ({error.get('code')})"


def _exit_code(batch: Mapping[str, Any]) -> int:
    if batch["status"] != "completed":
        return 1
    return 3 if (batch.get("request_counts") or {}).get("failed") else 0


def _say(message: str) -> None:
    print(f"weft: {message}", file=sys.stderr, flush=True)
