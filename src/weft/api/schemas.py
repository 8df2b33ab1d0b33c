"""JSON Schema of declared structs: bodies with their rules, and answers."""

from __future__ import annotations

from collections.abc import Callable
from inspect import cleandoc
from typing import Any, get_type_hints

import orjson
from msgspec import UNSET, Struct, inspect

from weft.api.bodies import ChatBody
from weft.api.response_body import CHECKED_BY_CHAT, ResponseBody
from weft.api.rules import Refused, Rule, rules_of
from weft.core.errors import InvariantError

BORROWED = {ResponseBody: (ChatBody, frozenset(CHECKED_BY_CHAT))}  # fields that another body checks
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
_SCALARS: dict[type, dict[str, Any]] = {
    inspect.AnyType: {},
    inspect.RawType: {},
    inspect.NoneType: {"type": "null"},
    inspect.BoolType: {"type": "boolean"},
}


class Schemas:
    """Schemas of structs, each under the name of its class.

    Attributes:
        components: all structs that were asked for, and those within them.
    """

    def __init__(self) -> None:
        self.components: dict[str, dict[str, Any]] = {}
        self._kinds: dict[str, type[Struct]] = {}

    def ref(self, kind: type[Struct]) -> dict[str, Any]:
        """A reference to the schema of a struct. Raises InvariantError for a name of two."""
        name = kind.__name__.lstrip("_")
        if self._kinds.setdefault(name, kind) is not kind:
            raise InvariantError(f"two structs are called {name}")
        if name not in self.components:
            self.components[name] = {}  # it may hold itself
            self.components[name] = self._struct(kind)
        return {"$ref": f"#/components/schemas/{name}"}

    def of(self, kind: Any) -> dict[str, Any]:
        """The schema of any type that a field may have."""
        return self._schema(inspect.type_info(kind))

    def _struct(self, kind: type[Struct]) -> dict[str, Any]:
        info = inspect.type_info(kind)
        assert isinstance(info, inspect.StructType)
        rules, borrowed = rules_of(kind), self._borrowed(kind)
        properties = {}
        for field in info.fields:
            schema = borrowed.get(field.name) or self._schema(field.type)
            if isinstance(field.default, (bool, int, float, str)):
                schema = {**schema, "default": field.default}
            rule = rules.get(field.name)
            properties[field.encode_name] = schema if rule is None else _ruled(schema, rule)
        whole: dict[str, Any] = {"type": "object", "properties": properties}
        required = [field.encode_name for field in info.fields if field.required]
        if required:
            whole["required"] = required
        if info.forbid_unknown_fields and not getattr(kind, "OPEN", False):
            whole["additionalProperties"] = False
        told = kind.__dict__.get("__doc__")
        return {"description": _first(told), **whole} if told else whole

    def _borrowed(self, kind: type[Struct]) -> dict[str, dict[str, Any]]:
        """Schemas of fields that are left as JSON here and checked as those of another body."""
        if kind not in BORROWED:
            return {}
        owner, names = BORROWED[kind]
        hints = get_type_hints(owner, include_extras=True)
        return {name: self.of(hints[name]) for name in names}

    def _schema(self, info: inspect.Type) -> dict[str, Any]:
        if isinstance(info, inspect.StructType):
            return self.ref(info.cls)
        if type(info) in _SCALARS:
            return dict(_SCALARS[type(info)])
        known = _WRITERS.get(type(info))
        if known is None:
            raise InvariantError(f"no schema is written for {type(info).__name__}")
        return known(self, info)

    def _literal(self, info: inspect.LiteralType) -> dict[str, Any]:
        return {"enum": list(info.values)}

    def _number(self, info: inspect.IntType | inspect.FloatType) -> dict[str, Any]:
        kind = "integer" if isinstance(info, inspect.IntType) else "number"
        bounds = {name: getattr(info, bound) for bound, name in _BOUNDS.items()}
        return {"type": kind, **_given(bounds)}

    def _text(self, info: inspect.StrType) -> dict[str, Any]:
        bounds = {"minLength": info.min_length, "maxLength": info.max_length}
        return {"type": "string", **_given({**bounds, "pattern": info.pattern})}

    def _list(self, info: inspect.ListType) -> dict[str, Any]:
        bounds = {"minItems": info.min_length, "maxItems": info.max_length}
        return {"type": "array", "items": self._schema(info.item_type), **_given(bounds)}

    def _dict(self, info: inspect.DictType) -> dict[str, Any]:
        bounds = {"minProperties": info.min_length, "maxProperties": info.max_length}
        values = self._schema(info.value_type)
        return {"type": "object", "additionalProperties": values, **_given(bounds)}

    def _union(self, info: inspect.UnionType) -> dict[str, Any]:
        kinds = [self._schema(one) for one in info.types if not isinstance(one, _Unset)]
        plain = [kind["type"] for kind in kinds if set(kind) == {"type"}]
        if len(plain) == len(kinds) > 1:
            return {"type": plain}
        return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}


_Unset = type(inspect.type_info(type(UNSET)))
_WRITERS: dict[type, Callable[[Schemas, Any], dict[str, Any]]] = {
    inspect.LiteralType: Schemas._literal,
    inspect.IntType: Schemas._number,
    inspect.FloatType: Schemas._number,
    inspect.StrType: Schemas._text,
    inspect.ListType: Schemas._list,
    inspect.DictType: Schemas._dict,
    inspect.UnionType: Schemas._union,
}


def _given(bounds: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in bounds.items() if value is not None}


def _first(doc: str) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join(cleandoc(doc).split("\n\n")[0].split())


def _ruled(schema: dict[str, Any], rule: Rule) -> dict[str, Any]:
    """A field that weft does not honour, with what becomes of it."""
    fate = "refused" if isinstance(rule, Refused) else "ignored"
    why = f": {rule.reason}" if rule.reason else ""
    told = f"{fate.capitalize()}{why}."
    neutral = [orjson.dumps(value).decode() for value in rule.neutral]
    if neutral:
        told += f" These values ask for nothing: {', '.join(neutral)}."
    return {**schema, "description": told, "x-weft": fate}
