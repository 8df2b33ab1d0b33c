"""``propertyNames`` of schemas in keywords that grammars support: dropped, or written out.

llguidance has no such keyword. One that says nothing is dropped; names that can be listed become
properties; a pattern or bounds of the length become ``patternProperties``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from weft.core.errors import GrammarError

MAX_LISTED = 100  # names written out as properties; more become one pattern
MAX_STEPS = 50_000  # keywords and listed names of one schema, each as often as it is read
MAX_DEPTH = 32  # options within options
_MAX_REFERENCES = 16
_NOTES = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly")
)
_BOUNDS = frozenset(("minLength", "maxLength"))
_ELSEWHERE = ("$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "patternProperties")
_META = str.maketrans({char: f"\\{char}" for char in "\\.+*?()|[]{}^$"})

Schema = dict[str, Any]


def write_out_names(node: Schema, reader: NameReader, share: Callable[[Schema], Schema]) -> None:
    """Replace ``propertyNames`` of a schema, in place, by what means the same.

    Args:
        reader: of the whole schema.
        share: returns a short schema that may stand for a given one in many places.

    Raises:
        GrammarError: nothing that a grammar can guarantee means the same.
    """
    names = reader.told(node.pop("propertyNames"))
    if names is None:
        return
    if any(keyword in node for keyword in _ELSEWHERE):
        raise GrammarError(f"propertyNames cannot be guaranteed beside {', '.join(_ELSEWHERE)}")
    listed = reader.listed(names)
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


class NameReader:
    """Reads schemas of names in one whole schema, with a bound of the work for all of them.

    References share schemas, so that a short text may stand for very many.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._steps = 0

    def told(self, names: Any, depth: int = 0) -> Schema | None:
        """The constraints of a schema of names beyond their being strings; None if there are none.

        Raises:
            GrammarError: it is no schema, no text satisfies it, its reference leads nowhere or
                back to itself, or there is too much to read.
        """
        for _ in range(_MAX_REFERENCES):
            self._read(names)
            if not (isinstance(names, dict) and isinstance(names.get("$ref"), str)):
                break
            others = {key: value for key, value in names.items() if key != "$ref"}
            names = self._at(names["$ref"])
            names = {**names, **others} if isinstance(names, dict) else names
        if names is True:
            return None
        if not isinstance(names, dict) or not _may_be_text(names.get("type", "string")):
            raise GrammarError("propertyNames is satisfied by no text, or is no schema")
        rest = {key: value for key, value in names.items() if key not in _NOTES and key != "type"}
        if rest.get("minLength") == 0:
            del rest["minLength"]
        options = rest.get("anyOf")
        if isinstance(options, list):
            within = _deeper(depth)
            if any(self._says_nothing(option, within) for option in options):
                del rest["anyOf"]
        rest = {key: value for key, value in rest.items() if not key.startswith("$")}
        return rest or None

    def listed(self, names: Schema, depth: int = 0) -> list[str] | None:
        """The names that satisfy a schema, where it lists them: bounds of the length choose.

        Duplicates are left out; None where names are not listed.

        Raises:
            GrammarError: as `told`.
        """
        found: list[Any] | None = None
        if names.keys() <= {"enum", *_BOUNDS} and isinstance(names.get("enum"), list):
            found = names["enum"]
        elif names.keys() <= {"const", *_BOUNDS} and "const" in names:
            found = [names["const"]]
        elif names.keys() == {"anyOf"} and isinstance(names["anyOf"], list):
            found = self._listed_by(names["anyOf"], _deeper(depth))
        if found is None:
            return None
        self._read(found)
        texts = [name for name in found if isinstance(name, str) and _fits(name, names)]
        return list(dict.fromkeys(texts))

    def _listed_by(self, options: list[Any], depth: int) -> list[str] | None:
        found: list[str] = []
        for option in options:
            part = self.listed(self.told(option, depth) or {}, depth)
            if part is None:
                return None
            found += part
        return found

    def _says_nothing(self, option: Any, depth: int) -> bool:
        self._read(option)
        kind = option.get("type", "") if isinstance(option, dict) else ""
        texts = option is True or _may_be_text(kind)
        return (texts or option == {}) and self.told(option, depth) is None

    def _at(self, reference: str) -> Any:
        """Resolve a reference within the schema."""
        found: Any = self._root
        start, *steps = reference.split("/")
        for step in steps:
            key = step.replace("~1", "/").replace("~0", "~")
            found = found.get(key) if isinstance(found, dict) else None
        if start != "#" or found is None:
            raise GrammarError(f"propertyNames refers to '{reference[:200]}', which is not there")
        return found

    def _read(self, part: Any) -> None:
        """Count a part of the schema by its size."""
        self._steps += 1 + (len(part) if isinstance(part, (dict, list)) else 0)
        if self._steps > MAX_STEPS:
            raise GrammarError("propertyNames and what they refer to are too much to read")


def _deeper(depth: int) -> int:
    if depth == MAX_DEPTH:
        raise GrammarError(
            f"propertyNames refers to itself, or has more than {MAX_DEPTH} levels of options"
        )
    return depth + 1


def _may_be_text(kind: Any) -> bool:
    return kind == "string" or (isinstance(kind, list) and "string" in kind)


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
    known, allowed = _properties(node), set(names)
    for name in known:
        if name not in allowed:
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
