"""Refuses JSON Schemas that a grammar cannot guarantee or that exceed the bounds.

A keyword is honoured or an error, never ignored.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weft.core.errors import GrammarError
from weft.text.closing import close_objects
from weft.text.keys import NameReader, write_out_names
from weft.text.patterns import check_pattern

MAX_SCHEMA_CHARS = 128 * 2**10
MAX_SCHEMA_DEPTH = 64
MAX_OPTIONAL = 100  # of one object: each may come next, which is bounded while text is followed
MAX_PROPERTIES = 1000  # of all objects of a schema; compiling takes the square of it
MAX_ENUM_VALUES = 10_000
MIN_BOUND = 1e-60  # of numbers, but for 0; each zero after the point is a group of an expression

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_DATA = ("enum", "const", "default", "examples")
# Characters that JSON can only write as \u00NN, which the output does not use.
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f]")
_OUTPUT = ("const", "enum", "pattern", "required")  # their strings are text of the output
_OTHER_DRAFTS = ("additionalItems", "disallow", "divisibleBy", "extends", "nullable")


def read_schema(text: str) -> str:
    """The text of a JSON Schema as llguidance can follow it.

    Keys beyond the ``properties`` of an object come only where the schema speaks of them.

    Raises:
        GrammarError: the text is no schema, is too large, or asks for something that cannot be
            guaranteed.
    """
    if len(text) > MAX_SCHEMA_CHARS:
        raise GrammarError(f"it has more than {MAX_SCHEMA_CHARS} characters")
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        raise GrammarError("it cannot be read as JSON, or is nested too deeply") from None
    if not isinstance(schema, dict):
        raise GrammarError("a schema must be an object")
    changed = _write_out_names(schema)
    _check_schema(schema)
    changed |= close_objects([node for node, _ in _schemas(schema, "", 0)])
    return json.dumps(schema) if changed else text


def _write_out_names(schema: dict[str, Any]) -> bool:
    """Replace each ``propertyNames`` by what a grammar can follow; whether there was any."""
    named = False
    shared: dict[str, Any] = {}
    rest: list[tuple[Any, str]] = [(schema, "")]
    reader = NameReader(schema)

    def share(part: dict[str, Any]) -> dict[str, Any]:
        taken = _mapping(schema, "$defs")
        name = f"names{len(shared)}"
        while name in taken:
            name += "_"
        shared[name] = part
        rest.append((part, path))
        return {"$ref": f"#/$defs/{name}"}

    while rest:
        start, above = rest.pop()
        for node, path in _schemas(start, above, 0):  # changed before the schemas within it come
            if "propertyNames" in node:
                named = True
                with _at(path):
                    write_out_names(node, reader, share)
    if shared:
        schema["$defs"] = {**_mapping(schema, "$defs"), **shared}
    return named


def _check_schema(schema: Any) -> None:
    properties = values = 0
    nodes = list(_schemas(schema, "", 0))
    merged = any(_merges(node) for node, _ in nodes)
    bounds = [_bounds(node) for node, _ in nodes]
    _check_bounds([bound for some in bounds for bound in some] if merged else [])
    for node, path in nodes:
        properties += len(_mapping(node, "properties"))
        values += len(node["enum"]) if isinstance(node.get("enum"), list) else 0
        if properties > MAX_PROPERTIES:
            raise GrammarError(f"it has more than {MAX_PROPERTIES} properties")
        if values > MAX_ENUM_VALUES:
            raise GrammarError(f"it has more than {MAX_ENUM_VALUES} values in enums")
        with _at(path):
            _check_node(node)


@contextlib.contextmanager
def _at(path: str) -> Iterator[None]:
    """Make errors name their path in the schema."""
    try:
        yield
    except GrammarError as error:
        raise GrammarError(f"at '{path or '.'}': {error.message}") from None


def _check_node(node: Mapping[str, Any]) -> None:
    _check_draft(node)
    if any(map(_CONTROL.search, _output_strings(node))):
        raise GrammarError("it has control characters, which the output cannot have")
    for pattern in [node.get("pattern"), *_mapping(node, "patternProperties")]:
        if isinstance(pattern, str):
            check_pattern(pattern)
    _check_bounds(_bounds(node))
    least, required = node.get("minProperties", 0), node.get("required")
    certain = len(required) if isinstance(required, list) else 0
    if len(_mapping(node, "properties").keys() - _names(required)) > MAX_OPTIONAL:
        raise GrammarError(f"more than {MAX_OPTIONAL} properties of one object are not required")
    # Keys that no schema names can be written twice, and then count once.
    if isinstance(least, (int, float)) and least > certain + 1:
        raise GrammarError("minProperties cannot be guaranteed beyond one key that is not required")


def _check_draft(node: Mapping[str, Any]) -> None:
    """Refuse what other drafts of JSON Schema have, and llguidance would pass over."""
    for keyword in _OTHER_DRAFTS:
        if keyword in node and node[keyword] is not False:
            raise GrammarError(f"the keyword '{keyword}' is not of JSON Schema 2020-12")
    for keyword in ("exclusiveMinimum", "exclusiveMaximum"):
        if node.get(keyword) is True:
            raise GrammarError(f"'{keyword}' must be the bound itself, as in JSON Schema 2020-12")
    if isinstance(node.get("items"), list):
        raise GrammarError("'items' must be one schema; a list of them is 'prefixItems'")


def _names(required: Any) -> set[str]:
    names = required if isinstance(required, list) else []
    return {name for name in names if isinstance(name, str)}


def _output_strings(node: Mapping[str, Any]) -> Iterator[str]:
    """Strings of a schema that the output may have to have, those of schemas within left out."""
    rest: list[Any] = [node.get(keyword) for keyword in _OUTPUT]
    rest += [list(_mapping(node, keyword)) for keyword in ("properties", "patternProperties")]
    while rest:
        value = rest.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            rest += [*value, *value.values()]
        elif isinstance(value, list):
            rest += value


def _bounds(node: Mapping[str, Any]) -> list[tuple[bool, float]]:
    """Whether each bound of a number is exclusive, and the bound."""
    if node.get("type") == "integer":
        return []
    return [
        (name.startswith("exclusive"), value)
        for name in _BOUNDS
        if isinstance(value := node.get(name), (int, float)) and not isinstance(value, bool)
    ]


def _merges(node: Mapping[str, Any]) -> bool:
    """Whether bounds of several schemas may hold for one value."""
    return "allOf" in node or (
        bool(_bounds(node)) and any(name in node for name in ("$ref", "anyOf", "oneOf"))
    )


def _check_bounds(bounds: Sequence[tuple[bool, float]]) -> None:
    """Refuse what llguidance cannot follow, or gets wrong: above 0 and below 0.3 it takes 0."""
    if any(0 < abs(bound) < MIN_BOUND for _, bound in bounds):
        raise GrammarError(f"a bound of a number is closer to 0 than {MIN_BOUND:g}")
    if (True, 0) in bounds and any(0 < abs(bound) < 1 for _, bound in bounds):
        raise GrammarError("0 cannot be excluded beside a bound between -1 and 1; name a small one")


def _schemas(node: Any, path: str, depth: int) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each schema within a schema, with its path."""
    if depth > MAX_SCHEMA_DEPTH:
        raise GrammarError(f"it is nested more than {MAX_SCHEMA_DEPTH} levels deep")
    if isinstance(node, list):
        for index, item in enumerate(node):
            yield from _schemas(item, f"{path}[{index}]", depth + 1)
    if not isinstance(node, dict):
        return
    yield node, path
    for key, value in node.items():
        if key in _DATA:
            continue
        if key in _MAPS:
            for name, item in _mapping(node, key).items():
                yield from _schemas(item, _join(path, f"{key}.{name}"), depth + 1)
        else:
            yield from _schemas(value, _join(path, key), depth + 1)


def _mapping(node: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = node.get(key)
    return value if isinstance(value, dict) else {}


def _join(path: str, key: str) -> str:
    return f"{path}.{key}"[:200] if path else key[:200]
