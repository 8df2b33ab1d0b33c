"""Rules for parameters: which are ignored, which are refused, and the notes on one request.

A field of a body that is not honoured says so where it is declared, by `Ignored` or `Refused`
beside its type. Decoding obeys these, and the page of parameters is made from them.

Refused is what would change the answer if it were honoured. Ignored is what is advisory, inert,
or a client's own bookkeeping; the answer names it in the header ``x-weft-ignored``.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Raw, Struct

from weft.api.errors import UnsupportedParameterError
from weft.core.errors import ParameterError

logger = logging.getLogger("weft.api")

NULL = Raw(b"null")
HEADER = "x-weft-ignored"
MAX_NEUTRAL_BYTES = 64  # of a value that asks for nothing
MAX_SHOWN_CHARS = 100  # of a name that a client made up
MAX_NAMED = 32  # parameters that headers and log lines name

_INDEX = re.compile(r"\[\d+\]")
_UNPRINTABLE = re.compile(r"[^!-+\--~]")  # of a header's list: also the blank and the comma


@dataclass(frozen=True, slots=True)
class Rule:
    """The reason why a field is ignored or refused.

    Attributes:
        reason: a clause for the page of parameters; errors of refused ones add it.
        neutral: values besides null that ask for nothing, and are let through.
    """

    reason: str = ""
    neutral: tuple[Any, ...] = ()


class Ignored(Rule):
    """The field is accepted and has no effect; refused under ``--strict``."""


class Refused(Rule):
    """The field is an error unless its value is neutral."""


@dataclass(slots=True)
class Notes:
    """The ignored parameters of one request.

    Attributes:
        strict: it is refused instead.
    """

    strict: bool = False
    _names: dict[str, None] = field(default_factory=dict)  # a set that keeps the order

    def ignore(self, name: str, refuse: Callable[[str], ParameterError] | None = None) -> None:
        """Note that a parameter has no effect. Raises the error of ``refuse`` if strict."""
        if self.strict:
            raise (refuse or UnsupportedParameterError)(name)
        if len(self._names) <= MAX_NAMED:
            self._names.setdefault(_INDEX.sub("[]", name))

    @property
    def names(self) -> list[str]:
        """The ignored parameters, each once, without the places in lists; "..." if many more."""
        named = list(islice(self._names, MAX_NAMED))
        return [*named, "..."] if len(self._names) > MAX_NAMED else named

    def log(self) -> None:
        """Write a debug line that names the ignored parameters, if there are any."""
        if self._names and logger.isEnabledFor(logging.DEBUG):
            logger.debug("Ignored parameters: %s", ", ".join(self.names))

    def header(self) -> bytes:
        """The names as a header's value."""
        shown = [_UNPRINTABLE.sub("?", name[:MAX_SHOWN_CHARS]) for name in self.names]
        return ", ".join(shown).encode()


def apply_rules(body: Struct, path: str, notes: Notes) -> None:
    """Note the ignored fields of a body, at every level.

    Raises:
        UnsupportedParameterError: a field asks for something that is refused.
    """
    for name, rule in rules_of(type(body)).items():
        value = getattr(body, name)
        if value is NULL or value is None:
            continue
        if isinstance(value, Raw) and is_neutral(bytes(value), rule.neutral):
            continue
        if isinstance(rule, Refused):
            raise UnsupportedParameterError(path + name, rule.reason and f" {_sentence(rule)}")
        notes.ignore(path + name)
    for name in body.__struct_fields__:
        value = getattr(body, name)
        if isinstance(value, Struct):
            apply_rules(value, f"{path}{name}.", notes)
        elif isinstance(value, list) and value and isinstance(value[0], Struct):
            for index, item in enumerate(value):
                apply_rules(item, f"{path}{name}[{index}].", notes)


@cache
def rules_of(kind: type[Struct]) -> dict[str, Rule]:
    """The rules of a body's fields that are not honoured."""
    hints = get_type_hints(kind, include_extras=True)
    found: dict[str, Rule] = {}
    for name in kind.__struct_fields__:
        if get_origin(hints[name]) is Annotated:
            rules = [extra for extra in get_args(hints[name])[1:] if isinstance(extra, Rule)]
            found.update((name, rule) for rule in rules)
    return found


def is_neutral(data: bytes, neutral: tuple[Any, ...] = ()) -> bool:
    """Whether a value has no effect. Long values are not decoded, as that takes long."""
    if len(data) > MAX_NEUTRAL_BYTES:
        return False
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return value is None or any(_same(value, one) for one in neutral)


def _same(value: Any, neutral: Any) -> bool:
    return type(value) is type(neutral) and bool(value == neutral)


def _sentence(rule: Rule) -> str:
    return f"{rule.reason[:1].upper()}{rule.reason[1:]}."
