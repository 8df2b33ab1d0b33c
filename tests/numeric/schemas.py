"""Random JSON Schemas for tests of structured output."""

from __future__ import annotations

import random
from typing import Any

WORDS = ("name", "age", "kind", "tags", "note", "size", "next", "left", "right", "é😀", 'q"\\u')
PATTERNS = (r"^[a-z]+$", r"^\d{3}-\d{4}$", r"^(ab|cd)*$", r"[A-Z]", r"^.{2,5}$", r"^[^\s]+@x\.y$")
FORMATS = ("date", "uuid", "ipv4", "time")


def random_schema(seed: int) -> dict[str, Any]:
    """A schema of objects, arrays, enums, bounded numbers, strings, choices and references.

    A third of them have definitions that refer to themselves and to each other; lists, texts and
    maps without bounds are frequent.
    """
    draw = random.Random(seed)
    names = [f"d{i}" for i in range(draw.randrange(1, 4))] if draw.random() < 0.35 else []
    schema = _any(draw, 0, names)
    if names:
        # A definition may be left out of an object, so that some finite text satisfies it.
        schema["$defs"] = {name: _node(draw, names) for name in names}
    return schema


def _any(draw: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    if names and depth and draw.random() < 0.3:
        return {"$ref": f"#/$defs/{draw.choice(names)}"}
    if depth < 3 and draw.random() < 0.45:
        return draw.choice([_object, _object, _array, _any_of, _composed])(draw, depth, names)
    return draw.choice([_string, _number, _integer, _enum, _plain])(draw)


def _node(draw: random.Random, names: list[str]) -> dict[str, Any]:
    """A definition: an object whose references are optional."""
    return {
        "type": "object",
        "properties": {
            "value": _any(draw, 3, []),
            "one": {"$ref": f"#/$defs/{draw.choice(names)}"},
            "more": {"type": "array", "items": {"$ref": f"#/$defs/{draw.choice(names)}"}},
        },
        "required": ["value"],
        "additionalProperties": False,
    }


def _object(draw: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    keys = draw.sample(WORDS, draw.randrange(5))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {key: _any(draw, depth + 1, names) for key in keys},
        "required": [key for key in keys if draw.random() < 0.6],
    }
    extra = draw.random()
    if extra < 0.6:
        schema["additionalProperties"] = False
    elif extra < 0.8:
        schema["additionalProperties"] = _any(draw, depth + 1, names)
    return schema


def _array(draw: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array", "items": _any(draw, depth + 1, names)}
    if draw.random() < 0.3:
        schema["prefixItems"] = [_any(draw, depth + 1, names) for _ in range(draw.randrange(1, 3))]
    if draw.random() < 0.5:
        schema["minItems"] = draw.randrange(4)
    if draw.random() < 0.5:
        schema["maxItems"] = schema.get("minItems", 0) + draw.randrange(4)
    return schema


def _string(draw: random.Random) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    kind = draw.random()
    if kind < 0.25:
        schema["pattern"] = draw.choice(PATTERNS)
    elif kind < 0.4:
        schema["format"] = draw.choice(FORMATS)
    elif kind < 0.8:
        schema["minLength"] = draw.randrange(4)
        if draw.random() < 0.7:
            schema["maxLength"] = schema["minLength"] + draw.randrange(12)
    return schema


def _integer(draw: random.Random) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    low = draw.randrange(-1000, 1000)
    if draw.random() < 0.6:
        schema[draw.choice(["minimum", "exclusiveMinimum"])] = low
    if draw.random() < 0.6:
        schema[draw.choice(["maximum", "exclusiveMaximum"])] = low + draw.randrange(2, 5000)
    if not schema.keys() - {"type"} and draw.random() < 0.5:
        schema["multipleOf"] = draw.choice([2, 5, 7])
    return schema


def _number(draw: random.Random) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "number"}
    low = round(draw.uniform(-50, 50), 2)
    if draw.random() < 0.5:
        schema["minimum"] = low
    if draw.random() < 0.5:
        schema["maximum"] = round(low + draw.uniform(0.5, 100), 2)
    return schema


def _enum(draw: random.Random) -> dict[str, Any]:
    values = ["red", "a b", "", 'say "x"', "é", 1, -2.5, 0, None, True, [1, "x"], {"k": []}]
    if draw.random() < 0.2:
        return {"const": draw.choice(values)}
    return {"enum": draw.sample(values, draw.randrange(1, 6))}


def _any_of(draw: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    options = [_any(draw, depth + 1, names) for _ in range(draw.randrange(2, 4))]
    return {"anyOf": options}


def _composed(draw: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    """Schemas that hold together, exactly one of several, and maps by the form of their keys."""
    kind = draw.randrange(4)
    if kind == 0:
        return {"allOf": [_string(draw), {"type": "string", "minLength": 2}]}
    if kind == 1:
        options = [
            {
                "type": "object",
                "properties": {"kind": {"const": name}, "value": _any(draw, depth + 1, names)},
                "required": ["kind", "value"],
            }
            for name in ("a", "b")
        ]
        return {"oneOf": options}
    if kind == 2:
        return {
            "type": "object",
            "properties": {"ab": _string(draw)},
            "patternProperties": {"^[ab]+$": _string(draw)},
            "additionalProperties": draw.choice([False, _integer(draw)]),
        }
    return {
        "type": "object",
        "additionalProperties": _any(draw, depth + 1, names),
        "minProperties": draw.randrange(2),
        "maxProperties": draw.randrange(1, 4),
    }


def _plain(draw: random.Random) -> dict[str, Any]:
    kinds = ["boolean", "null", ["integer", "null"], ["string", "boolean"], "string"]
    return {"type": draw.choice(kinds)}
