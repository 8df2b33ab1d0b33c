"""Batches of a real server over HTTP: their lines, their results, and kills at commit points."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Collection
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import openai
import psutil

from live import Server
from weft.batch.points import POINTS

# Ends a process at the commit point that a file names, when it comes there for the n-th time.
KILLER = """
import os, signal, sys
from weft.batch import points
def reached(point, file={file!r}):
    try:
        with open(file) as wanted:
            name, left = wanted.read().split("|")
    except (OSError, ValueError):
        return
    if name == point:
        left = int(left) - 1
        with open(file, "w") as wanted:
            wanted.write(f"{{name}}|{{left}}" if left else module)
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
points.reached = reached
"""
# Commit points to which request planes come; to the others come batch processes.
PLANES = ("upload ", "file", "batch c", "batch forgotten")
IN_PLANES = {point for point in POINTS if point.startswith(PLANES)}
ENDED = ("completed", "failed", "expired", "cancelled")
NEXT = {
    "validating": {"in_progress", "failed", "cancelling", "expired"},
    "in_progress": {"finalizing", "cancelling", "expired", "failed"},
    "finalizing": {"completed"},
    "cancelling": {"cancelled"},
}
OPTIONS = ("--disk-reserve-bytes", "0", "--frontends", "1")
ROWS = 16  # lines that a small server computes at once

Answer = TypeVar("Answer")


def line(number: int, **body: Any) -> dict[str, Any]:
    """A completion whose text its number decides."""
    prompt = [300 + number % 3000, 7, 8, number % 11]
    made = {"model": "builtin", "prompt": prompt, "max_tokens": 6 + number % 20, "seed": number}
    made |= {"temperature": 1, "ignore_eos": True, **body}
    return {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": made}


def upload(client: openai.OpenAI, lines: list[Any]) -> str:
    texts = [item if isinstance(item, str) else json.dumps(item) for item in lines]
    data = "".join(f"{text}\n" for text in texts).encode()
    return client.files.create(file=("in.jsonl", data), purpose="batch").id


def create(client: openai.OpenAI, lines: list[Any], **given: Any) -> str:
    return create_of(client, upload(client, lines), **given)


def create_of(client: openai.OpenAI, file_id: str, **given: Any) -> str:
    chosen = {"endpoint": "/v1/completions", "completion_window": "24h", **given}
    return client.batches.create(input_file_id=file_id, **chosen).id


def patiently(ask: Callable[[], Answer], seconds: float = 60) -> Answer:
    """The answer to a question that may be asked again; request planes may be killed meanwhile."""
    end = time.monotonic() + seconds
    while True:
        try:
            return ask()
        except (openai.APIConnectionError, openai.InternalServerError):
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def wait(client: openai.OpenAI, batch_id: str, seconds: float = 120) -> Any:
    """The batch once it has ended; whoever looks again and again must see it go forward only."""
    end, before = time.monotonic() + seconds, "validating"
    while True:
        batch = patiently(lambda: client.batches.retrieve(batch_id), seconds)
        seen = after(before)
        assert batch.status in seen, f"{batch.status} after {before}"
        before = batch.status
        if batch.status in ENDED:
            return batch
        assert time.monotonic() < end, batch
        time.sleep(0.05)


def after(status: str) -> set[str]:
    """All statuses that may be seen after one."""
    seen = {status}
    for following in NEXT.get(status, ()):
        seen |= after(following)
    return seen


def text_of(body: dict[str, Any]) -> str:
    """What an answer to any kind of request says."""
    if "choices" in body:
        [choice] = body["choices"]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])
    return json.dumps(body["data"])


def undisturbed_results(client: openai.OpenAI) -> dict[str, str]:
    """What sixty lines are answered where nobody is killed."""
    return results(client, wait(client, create(client, [line(i) for i in range(60)])))[0]


def results(client: openai.OpenAI, batch: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Texts of answers and codes of errors by custom_id, each of which is there once."""
    texts: dict[str, str] = {}
    errors: dict[str, str] = {}
    for file_id in (batch.output_file_id, batch.error_file_id):
        content = patiently(lambda: client.files.content(file_id).text) if file_id else ""  # noqa: B023
        for text in content.splitlines():
            found = json.loads(text)
            name = found["custom_id"]
            assert name not in texts, name
            assert name not in errors, name
            if found["error"] is not None:
                errors[name] = found["error"]["code"]
            else:
                texts[name] = text_of(found["response"]["body"])
    assert batch.request_counts.completed == len(texts)
    assert batch.request_counts.failed == len(errors)
    return texts, errors


def batch_processes(server: Server) -> list[psutil.Process]:
    return [child for name, child in server.children().items() if name == "weft-batches"]


def change(data: Path, table: str, record_id: str, **columns: Any) -> None:
    """Set columns of a row behind the server's back."""
    names = ", ".join(f"{name} = ?" for name in columns)
    with closing(sqlite3.connect(data / "weft.db", timeout=30)) as base, base:
        base.execute(f"UPDATE {table} SET {names} WHERE id = ?", (*columns.values(), record_id))


def expire(data: Path, batch_id: str) -> None:
    """Let the time of a batch be over; the shortest window is too long for a test."""
    change(data, "batches", batch_id, expires_at=time.time())


def on_disk(data: Path) -> dict[str, int]:
    """Names and sizes of all that the folder of files has."""
    folder = data / "files"  # which the first upload makes
    found = folder.iterdir() if folder.exists() else ()
    return {path.name: path.stat().st_size for path in found}


def listed(client: openai.OpenAI) -> dict[str, int]:
    """Ids and sizes of all files that the server shows."""
    files: Collection[Any] = patiently(lambda: list(client.files.list()))
    return {file.id: file.bytes for file in files}
