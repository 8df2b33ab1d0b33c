"""Rules for the arguments of calls, in each body of a form."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.core.errors import GrammarError
from weft.text.argumenttypes import TEXT, resolve, schema_kinds
from weft.text.forms import CallForm
from weft.text.grammar import Whitespace, json_schema_grammar, quote
from weft.text.patterns import check_pattern

Spell = Callable[[str], str]
Schema = Mapping[str, Any]

ANY = "/(?s:.*)/"
MAX_RULES = 2000  # of all functions of a request
_NOTES = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly")
) | {"$comment", "$schema", "$id", "$defs", "definitions", "nullable"}
_TEXT = frozenset(("type", "pattern", "minLength", "maxLength"))
_KEY = "/[A-Za-z_][A-Za-z0-9_.\\-]{0,63}/"


@dataclass(frozen=True, slots=True)
class CallableFunction:
    """A function that may be called.

    Attributes:
        arguments: grammar of its arguments as JSON.
        schema: what they satisfy; None where any object does.
    """

    name: str
    arguments: str
    schema: Schema | None = None
    whitespace: Whitespace = "compact"


def until(name: str, marker: str, text: str = "TEXT") -> str:
    """A rule for any text up to a marker and with it."""
    lazy = "" if marker.startswith("<[") else "[lazy]"
    return f"{name}{lazy}: {text} {marker}"


class ArgumentRules:
    """Rules of one grammar for calls in a form.

    Attributes:
        lines: of the Lark grammar.
        grammars: others that these refer to by name.
    """

    def __init__(self, form: CallForm, spell: Spell) -> None:
        self.lines: list[str] = []
        self.grammars: list[dict[str, Any]] = []
        self._form, self._spell = form, spell
        self._arguments_of: list[str] = []
        self._count = 0
        self._shared: dict[str, str] = {}  # rules by what they are for
        self._known: dict[str, str] = {}
        self._root: Schema = {}
        self._white: Whitespace = "compact"

    def add(self, name: str, grammar: str) -> str:
        """Add the only grammar of a text under a name; return how rules refer to it."""
        (only,) = json.loads(grammar)["grammars"]
        self.grammars.append({**only, "name": name})
        return f"@{name}"

    def items(
        self,
        functions: Sequence[CallableFunction],
        opening: str,
        name: str = "item",
        *,
        closed: bool = True,
    ) -> str:
        """Add the rule of one call of any function, after the text that opens it."""
        form, spell = self._form, self._spell
        if not self._arguments_of:
            self._arguments_of = [self._named(i, one) for i, one in enumerate(functions)]
        ways = []
        for function, arguments in zip(functions, self._arguments_of, strict=True):
            called = function.name if form.body != "object" else json.dumps(function.name)[1:-1]
            head = [spell(opening + form.name[0]), quote(called), spell(form.name[1])]
            tail = [spell(form.arguments[1]), spell(form.call[1] if closed else "")]
            ways.append(" ".join(filter(None, [*head, arguments, *tail])))
        self.lines.append(f"{name}: {' | '.join(ways)}")
        return name

    def _named(self, index: int, function: CallableFunction) -> str:
        """The rule for a function's arguments; errors name the function."""
        try:
            return self._arguments(index, function)
        except GrammarError as error:
            raise GrammarError(f"the function '{function.name[:100]}': {error.message}") from None

    def _arguments(self, index: int, function: CallableFunction) -> str:
        if self._form.body not in ("tagged", "python", "bare"):
            return self.add(f"arguments_{index}", function.arguments)
        self._root, self._white = function.schema or {}, function.whitespace
        self._known = {}  # rules by reference, of one function
        schema = self._resolved(self._root)
        if function.schema is None:
            return self._free()
        self._only(schema, {"type", "properties", "required", "additionalProperties"})
        if self._form.body == "bare":
            return self._bare_object(schema)
        listed = self._properties(schema)
        if self._form.body == "python":
            parts = [
                (f"{quote(key + '=')} {self._python(value)}", required)
                for key, value, required in listed
            ]
            return self._joined(parts, quote(", "))
        tagged = [
            self._tagged(key, value) if required else f"({self._tagged(key, value)})?"
            for key, value, required in listed
        ]
        return self._rule(" ".join(tagged) or '""')

    def _rule(self, text: str) -> str:
        self._count += 1
        if self._count > MAX_RULES:
            raise GrammarError(f"the functions take more than {MAX_RULES} rules in this form")
        self.lines.append(f"rule_{self._count}: {text}")
        return f"rule_{self._count}"

    def _terminal(self, text: str) -> str:
        self._count += 1
        self.lines.append(f"T_{self._count}: {text}")
        return f"T_{self._count}"

    def _once(self, key: str, make: Callable[[], str]) -> str:
        """A rule that several arguments share."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def _free(self) -> str:
        """Any arguments."""
        form, spell = self._form, self._spell
        if form.body == "bare":
            return self._once("free", lambda: self._bare_object({}))
        if form.body == "python":
            value = self._once("value", lambda: self.add("any", json_schema_grammar("{}")))
            one = f'{_KEY} "=" {value}'
            return self._once("free", lambda: self._rule(f'({one} (", " {one})*)?'))
        text = self._text({})
        strings = f"{spell(form.key[0])} {_KEY} {spell(form.key[1] + form.value[0])} {text}"
        return self._once("free", lambda: self._rule(f"({strings})*"))

    def _properties(self, schema: Schema) -> list[tuple[str, Any, bool]]:
        properties = schema.get("properties")
        known = properties if isinstance(properties, dict) else {}
        required = schema.get("required")
        needed = set(required) if isinstance(required, list) else set()
        if needed - known.keys():
            raise GrammarError("'required' names what 'properties' does not have")
        if isinstance(schema.get("additionalProperties"), dict):
            raise GrammarError(
                "a schema for 'additionalProperties' cannot be followed in this form"
            )
        return [(key, value, key in needed) for key, value in known.items() if value is not False]

    def _joined(self, parts: Sequence[tuple[str, bool]], between: str) -> str:
        """Parts in their order with text between them; those that are not required may lack."""
        rest = ""
        starts: list[str] = []
        for part, required in reversed(parts):
            starts = [f"{part} {rest}"] if required else [f"{part} {rest}", *starts]
            more = f"{between} {part} {rest}"
            rest = self._rule(more if required else f"({between} {part})? {rest}")
        if not any(required for _, required in parts):
            starts.append('""')
        return self._rule(" | ".join(starts))

    def _resolved(self, schema: Any) -> Schema:
        for _ in range(16):
            if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
                break
            schema = resolve(schema["$ref"], self._root)
        if schema is True:
            return {}
        if not isinstance(schema, dict) or "$ref" in schema:
            raise GrammarError("a part of the schema is no schema, or refers to nothing")
        return schema

    def _only(self, schema: Schema, known: set[str] | frozenset[str]) -> None:
        for keyword in schema:
            if keyword not in known and keyword not in _NOTES:
                raise GrammarError(
                    f"the keyword '{keyword}' cannot be followed in this model's form of calls, "
                    "where strings have no quotes; leave it out, or do not force the call"
                )

    def _json(self, schema: Any) -> str:
        """A value as JSON."""
        whole = {**schema}
        for name in ("$defs", "definitions"):
            if name in self._root:
                whole.setdefault(name, self._root[name])
        key = json.dumps(whole, sort_keys=True)
        name = f"value_{len(self.grammars)}"
        return self._once(
            key, lambda: self.add(name, json_schema_grammar(json.dumps(whole), self._white))
        )

    def _python(self, schema: Any) -> str:
        plain = {} if schema is True else schema
        if schema_kinds(plain, self._root) == frozenset(("boolean",)) and "enum" not in plain:
            return '("True" | "False")'
        return self._json(plain)

    def _tagged(self, key: str, schema: Any) -> str:
        """One argument between its markers."""
        form, spell = self._form, self._spell
        plain = {} if schema is True else schema
        kinds = schema_kinds(plain, self._root)
        start, end = form.value
        ways = []
        if kinds is None or "string" in kinds:
            text = self._text(self._resolved(_part(plain, form.json_key, str)))
            ways.append(f"{spell(form.key[1] + start)} {text}")
        if kinds is None or "string" not in kinds or (form.json_key and len(kinds) > 1):
            value = self._json(_part(plain, form.json_key, object))
            if kinds is not None or form.json_key:
                close = spell((form.json_key or form.key[1]) + start)
                ways.append(f"{close} {value} {spell(end)}")
        return f"{spell(form.key[0])} {quote(key)} ({' | '.join(ways)})"

    def _text(self, schema: Schema) -> str:
        """A raw text and what closes it."""
        end = self._form.value[1]
        stripped = end.strip()
        at = end.find(stripped)
        marker, after = end[: at + len(stripped)], self._spell(end[at + len(stripped) :])
        choices = self._choices(schema)
        if choices is not None:
            texts = [c if isinstance(c, str) else json.dumps(c) for c in choices]
            if any(stripped in text for text in texts):
                raise GrammarError("a value has the text that ends values in this form")
            return f"({' | '.join(map(quote, texts))}) {self._spell(marker)} {after}"
        spelled = self._spell(marker)
        terminal = self._text_terminal(schema, stripped)
        name = self._once(f"{terminal} {spelled}", lambda: self._until(terminal, spelled))
        return f"{name} {after}"

    def _until(self, terminal: str, marker: str) -> str:
        self._count += 1
        name = f"rule_{self._count}"
        self.lines.append(until(name, marker, terminal))
        return name

    def _choices(self, schema: Schema) -> list[Any] | None:
        if "const" in schema:
            return [schema["const"]]
        choices = schema.get("enum")
        return choices if isinstance(choices, list) and choices else None

    def _text_terminal(self, schema: Schema, end: str) -> str:
        """A text within the bounds of a schema, without what ends it."""
        self._check_mixed(schema)
        parts = [ANY]
        pattern = schema.get("pattern")
        if isinstance(pattern, str):
            parts.append(f"/{_searched(pattern)}/")
        low, high = schema.get("minLength", 0), schema.get("maxLength")
        if low or high is not None:
            parts.append(f"/(?s:.{{{low},{'' if high is None else high}}})/")
        key = f"terminal {' & '.join(parts)} {end}"

        def make() -> str:
            ended = self._terminal(f"{ANY} {quote(end)} {ANY}")
            return self._terminal(f"{' & '.join(parts)} & ~{ended}")

        return self._once(key, make)

    def _check_mixed(self, schema: Schema) -> None:
        """Refuse bounds of what is no string beside strings: a text may then be either."""
        options = [o for name in ("anyOf", "oneOf") for o in schema.get(name) or ()]
        self._only(schema, _TEXT | {"anyOf", "oneOf"})
        for option in options:
            self._only(self._resolved(option), {"type"})

    def _bare_object(self, schema: Schema) -> str:
        if not schema.get("properties") and "properties" not in schema:
            return f'"{{" ({self._bare_any_pair()} ("," {self._bare_any_pair()})*)? "}}"'
        parts = [
            (f"{quote(key + ':')} {self._bare(value)}", required)
            for key, value, required in self._properties(schema)
        ]
        return f'"{{" {self._joined(parts, quote(","))} "}}"'

    def _bare_any_pair(self) -> str:
        return f'{_KEY} ":" {self._bare_any()}'

    def _bare_any(self) -> str:
        if "any" not in self._shared:
            self._count += 1
            name = self._shared["any"] = f"rule_{self._count}"
            number = self._json({"type": "number"})
            pair = f'{_KEY} ":" {name}'
            self.lines.append(
                f'{name}: {self._bare_text({})} | {number} | "true" | "false" | "null"'
                f' | "[" ({name} ("," {name})*)? "]" | "{{" ({pair} ("," {pair})*)? "}}"'
            )
        return self._shared["any"]

    def _bare_text(self, schema: Schema) -> str:
        opening, closing = self._form.quotes
        terminal = self._text_terminal(schema, closing)
        spelled = self._spell(closing)
        name = self._once(f"{terminal} {spelled}", lambda: self._until(terminal, spelled))
        return f"{self._spell(opening)} {name}"

    def _bare(self, schema: Any) -> str:
        """A value of JSON with bare keys."""
        if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
            reference = schema["$ref"]
            if reference not in self._known:
                self._count += 1
                name = self._known[reference] = f"rule_{self._count}"
                self.lines.append(f"{name}: {self._bare(self._resolved(schema))}")
            return self._known[reference]
        schema = self._resolved(schema)
        choices = self._choices(schema)
        if choices is not None:
            return f"({' | '.join(map(self._bare_literal, choices))})"
        for options in (schema.get("anyOf"), schema.get("oneOf")):
            if isinstance(options, list) and options:
                return f"({' | '.join(map(self._bare, options))})"
        kind = schema.get("type")
        if isinstance(kind, list):
            return f"({' | '.join(self._bare({**schema, 'type': one}) for one in kind)})"
        if kind is None:
            self._only(schema, set())
            return self._bare_any()
        if kind == "string":
            return self._bare_text(schema)
        if kind == "array":
            return self._bare_array(schema)
        if kind == "object":
            self._only(schema, {"type", "properties", "required", "additionalProperties"})
            return self._rule(self._bare_object(schema))
        return self._json(schema)

    def _bare_array(self, schema: Schema) -> str:
        self._only(schema, {"type", "items", "minItems", "maxItems"})
        item = self._bare(schema.get("items", {}))
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        if high == 0:
            return '"[" "]"'
        more = f'("," {item}){{{max(low - 1, 0)},{"" if high is None else high - 1}}}'
        return f'"[" {item} {more} "]"' if low else f'"[" ({item} {more})? "]"'

    def _bare_literal(self, value: Any) -> str:
        if isinstance(value, str):
            opening, closing = map(self._spell, self._form.quotes)
            return f"{opening} {quote(value)} {closing}" if value else f"{opening} {closing}"
        if isinstance(value, (dict, list)):
            raise GrammarError("lists and objects in an 'enum' cannot be followed in this form")
        return quote(json.dumps(value))


def _part(schema: Any, split: str, wanted: type) -> Any:
    """The part of a schema that allows strings, or all but strings, where markup tells them."""
    if not split or not isinstance(schema, dict):
        return schema
    texts = wanted is str
    changed = dict(schema)
    if isinstance(schema.get("type"), list):
        kinds = [kind for kind in schema["type"] if (kind == "string") == texts]
        changed["type"] = kinds[0] if len(kinds) == 1 else kinds
    if isinstance(schema.get("enum"), list):
        changed["enum"] = [v for v in schema["enum"] if isinstance(v, str) == texts]
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            options = [o for o in schema[name] if (schema_kinds(o, {}) == TEXT) == texts]
            if len(options) == 1:
                return {**{k: v for k, v in schema.items() if k != name}, **options[0]}
            changed[name] = options
    return changed


def _searched(pattern: str) -> str:
    """The expression of a text in which a pattern of JSON Schema is found, for a Lark grammar."""
    check_pattern(pattern)
    start, end = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern[start : len(pattern) - end]
    if (start or end) and "|" in re.sub(r"\\.|\[[^\]]*\]|\([^()]*\)", "", inner):
        raise GrammarError("a pattern with '^' or '$' beside '|' cannot be followed in this form")
    inner = re.sub(r"\\.|/", lambda m: "\\/" if m[0] == "/" else m[0], inner)
    whole = f"{'' if start else '(?s:.*)'}({inner}){'' if end else '(?s:.*)'}"
    return whole.replace("\n", "\\n")
