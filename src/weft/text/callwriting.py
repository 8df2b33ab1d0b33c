"""Writes calls in a form, as templates write those of earlier turns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from weft.text.forms import CallForm

Call = tuple[str, Mapping[str, Any]]  # name and arguments


def write_calls(form: CallForm, calls: Sequence[Call], first: int = 0) -> str:
    """The text of calls.

    Args:
        first: the number of the first call, where calls are numbered.
    """
    texts = [_call(form, name, arguments, first + i) for i, (name, arguments) in enumerate(calls)]
    return f"{form.section[0]}{form.between.join(texts)}{form.section[1]}"


def _call(form: CallForm, name: str, arguments: Mapping[str, Any], number: int) -> str:
    before, after = (text.replace("#", str(number)) for text in form.name)
    body = _arguments(form, arguments)
    return f"{form.call[0]}{before}{name}{after}{body}{form.arguments[1]}{form.call[1]}"


def _arguments(form: CallForm, arguments: Mapping[str, Any]) -> str:
    if form.body == "tagged":
        return "".join(_tagged(form, key, value) for key, value in arguments.items())
    if form.body == "python":
        return ", ".join(f"{key}={_literal(value)}" for key, value in arguments.items())
    if form.body == "bare":
        return _bare(form, arguments)
    return json.dumps(arguments, ensure_ascii=False)


def _tagged(form: CallForm, key: str, value: Any) -> str:
    text = isinstance(value, str)
    close = form.key[1] if text or not form.json_key else form.json_key
    written = value if text else json.dumps(value, ensure_ascii=False)
    return f"{form.key[0]}{key}{close}{form.value[0]}{written}{form.value[1]}"


def _literal(value: Any) -> str:
    """A Python literal, its strings in the quotes that models write."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_literal(k)}: {_literal(v)}' for k, v in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_literal, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _bare(form: CallForm, value: Any) -> str:
    if isinstance(value, str):
        return f"{form.quotes[0]}{value}{form.quotes[1]}"
    if isinstance(value, Mapping):
        pairs = (f"{key}:{_bare(form, item)}" for key, item in value.items())
        return f"{{{','.join(pairs)}}}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(_bare(form, item) for item in value)}]"
    return json.dumps(value)
