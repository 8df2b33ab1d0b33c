"""Structured output: schemas, expressions, choices and grammars to what llguidance compiles.

Everything is bounded before it is compiled, and what a grammar cannot guarantee is refused: a
keyword is honoured or an error, never ignored.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal

from llguidance import LLMatcher, LLTokenizer

from weft.core.errors import GrammarError
from weft.core.grammar import compile_grammar, explain, grammar_tokenizer
from weft.text.closing import close_objects
from weft.text.keys import write_out_names
from weft.text.regular import lark_expression
from weft.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_SCHEMA_CHARS = 128 * 2**10
MAX_SCHEMA_DEPTH = 64
MAX_OPTIONAL = 100  # of one object: each may come next, which is bounded while text is followed
MAX_PROPERTIES = 1000  # of all objects of a schema; compiling takes the square of it
MAX_ENUM_VALUES = 10_000
MAX_PATTERN_CHARS = 4096
MAX_NESTED_REPETITIONS = 10_000
MAX_CHOICES = 10_000
MAX_LARK_CHARS = 32 * 2**10
MIN_BOUND = 1e-60  # of numbers, but for 0; each zero after the point is a group of an expression
MAX_WHITESPACE = 16  # characters between two parts of JSON: a model cannot fill the output with it
Whitespace = Literal["compact", "flexible"]
REMEMBERED = 256  # grammars that need not be checked again

_COMPACT: JsonCompileOptions = {
    "item_separator": ",\x20?",
    "key_separator": ":\x20?",
    "whitespace_flexible": False,
    "coerce_one_of": False,
    "lenient": False,
    # Without \u a key has one spelling, so none can be written twice, and no text half a character.
    "json_allowed_escapes": 'nrbtf\\"',
}
_COMPILE_OPTIONS: Mapping[Whitespace, JsonCompileOptions] = {
    "compact": _COMPACT,
    "flexible": {
        **_COMPACT,
        "item_separator": ",",
        "key_separator": ":",
        "whitespace_flexible": True,
        "whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{MAX_WHITESPACE}}}",
    },
}
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_DATA = ("enum", "const", "default", "examples")
# Characters that JSON can only write as \u00NN, which the output does not use.
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f]")
_OUTPUT = ("const", "enum", "pattern", "required")  # their strings are text of the output
_OTHER_DRAFTS = ("additionalItems", "disallow", "divisibleBy", "extends", "nullable")


def json_object_grammar(whitespace: Whitespace = "compact") -> str:
    """Any JSON object; see `json_schema_grammar`."""
    return _json_grammar('{"type": "object"}', whitespace)


def json_schema_grammar(text: str, whitespace: Whitespace = "compact") -> str:
    """JSON that satisfies a schema, given as JSON text.

    Args:
        whitespace: ``compact`` allows a space after each comma and colon, ``flexible`` up to
            ``MAX_WHITESPACE`` characters of white space between any two parts.

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
    return _json_grammar(json.dumps(schema) if changed else text, whitespace)


def regex_grammar(pattern: str) -> str:
    """Text that a regular expression matches as a whole. Raises GrammarError for a costly one."""
    check_pattern(pattern)
    return str(LLMatcher.grammar_from_regex(pattern))


def choice_grammar(choices: Sequence[str]) -> str:
    """One of several texts. Raises GrammarError for none, for too many, and for an empty one."""
    if not 0 < len(choices) <= MAX_CHOICES:
        raise GrammarError(f"there must be 1 to {MAX_CHOICES} choices")
    if not all(choices):
        raise GrammarError("a choice must not be empty")
    if sum(map(len, choices)) > MAX_SCHEMA_CHARS:
        raise GrammarError(f"the choices have more than {MAX_SCHEMA_CHARS} characters together")
    # An upper-case name: matched as one expression, not tried as one rule a choice.
    texts = " | ".join(quote(choice) for choice in choices)
    return _lark(f"start: CHOICE\nCHOICE: {texts}\n")


def lark_grammar(text: str) -> str:
    """Text of a Lark grammar, as llguidance reads them. Raises GrammarError for a costly one."""
    if len(text) > MAX_LARK_CHARS:
        raise GrammarError(f"it has more than {MAX_LARK_CHARS} characters")
    _check_repetitions(text)
    return _lark(text)


def custom_grammar(format: Mapping[str, Any] | None) -> str:
    """``{"input": "..."}`` with a text as the format of a custom tool of OpenAI's API asks for.

    Args:
        format: ``{"type": "text"}`` or None for any text; ``{"type": "grammar", "syntax": "regex"
            or "lark", "definition": ...}``, the last two in an object ``grammar`` or not.

    Raises:
        GrammarError: it is malformed or too costly; or a rule of a Lark grammar refers to itself,
            which cannot be followed within a JSON string.
    """
    given = format or {"type": "text"}
    text: dict[str, Any] = {"type": "string"}
    if given.get("type") == "grammar":
        text["pattern"] = f"^(?:{_custom_pattern(given.get('grammar', given))})$"
    elif given.get("type") != "text":
        raise GrammarError("the type of the format must be 'text' or 'grammar'")
    return _json_grammar(
        json.dumps(
            {
                "type": "object",
                "properties": {"input": text},
                "required": ["input"],
                "additionalProperties": False,
            }
        ),
        "compact",
    )


def _custom_pattern(given: Any) -> str:
    syntax, definition = (
        (given.get("syntax"), given.get("definition")) if isinstance(given, dict) else (None, None)
    )
    if not isinstance(definition, str) or syntax not in ("regex", "lark"):
        raise GrammarError("the format needs the syntax 'regex' or 'lark' and a definition")
    if syntax == "regex":
        check_pattern(definition)
        return definition
    if len(definition) > MAX_LARK_CHARS:
        raise GrammarError(f"it has more than {MAX_LARK_CHARS} characters")
    expression = lark_expression(definition)
    _check_repetitions(expression)
    return expression


def quote(text: str) -> str:
    """A text as a literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


class GrammarChecker:
    """Compiles grammars once to see that they can be. Safe to share between threads.

    Args:
        eos_token_ids: of the model; without any no structured output can end.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._known: OrderedDict[bytes, str] = OrderedDict()  # digest -> what is wrong, or ""
        self._lock = threading.Lock()

    def knows(self, grammar: str) -> bool:
        """Whether `check` would answer at once."""
        return _digest(grammar) in self._known

    def check(self, grammar: str) -> None:
        """Compile a grammar; takes up to some tenths of a second, in which other threads go on.

        Raises:
            GrammarError: it is wrong, too costly, or allows no text.
        """
        digest = _digest(grammar)
        problem = self._known.get(digest)
        if problem is None:
            problem = self._compile(grammar)
        with self._lock:
            self._known[digest] = problem
            self._known.move_to_end(digest)
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        if problem:
            raise GrammarError(problem)

    def _compile(self, grammar: str) -> str:
        try:
            compile_grammar(self._load(), grammar)
        except GrammarError as error:
            return error.message
        return ""

    def _load(self) -> LLTokenizer:
        if not self._eos_token_ids:
            raise GrammarError("this model has no end-of-sequence token, so it could never end")
        with self._lock:
            if self._tokenizer is None:
                text = self._source.grammar_document()
                self._tokenizer = grammar_tokenizer(text, self._vocab_size, self._eos_token_ids)
            return self._tokenizer


def _digest(grammar: str) -> bytes:
    return sha256(grammar.encode()).digest()


def _lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]}, ensure_ascii=False)


def _json_grammar(schema: str, whitespace: Whitespace) -> str:
    options = _COMPILE_OPTIONS[whitespace]
    try:
        return str(LLMatcher.grammar_from_json_schema(schema, overrides=options))
    except ValueError as error:
        raise GrammarError(explain(str(error))) from None


# -- what a schema may ask for --------------------------------------------------------------------


def _write_out_names(schema: dict[str, Any]) -> bool:
    """Replace each ``propertyNames`` by what a grammar can follow; whether there was any."""
    named = False
    shared: dict[str, Any] = {}
    rest: list[tuple[Any, str]] = [(schema, "")]

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
                    write_out_names(node, schema, share)
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
    """Let errors say where in a schema they are."""
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
    """Yield each schema within a schema, with where it stands."""
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


def check_pattern(pattern: str) -> None:
    """Refuse a regular expression that would take too long. Raises GrammarError."""
    if len(pattern) > MAX_PATTERN_CHARS:
        raise GrammarError(f"the expression has more than {MAX_PATTERN_CHARS} characters")
    _check_repetitions(pattern)


def _check_repetitions(text: str) -> None:
    """Refuse counted repetitions within others whose product is large: ``((a{99}){99}){99}``."""
    inner = [1]  # for each open group the largest product within it
    last = 1  # of the item before the current place
    at = 0
    while at < len(text):
        char = text[at]
        at += 1
        if char == "\\":
            at, last = at + 1, 1
        elif char == "(":
            inner.append(1)
            last = 1
        elif char == ")" and len(inner) > 1:
            last = inner.pop()
            inner[-1] = max(inner[-1], last)
        elif char == "{" and (count := _count(text, at)):
            if last > 1 and last * count > MAX_NESTED_REPETITIONS:
                raise GrammarError(
                    f"repetitions within repetitions may make {MAX_NESTED_REPETITIONS} at most"
                )
            last *= count
            inner[-1] = max(inner[-1], last)
            at = text.index("}", at) + 1
        elif char not in "*+?":
            last = 1


def _count(text: str, at: int) -> int:
    """The larger number of ``n}``, ``n,}`` or ``n,m}``; 0 if it is no count."""
    end = text.find("}", at, at + 32)
    parts = text[at:end].split(",") if end > 0 else []
    numbers = [int(part) for part in parts if part.strip().isdecimal()]
    return max(numbers, default=0) if len(parts) <= 2 else 0
