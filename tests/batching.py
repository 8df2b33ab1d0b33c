"""Batches before real servers: their lines, their ends, and processes that end at commit points."""

from __future__ import annotations

import json
import time
from typing import Any

import openai

# Ends a batch process at the commit point that a file names, when it comes there for the n-th time.
KILLER = """
import os, signal
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
            wanted.write(f"{{name}}|{{left}}" if left else "")
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
points.reached = reached
"""
ENDED = ("completed", "failed", "expired", "cancelled")
OPTIONS = ("--disk-reserve-bytes", "0", "--frontends", "1")


def line(number: int, **body: Any) -> dict[str, Any]:
    prompt = [300 + number % 3000, 7, 8, number % 11]
    made = {"model": "builtin", "prompt": prompt, "max_tokens": 6 + number % 20, "seed": number}
    made |= {"temperature": 1, "ignore_eos": True, **body}
    return {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": made}


def upload(client: openai.OpenAI, lines: list[Any]) -> str:
    texts = [item if isinstance(item, str) else json.dumps(item) for item in lines]
    data = "".join(f"{text}\n" for text in texts).encode()
    return client.files.create(file=("in.jsonl", data), purpose="batch").id


def create(client: openai.OpenAI, lines: list[Any], **given: Any) -> str:
    chosen = {"endpoint": "/v1/completions", "completion_window": "24h", **given}
    return client.batches.create(input_file_id=upload(client, lines), **chosen).id


def wait(client: openai.OpenAI, batch_id: str, seconds: float = 120) -> Any:
    """The batch once it has ended."""
    end = time.monotonic() + seconds
    while True:
        try:
            batch = client.batches.retrieve(batch_id)
            if batch.status in ENDED:
                return batch
        except (openai.APIConnectionError, openai.InternalServerError):
            pass  # a request plane was killed
        assert time.monotonic() < end, batch
        time.sleep(0.05)
