"""Logs of every process: one line an event, as text or JSON, with the id of its request."""

from __future__ import annotations

import json
import logging
import os
import time
from contextvars import ContextVar
from typing import Any

from weft.core.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error", "critical")
FORMATS = ("text", "json")

NOTICES = "weft.notices"  # what a user should see at any level

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")


def log_level(wish: str | None = None) -> str:
    """The level to log at: the wish, else what WEFT_LOG_LEVEL says, else ``warning``.

    Raises:
        ConfigError: the environment variable names no level.
    """
    level = wish or os.environ.get("WEFT_LOG_LEVEL", "warning")
    if level.lower() not in LEVELS:
        known = ", ".join(LEVELS).upper()
        raise ConfigError(f"WEFT_LOG_LEVEL must be one of {known}, not {level!r}.")
    return level.lower()


def set_up_logs(process: str, level: str, form: str) -> None:
    """Write everything at ``level`` and above to standard error, in place of earlier set-ups.

    Args:
        process: name of this process in the lines.
        form: ``text`` or ``json``.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines(process) if form == "json" else TextLines(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger(NOTICES).setLevel(logging.INFO)


def notice(message: str) -> None:
    """Print a message at any log level: ``weft: message``, or a line of JSON."""
    logging.getLogger(NOTICES).info("%s", message)


class JsonLines(logging.Formatter):
    """A JSON object a line: time (UTC), level, process, message, request_id, own fields."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextLines(logging.Formatter):
    """``time level process: message name=value ...``, a trace on lines of its own."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage().replace("\r", "\\r").replace("\n", "\\n")
        if record.name == NOTICES:
            return f"weft: {message}"
        head = f"{_time(record)} {record.levelname.lower()} weft {self._process}: {message}"
        fields = [f"{name}={_word(value)}" for name, value in _fields(record).items()]
        line = " ".join([head, *fields])
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _time(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """The fields of ``extra={"fields": ...}``, after the id of the request."""
    fields: dict[str, Any] = getattr(record, "fields", {})
    request_id = REQUEST_ID.get()
    if request_id and "request_id" not in fields:
        return {"request_id": request_id, **fields}
    return fields


def _word(value: Any) -> str:
    """A value without spaces and control characters, so that no client can forge a line."""
    text = str(value)
    plain = text.isascii() and text.isprintable() and text and not set(text) & {" ", '"', "="}
    return text if plain else json.dumps(text)
