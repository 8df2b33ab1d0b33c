"""A simulation as a timeline for chrome://tracing or Perfetto: steps, requests, and counters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weft.sim.record import Record, StepLog
from weft.sim.run import Simulated

ENGINE, REQUESTS = 1, 2
_ARGS = ("tokens", "prefills", "decodes", "host_decodes", "out_tokens", "in_tokens", "sub_batches")


def write_timeline(path: str | Path, result: Simulated) -> None:
    """Write the events one by one, so that memory does not grow with them."""
    with open(path, "w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for index, event in enumerate(_events(result)):
            file.write((",\n" if index else "") + json.dumps(event))
        file.write("\n]}\n")


def _events(result: Simulated) -> Iterator[dict[str, Any]]:
    for pid, name in ((ENGINE, "engine"), (REQUESTS, "requests")):
        yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
    yield from _steps(result.log)
    yield from _requests(result.record)


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _steps(log: StepLog) -> Iterator[dict[str, Any]]:
    columns = log.columns
    for index, (start_s, seconds) in enumerate(
        zip(columns["start_s"], columns["seconds"], strict=True)
    ):
        values = {name: columns[name][index] for name in _ARGS}
        decodes = values["decodes"] + values["host_decodes"]
        kind = "mixed" if values["prefills"] and decodes else "decode" if decodes else "prefill"
        yield {
            "ph": "X", "pid": ENGINE, "tid": 0, "name": kind, "ts": _us(start_s),
            "dur": _us(seconds), "args": values,
        }  # fmt: skip
        for name in ("device_kv", "host_kv", "waiting"):
            args = {name: round(columns[name][index], 4)}
            yield {"ph": "C", "pid": ENGINE, "name": name, "ts": _us(start_s), "args": args}


def _requests(record: Record) -> Iterator[dict[str, Any]]:
    """Three spans for each request: queued, prompt, answer; those that it came to."""
    for number in range(len(record)):
        times = (record.arrival_s, record.scheduled_s, record.first_s, record.end_s)
        reached = [each[number] for each in times]
        name = f"{record.classes[record.kind[number]]} {number}"
        common = {"pid": REQUESTS, "cat": "request", "id": number, "name": name}
        end_s = reached[3]
        if end_s < 0:
            continue
        yield {
            **common, "ph": "b", "ts": _us(reached[0]),
            "args": {"input": record.input[number], "cached": record.cached[number]},
        }  # fmt: skip
        for part, start_s, until_s in zip(
            ("queued", "prompt", "answer"), reached, reached[1:], strict=False
        ):
            if start_s >= 0:
                until_s = until_s if until_s >= 0 else end_s
                yield {**common, "ph": "b", "name": part, "ts": _us(start_s)}
                yield {**common, "ph": "e", "name": part, "ts": _us(until_s)}
        yield {**common, "ph": "e", "ts": _us(end_s)}
