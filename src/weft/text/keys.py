"""``propertyNames`` of schemas in words that grammars know: dropped, or written out as keywords.

llguidance has no such keyword. One that says nothing is dropped; names that can be listed become
properties; a pattern or bounds of the length become ``patternProperties``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from weft.core.errors import GrammarError

MAX_LISTED = 100  # names written out as properties; more become one pattern
_MAX_REFERENCES = 16
_NOTES = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly")
)
_BOUNDS = frozenset(("minLength", "maxLength"))
_ELSEWHERE = ("$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "patternProperties")
_META = str.maketrans({char: f"\\{char}" for char in "\\.+*?()|[]{}^$"})

Schema = dict[str, Any]


def write_out_names(
    node: Schema, root: Mapping[str, Any], share: Callable[[Schema], Schema]
) -> None:
    """Replace ``propertyNames`` of a schema, in place, by what means the same.

    Args:
        root: the whole schema, in which references are looked up.
        share: returns a short schema that may stand for a given one in many places.

    Raises:
        GrammarError: nothing that a grammar can guarantee means the same.
    """
    names = _told(node.pop("propertyNames"), root)
    if names is None:
        return
    if any(keyword in node for keyword in _ELSEWHERE):
        raise GrammarError(f"propertyNames cannot be guaranteed beside {', '.join(_ELSEWHERE)}")
    listed = _listed(names, root)
    if listed is not None:
        _list(node, listed, share)
    elif names.keys() == {"pattern"}:
        _match(node, names["pattern"], None)
    elif names.keys() <= _BOUNDS:
        _match(node, _pattern_of(names), names)
    else:
        raise GrammarError(
            "propertyNames can be guaranteed with one of enum, const, pattern, or minLength and "
            f"maxLength, but it has {', '.join(names)[:200]}"
        )


def _told(names: Any, root: Mapping[str, Any]) -> Schema | None:
    """What a schema of names demands beyond that they are texts; None for nothing.

    Raises:
        GrammarError: it is no schema, no text satisfies it, or its reference leads nowhere.
    """
    for _ in range(_MAX_REFERENCES):
        if not (isinstance(names, dict) and isinstance(names.get("$ref"), str)):
            break
        others = {key: value for key, value in names.items() if key != "$ref"}
        names = _at(names["$ref"], root)
        names = {**names, **others} if isinstance(names, dict) else names
    if names is True:
        return None
    if not isinstance(names, dict) or not _may_be_text(names.get("type", "string")):
        raise GrammarError("propertyNames is satisfied by no text, or is no schema")
    rest = {key: value for key, value in names.items() if key not in _NOTES and key != "type"}
    if rest.get("minLength") == 0:
        del rest["minLength"]
    options = rest.get("anyOf")
    if isinstance(options, list) and any(_says_nothing(option, root) for option in options):
        del rest["anyOf"]
    rest = {key: value for key, value in rest.items() if not key.startswith("$")}
    return rest or None


def _says_nothing(option: Any, root: Mapping[str, Any]) -> bool:
    texts = option is True or (isinstance(option, dict) and _may_be_text(option.get("type", "")))
    return (texts or option == {}) and _told(option, root) is None


def _may_be_text(kind: Any) -> bool:
    return kind == "string" or (isinstance(kind, list) and "string" in kind)


def _at(reference: str, root: Mapping[str, Any]) -> Any:
    """What a reference within the schema stands for."""
    found: Any = root
    start, *steps = reference.split("/")
    for step in steps:
        key = step.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, dict) else None
    if start != "#" or found is None:
        raise GrammarError(f"propertyNames refers to '{reference[:200]}', which is not there")
    return found


def _listed(names: Schema, root: Mapping[str, Any]) -> list[str] | None:
    """The names that satisfy a schema, where it lists them: bounds of the length choose among them.

    Duplicates are left out; None where names are not listed.
    """
    found: list[Any] | None = None
    if names.keys() <= {"enum", *_BOUNDS} and isinstance(names.get("enum"), list):
        found = names["enum"]
    elif names.keys() <= {"const", *_BOUNDS} and "const" in names:
        found = [names["const"]]
    elif names.keys() == {"anyOf"} and isinstance(names["anyOf"], list):
        parts = [_listed(_told(option, root) or {}, root) for option in names["anyOf"]]
        found = [name for part in parts for name in part or []] if None not in parts else None
    if found is None:
        return None
    texts = [name for name in found if isinstance(name, str) and _fits(name, names)]
    return list(dict.fromkeys(texts))


def _fits(name: str, bounds: Schema) -> bool:
    low, high = _lengths(bounds)
    return low <= len(name) and (high is None or len(name) <= high)


def _lengths(bounds: Schema) -> tuple[int, int | None]:
    low, high = bounds.get("minLength", 0), bounds.get("maxLength")
    for bound in (low, high):
        if bound is not None and (type(bound) is not int or bound < 0):
            raise GrammarError("minLength and maxLength of propertyNames must be whole numbers")
    return low, high


def _pattern_of(bounds: Schema) -> str:
    low, high = _lengths(bounds)
    return f"^(?s:.{{{low},{'' if high is None else high}}})$"


def _list(node: Schema, names: list[str], share: Callable[[Schema], Schema]) -> None:
    """Allow the listed names only: as properties, or as one pattern where they are many."""
    others = node.get("additionalProperties", True)
    known = _properties(node)
    for name in known:
        if name not in names:
            known[name] = False
    free = [name for name in names if name not in known] if others is not False else []
    required = node.get("required")
    certain = set(required) if isinstance(required, list) and all(map(_is_text, required)) else ()
    if sum(name not in certain for name in (*known, *free)) <= MAX_LISTED:
        if len(free) > 1 and isinstance(others, dict):
            others = share(others)
        node["properties"] = {**known, **dict.fromkeys(free, others)}
    else:
        pattern = "|".join(name.translate(_META) for name in free)
        node["patternProperties"] = {f"^(?:{pattern})$": others}
    node["additionalProperties"] = False


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _match(node: Schema, pattern: Any, bounds: Schema | None) -> None:
    """Allow names that a pattern matches; ``bounds`` are what it says of the length alone."""
    if not isinstance(pattern, str):
        raise GrammarError("the pattern of propertyNames must be a text")
    others, known = node.get("additionalProperties", True), _properties(node)
    for name in known:
        if bounds is None:
            raise GrammarError("a pattern of propertyNames cannot be guaranteed beside properties")
        if not _fits(name, bounds):
            known[name] = False
    if others is False:
        return
    if any(schema is not False for schema in known.values()) and others not in (True, {}):
        raise GrammarError(
            "propertyNames beside properties cannot be guaranteed where additionalProperties has "
            "a schema"
        )
    node["patternProperties"] = {pattern: others}
    node["additionalProperties"] = False


def _properties(node: Schema) -> Schema:
    properties = node.get("properties")
    return properties if isinstance(properties, dict) else {}
