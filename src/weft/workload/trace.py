"""Recorded requests: traces of Azure and Mooncake, files of lengths, and your own JSON lines."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from weft.core.errors import ParameterError

BLOCK_TOKENS = 512  # of a block id in Mooncake's traces
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_LENGTHS = ("num_prefill_tokens", "num_decode_tokens")


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a trace.

    Attributes:
        at_s: seconds after the first one; NaN if the file has no times.
        blocks: equal numbers are equal text, ``BLOCK_TOKENS`` each, from the prompt's start.
        prompt: the text itself, if the trace has it.
    """

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    prompt: str | None = None


def read_trace(path: str, param: str = "trace") -> list[Arrival]:
    """Read requests with times in order of time, from 0 s on.

    Lines of one's own are objects with ``at_s`` (seconds), ``output_tokens``, and either
    ``input_tokens`` or ``prompt``; Mooncake's have ``timestamp`` (ms), ``input_length``,
    ``output_length`` and ``hash_ids``.

    Raises:
        ParameterError: the file cannot be read or has no times, or a line is wrong; it says which.
    """
    arrivals = read_requests(path, param)
    if math.isnan(arrivals[0].at_s):
        raise ParameterError(f"'{path}' has lengths, but no times.", param=param)
    return arrivals


def read_requests(path: str, param: str = "trace") -> list[Arrival]:
    """Read requests with times, as ``read_trace`` does, or without, in the order of the file.

    A file without times is a CSV with the columns ``num_prefill_tokens`` and
    ``num_decode_tokens``, as Sarathi-Serve's and Vidur's files of lengths are.

    Raises:
        ParameterError: the file cannot be read, or a line is wrong; it says which.
    """
    lines = read_text(path, param).splitlines()
    head = lines[0].lstrip("\ufeff") if lines else ""
    read: Callable[[str, list[str]], Iterator[Arrival]] = _json_lines
    if head.startswith(_AZURE[0]):
        read = _azure
    elif head.startswith(_LENGTHS[0]):
        read = _lengths
    try:
        arrivals = list(read(path, lines))
    except ParameterError as error:
        raise ParameterError(error.message, param=param) from None
    if not arrivals:
        raise ParameterError(f"'{path}' has no requests.", param=param)
    if math.isnan(arrivals[0].at_s):
        return arrivals
    arrivals.sort(key=lambda arrival: arrival.at_s)
    start = arrivals[0].at_s
    return [replace(arrival, at_s=arrival.at_s - start) for arrival in arrivals]


def read_text(path: str, param: str) -> str:
    """Read a file. Raises ParameterError, naming ``param``."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ParameterError(f"Cannot read '{path}': {error.strerror}.", param=param) from None
    except UnicodeDecodeError:
        raise ParameterError(f"'{path}' is not UTF-8 text.", param=param) from None


def _azure(path: str, lines: list[str]) -> Iterator[Arrival]:
    rows = csv.DictReader(lines)
    for number, row in enumerate(rows, 2):
        try:
            at, context, generated = (row[name] for name in _AZURE)
            moment = datetime.fromisoformat(at[:26])
            yield _checked(moment.timestamp(), int(context), int(generated))
        except (KeyError, TypeError, ValueError, OverflowError):
            raise _wrong(path, number, f"not a row of {', '.join(_AZURE)}") from None


def _lengths(path: str, lines: list[str]) -> Iterator[Arrival]:
    for number, row in enumerate(csv.DictReader(lines), 2):
        try:
            given, asked = (int(row[name]) for name in _LENGTHS)
            if min(given, asked) < 0:
                raise ValueError
            yield Arrival(math.nan, max(1, given), max(1, asked))
        except (KeyError, TypeError, ValueError):
            raise _wrong(path, number, f"not a row with {' and '.join(_LENGTHS)}") from None


def _json_lines(path: str, lines: list[str]) -> Iterator[Arrival]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            yield _mooncake(value) if "hash_ids" in value else _own(value)
        except (ValueError, RecursionError):
            what = "not a request: at_s or timestamp, lengths above 0"
            raise _wrong(path, number, what) from None
        except KeyError as error:
            raise _wrong(path, number, f"{error} is missing") from None
        except (TypeError, AttributeError):
            raise _wrong(path, number, "a line must be an object of numbers") from None


def _mooncake(value: Mapping[str, Any]) -> Arrival:
    blocks = tuple(int(block) for block in value["hash_ids"])
    return _checked(
        value["timestamp"] / 1e3, value["input_length"], value["output_length"], blocks=blocks
    )


def _own(value: Mapping[str, Any]) -> Arrival:
    if (prompt := value.get("prompt")) is not None and not isinstance(prompt, str):
        raise TypeError
    length = value.get("input_tokens", 1) if prompt else value["input_tokens"]
    return _checked(float(value["at_s"]), length, value["output_tokens"], prompt=prompt)


def _checked(at_s: float, given: int, asked: int, **more: Any) -> Arrival:
    if not math.isfinite(at_s) or min(given, asked) < 0 or type(given + asked) is not int:
        raise ValueError
    return Arrival(at_s, max(1, given), max(1, asked), **more)


def _wrong(path: str, line: int, what: str) -> ParameterError:
    return ParameterError(f"{path}:{line}: {what}.", param="trace")
