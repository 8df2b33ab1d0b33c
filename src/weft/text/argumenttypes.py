"""Types of arguments by a function's schema, and their JSON where a model writes plain text."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

_MAX_REFERENCES = 16
_PLAIN = {"True": "true", "False": "false", "None": "null"}
_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number"}

Kinds = frozenset[str]
TEXT: Kinds = frozenset(("string",))


def argument_kinds(parameters: Mapping[str, Any] | None, key: str) -> Kinds | None:
    """The JSON types that an argument may have; None where the schema leaves that open."""
    properties = (parameters or {}).get("properties")
    schema = properties.get(key) if isinstance(properties, dict) else None
    return schema_kinds(schema, parameters or {})


def schema_kinds(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Kinds | None:
    """The JSON types that a schema allows; None where it leaves that open."""
    if not isinstance(schema, dict) or depth > _MAX_REFERENCES:
        return None
    if isinstance(schema.get("$ref"), str):
        return schema_kinds(resolve(schema["$ref"], root), root, depth + 1)
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset((declared,))
    if isinstance(declared, list):
        return frozenset(kind for kind in declared if isinstance(kind, str))
    if "const" in schema:
        return frozenset((_kind(schema["const"]),))
    if isinstance(schema.get("enum"), list):
        return frozenset(map(_kind, schema["enum"]))
    for options in (schema.get("anyOf"), schema.get("oneOf")):
        if isinstance(options, list):
            found = [schema_kinds(option, root, depth + 1) for option in options]
            known = [kinds for kinds in found if kinds is not None]
            return frozenset().union(*known) if len(known) == len(found) else None
    parts = schema.get("allOf")
    if isinstance(parts, list):
        for part in parts:
            kinds = schema_kinds(part, root, depth + 1)
            if kinds is not None:
                return kinds
    return None


def resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """What a reference within a schema names; None where there is nothing."""
    found: Any = root
    start, *steps = reference.split("/")
    for step in steps:
        name = step.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, dict) else None
    return found if start == "#" else None


def json_of(text: str, kinds: Kinds | None) -> str:
    """The JSON of a plain text that a model wrote as the value of an argument.

    A text is never an error: what is nothing else is a string.
    """
    if kinds == TEXT:
        return quoted(text)
    stripped = text.strip()
    written = _PLAIN.get(stripped, stripped)
    value = _loaded(written)
    if value is _NOTHING and (kinds is None or not kinds.isdisjoint(("object", "array"))):
        value = literal(stripped)
        value = value if isinstance(value, (dict, list)) else _NOTHING
        written = _dumped(value)
        value = value if written else _NOTHING
    if value is _NOTHING or (kinds is None and isinstance(value, str)):
        return quoted(text)
    if kinds is not None and "string" in kinds and not _fits(value, kinds):
        return quoted(text)
    return written


def quoted(text: str) -> str:
    """A text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def literal_json(text: str) -> str | None:
    """The JSON of a Python or JSON literal, None where it is neither."""
    stripped = text.strip()
    plain = _PLAIN.get(stripped, stripped)
    if _loaded(plain) is not _NOTHING:
        return plain
    return _dumped(literal(stripped)) or None


def literal(text: str) -> Any:
    """The value of a Python literal, which may have JSON's names; a sentinel for anything else."""
    try:
        return ast.literal_eval(_Names().visit(ast.parse(text.strip(), mode="eval")))
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return _NOTHING


class _Names(ast.NodeTransformer):
    """Puts Python's constants for JSON's names."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_NAMES[node.id]) if node.id in _NAMES else node


_NOTHING = object()
_NAMES = {"true": True, "false": False, "null": None}


def _loaded(text: str) -> Any:
    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return _NOTHING


def _dumped(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # half a character, which JSON can only spell
        return json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        return ""
    return text


def _fits(value: Any, kinds: Kinds) -> bool:
    kind = _kind(value)
    return (kind in kinds and kind != "string") or (kind == "integer" and "number" in kinds)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    return _KINDS.get(type(value), "array" if isinstance(value, list) else "object")
